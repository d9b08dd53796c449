// The pool under many random phases: each item runs once, a phase sees all of the phase before it.
#include "../pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <chrono>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"

using pilotfish::Pool;

namespace {

// Phase n moves every cell from n to n + 1 by way of a neighbour, with plain memory: a race would show here, and the
// thread sanitizer would name it.
void test_phases(Pool& pool, std::mt19937& random, int runs) {
  for (int run = 0; run < runs; ++run) {
    const int items = static_cast<int>(random() % 40), phases = static_cast<int>(random() % 50);
    std::vector<int> cells[2] = {std::vector<int>(items, 0), std::vector<int>(items, -1)};
    std::vector<int> kinds(phases);
    for (int& kind : kinds) kind = static_cast<int>(random() % 3);
    int tails = 0, expected_tails = 0;
    for (const int kind : kinds) expected_tails += kind == 1 && items > 0;
    pool.run([&](Pool::Member& member) {
      for (int phase = 0; phase < phases; ++phase) {
        const std::vector<int>& from = cells[phase % 2];
        std::vector<int>& to = cells[1 - phase % 2];
        auto move = [&](int item) { to[item] = from[(item + 1) % items] + 1; };
        if (kinds[phase] == 1) {
          member.phase(items, move, [&] {  // when all are done, before the next phase
            ++tails;
            for (const int cell : to) CHECK(cell == phase + 1);
          });
        } else if (kinds[phase] == 2) {
          member.phase(1, [&](int) {
            for (int item = 0; item < items; ++item) move(item);
          });
        } else {
          member.phase(items, move);
        }
      }
    });
    for (const int cell : cells[phases % 2]) CHECK(cell == phases);
    CHECK(tails == expected_tails);
    // Long enough for the workers to fall asleep, now and then.
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void test_slow_items(Pool& pool) {
  std::vector<int> done(3, 0);
  pool.run([&](Pool::Member& member) {
    for (int phase = 0; phase < 3; ++phase)
      member.phase(3, [&](int item) {
        if (item == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ++done[item];
      });
  });
  for (const int count : done) CHECK(count == 3);
}

void test_callers_take_turns(Pool& pool) {
  int total = 0;  // safe only if the runs do not overlap
  auto caller = [&] {
    for (int run = 0; run < 50; ++run) pool.run([&](Pool::Member& member) { member.phase(1, [&](int) { ++total; }); });
  };
  std::thread other(caller);
  caller();
  other.join();
  CHECK(total == 100);
}

void test_rounding(Pool& pool) {
  std::fesetround(FE_UPWARD);
  std::vector<int> modes(64, -1);
  pool.run([&](Pool::Member& member) {
    member.phase(64, [&](int item) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      modes[item] = std::fegetround();
    });
  });
  for (const int mode : modes) CHECK(mode == FE_TONEAREST);
  CHECK(std::fegetround() == FE_UPWARD);
  std::fesetround(FE_TONEAREST);
}

// Both threads are needed: each of two items waits for the other.
void test_threads_share(Pool& pool) {
  for (int run = 0; run < 20; ++run) {
    std::atomic<int> here{0};
    std::vector<int> threads(2);
    pool.run([&](Pool::Member& member) {
      member.phase(2, [&](int item) {
        threads[item] = member.thread;
        ++here;
        while (here < 2) std::this_thread::yield();
      });
    });
    CHECK(threads[0] != threads[1]);
  }
}

// In the child there are no workers: refusing is right, waiting for them would hang.
void test_fork() {
  Pool pool(2);
  const pid_t child = fork();
  if (child == 0) {
    try {
      pool.run([](Pool::Member&) {});
    } catch (const std::runtime_error&) {
      _exit(7);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    test_phases(pool, random, 100);
    test_slow_items(pool);
    test_callers_take_turns(pool);
    test_rounding(pool);
    if (threads > 1) test_threads_share(pool);
  }
  for (int i = 0; i < 50; ++i) Pool idle(4);
  test_fork();
  return 0;
}
