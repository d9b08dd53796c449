#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pilotfish {

namespace {

// Some 50 to 150 us: longer than threads differ at the end of a phase, and short where a thread waits for one that the
// system has put on the same core.
constexpr int kSpins = 4000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

// With more threads than cores a spinning thread keeps a core from the one it waits for.
Pool::Pool(int threads)
    : threads_(threads),
      spins_(threads <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0),
      process_(getpid()),
      tickets_(threads),
      workers_(std::make_unique<std::vector<std::thread>>()) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_->emplace_back([this, thread] { work(thread); });
  } catch (...) {
    close();
    throw;
  }
}

Pool::~Pool() {
  // A forked child has a copy of the handles but not the threads: there is nothing to join.
  if (getpid() == process_)
    close();
  else
    static_cast<void>(workers_.release());
}

void Pool::close() {
  stop_ = true;
  runs_.fetch_add(1);
  runs_.notify_all();
  for (std::thread& worker : *workers_) worker.join();
}

// All threads round to nearest and keep subnormal numbers, whatever some library has set in the caller: else the same
// item could give other bits on another thread.
void Pool::start(Task task, const void* context) {
  if (getpid() != process_)
    throw std::runtime_error("threads do not survive a fork: make the backend in the process that uses it");
  const std::lock_guard<std::mutex> lock(one_run_);
  task_ = task;
  context_ = context;
  first_phase_ = phases_.load();
  gate_.store(0);
  runs_.fetch_add(1);
  runs_.notify_all();
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  Member member(*this, 0, first_phase_);
  task(context, member);
  member.wait();
  fesetenv(&environment);
  for (uint32_t inside = gate_.fetch_or(kClosed) | kClosed; inside != kClosed; inside = gate_.load())
    wait_change(gate_, inside);
}

void Pool::work(int thread) {
  fesetenv(FE_DFL_ENV);
  for (uint32_t seen = 0; !stop_;) {
    wait_change(runs_, seen);
    seen = runs_.load();
    uint32_t inside = gate_.load();
    while (!(inside & kClosed) && !gate_.compare_exchange_weak(inside, inside + 1)) {
    }
    if (inside & kClosed) continue;
    Member member(*this, thread, first_phase_);
    task_(context_, member);
    if (gate_.fetch_sub(1) == kClosed + 1) gate_.notify_all();
  }
}

// The thread's next item of the phase, or another's; -1 when all are taken.
int Pool::claim(uint32_t phase, int items, int thread) {
  wait_phase(phase);
  for (int i = 0; i < threads_; ++i) {
    const int owner = (thread + i) % threads_;
    const int first = first_item(items, owner), end = first_item(items, owner + 1);
    std::atomic<uint64_t>& next = tickets_[owner].next;
    uint64_t ticket = next.load();
    while (ticket >> 32 == phase && first + static_cast<int>(ticket) < end)
      if (next.compare_exchange_weak(ticket, ticket + 1)) return first + static_cast<int>(ticket);
  }
  return -1;
}

// Whether the last of the phase's items was among these `done`.
bool Pool::is_last(int done, int items) { return done > 0 && done_.fetch_add(done) + done == items; }

void Pool::finish(uint32_t phase) {
  done_.store(0);
  for (Ticket& ticket : tickets_) ticket.next.store(static_cast<uint64_t>(phase + 1) << 32);
  phases_.store(phase + 1);
  phases_.notify_all();
}

void Pool::wait_phase(uint32_t phase) {
  for (uint32_t now = phases_.load(); static_cast<int32_t>(now - phase) < 0; now = phases_.load())
    wait_change(phases_, now);
}

void Pool::wait_change(const std::atomic<uint32_t>& word, uint32_t old) const {
  for (int spin = 0; spin < spins_; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  word.wait(old);
}

namespace {

// The least seconds of five runs of item(i) for all items.
template <class Item>
double least_seconds(Pool& pool, int items, const Item& item) {
  double least = 1e9;
  for (int turn = 0; turn < 5; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](Pool::Member& member) { member.phase(items, item); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    least = std::min(least, seconds.count());
  }
  return least;
}

}  // namespace

double read_gb_per_s(Pool& pool) {
  constexpr size_t kItem = 1 << 18, kItems = 256;  // 512 MiB of 64-bit numbers
  const std::vector<uint64_t> memory(kItem * kItems, 1);
  std::vector<uint64_t> sums(kItems);
  const double seconds = least_seconds(pool, kItems, [&](int item) {
    const uint64_t* numbers = memory.data() + kItem * item;
    uint64_t lanes[16] = {};
    for (size_t i = 0; i < kItem; i += 16)
      for (int lane = 0; lane < 16; ++lane) lanes[lane] += numbers[i + lane];
    for (const uint64_t lane : lanes) sums[item] += lane;
  });
  if (sums[0] != 5 * kItem) throw std::logic_error("the sum of what was read is wrong");  // so it cannot be left out
  return static_cast<double>(memory.size() * sizeof(uint64_t)) / seconds * 1e-9;
}

double gmac_per_s(Pool& pool, const Kernels& kernels) {
  constexpr int kGroups = 1 << 18;
  const int items = 4 * pool.threads();
  std::vector<int32_t> sums(items);
  double macs = 0.0;
  const double seconds = least_seconds(pool, items, [&](int item) {
    const int64_t done = kernels.dots(kGroups, &sums[item]);
    if (item == 0) macs = static_cast<double>(done) * items;
  });
  if (sums[0] == 0) throw std::logic_error("the sum of the products is wrong");
  return macs / seconds * 1e-9;
}

}  // namespace pilotfish
