// A team of threads that run one function together.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace pilotfish {

// The caller and threads - 1 workers. A run is a sequence of phases. Each thread has an even share of the items of a
// phase, one after the other, and takes what others have not begun when it is done with its own; the phase is done when
// its items are. Nobody waits for a thread that holds no item: on a busy machine a worker may come late, or not at all,
// and the run goes on without it.
class Pool {
 public:
  // One thread of a run.
  class Member {
   public:
    Member(Pool& pool, int thread, uint32_t phase) : thread(thread), pool_(pool), phase_(phase) {}

    const int thread;  // 0: the caller

    // item(i) for each i of [0, items), divided among the threads; then tail() on one of them, which ends the phase.
    // Starts when all phases before it are done; may return before this one is. Without items there is no phase.
    template <class Item, class Tail>
    void phase(int items, const Item& item, const Tail& tail) {
      if (items == 0) return;
      int done = 0;
      for (int i; (i = pool_.claim(phase_, items, thread)) >= 0; ++done) item(i);
      if (pool_.is_last(done, items)) {
        tail();
        pool_.finish(phase_);
      }
      ++phase_;
    }

    template <class Item>
    void phase(int items, const Item& item) {
      phase(items, item, [] {});
    }

    // Until all phases so far are done. How many there were since the pool began, modulo 2^32.
    uint32_t wait() {
      pool_.wait_phase(phase_);
      return phase_;
    }

   private:
    Pool& pool_;
    uint32_t phase_;
  };

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // The first of a thread's own items.
  int first_item(int items, int thread) const { return static_cast<int>(int64_t{items} * thread / threads_); }

  // body(member) on the caller and on each worker that comes in time; returns when all phases are done and no thread is
  // within the body. On every thread it must go through the same phases. It must not throw. Runs from several callers
  // come one after the other. Throws std::runtime_error in a process forked from the one that made the pool: threads do
  // not survive a fork.
  template <class Body>
  void run(const Body& body) {
    start([](const void* context, Member& member) { (*static_cast<const Body*>(context))(member); }, &body);
  }

 private:
  using Task = void (*)(const void* context, Member& member);

  int claim(uint32_t phase, int items, int thread);
  bool is_last(int done, int items);
  void finish(uint32_t phase);
  void wait_phase(uint32_t phase);
  void start(Task task, const void* context);
  void close();
  void work(int thread);
  void wait_change(const std::atomic<uint32_t>& word, uint32_t old) const;

  static constexpr uint32_t kClosed = 1u << 31;

  const int threads_;
  const int spins_;
  const pid_t process_;
  std::mutex one_run_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  uint32_t first_phase_ = 0;
  std::atomic<bool> stop_{false};
  // Each on a cache line of its own: one is written while the others are watched.
  alignas(64) std::atomic<uint32_t> runs_{0};        // started so far
  alignas(64) std::atomic<uint32_t> gate_{kClosed};  // workers within the run; kClosed: no more may enter
  alignas(64) std::atomic<uint32_t> phases_{0};      // done so far
  alignas(64) std::atomic<int> done_{0};             // items of the phase that goes on
  struct alignas(64) Ticket {
    std::atomic<uint64_t> next{0};  // number of the phase that goes on, then how many of the thread's items are taken
  };
  std::vector<Ticket> tickets_;
  std::unique_ptr<std::vector<std::thread>> workers_;
};

// How fast the threads together read memory far larger than the caches: what bounds plain decoding.
double read_gb_per_s(Pool& pool);

// How many billions of multiply-adds of 4-bit by 8-bit integers the threads together do in a second, from registers.
double gmac_per_s(Pool& pool, const Kernels& kernels);

}  // namespace pilotfish
