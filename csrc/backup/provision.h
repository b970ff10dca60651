// Growing a host buffer: pages are put behind new chunks and pinned on several threads, while the
// chunks that are ready are already copied to.
//
// Pinning through cuMemHostAlloc takes about ten times as long as touching huge pages on several threads
// and registering them, and most of that hides behind the copies (docs/design.md has the figures).
#pragma once

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "backup/host_buffer.h"
#include "base/interrupt.h"
#include "base/mutex.h"

namespace fencepool {

class Provision {
 public:
  static constexpr std::size_t kChunk = std::size_t{128} << 20;  // bytes
  // With fewer threads that touch, touching is what takes the time. One thread pins: the driver
  // serialises pinning, and two at it were seen to take turns so badly that all took 200 ms longer.
  static constexpr std::size_t kTouchingThreads = 13;

  // Starts to grow `buffer` to at least `bytes`. Throws kHostMemory when the host has not enough;
  // nothing has changed then.
  Provision(HostBuffer& buffer, std::size_t bytes);
  // Unless kept, takes the new chunks away again.
  ~Provision();
  Provision(const Provision&) = delete;
  Provision& operator=(const Provision&) = delete;

  // Waits until that chunk can be copied to. Throws what went wrong on a thread.
  void wait(std::size_t chunk, const Interrupt& interrupt) EXCLUDES(mutex_);
  // Waits for all; the new chunks stay in the buffer.
  void keep(const Interrupt& interrupt) EXCLUDES(mutex_);
  std::size_t bytes_added() const { return bytes_added_; }

 private:
  void start_threads();
  void touch() EXCLUDES(mutex_);
  void pin() EXCLUDES(mutex_);
  template <class Work>
  void guarded(Work work) noexcept EXCLUDES(mutex_);
  void join() noexcept;

  HostBuffer& buffer_;
  std::unique_ptr<host_memory::Promise> promise_;  // until the pages are there
  std::size_t first_new_;                          // index of the first new chunk
  std::size_t bytes_added_ = 0;
  bool is_kept_ = false;
  std::atomic<std::size_t> next_touched_;
  std::atomic<bool> is_stopped_{false};
  std::vector<std::thread> threads_;
  Mutex mutex_;
  Condition changed_;
  enum class Step : char { kEmpty, kTouched, kPinned };
  std::vector<Step> steps_ GUARDED_BY(mutex_);  // of each new chunk
  // The caller has what it waited for, and submits copies: no new pinning starts, since its calls would
  // wait behind that.
  bool is_submitting_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
};

}  // namespace fencepool
