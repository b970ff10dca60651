// A few threads for calls that hold whoever makes them: reads and writes of a file.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace fencepool {

class JobThreads {
 public:
  // Outlives the threads that do it, and does not move.
  class Job {
   public:
    // Whether it has ended. Throws what it failed with.
    bool is_done() const {
      if (!is_done_) return false;
      if (failure_) std::rethrow_exception(failure_);
      return true;
    }

   private:
    friend class JobThreads;
    std::function<void()> work_;
    std::exception_ptr failure_;  // written before is_done_
    std::atomic<bool> is_done_{false};
  };

  // Throws kHostMemory when not even one can be started.
  explicit JobThreads(std::size_t count);
  // Jobs that have not begun are dropped; the others are awaited.
  ~JobThreads();
  JobThreads(const JobThreads&) = delete;
  JobThreads& operator=(const JobThreads&) = delete;

  void submit(Job& job, std::function<void()> work) EXCLUDES(mutex_);
  // Whether there are threads with nothing to do.
  bool has_idle() const EXCLUDES(mutex_);
  std::size_t ended() const EXCLUDES(mutex_);  // jobs, so far
  // Returns once more than `before` have ended, or after 50 ms.
  void wait(std::size_t before) EXCLUDES(mutex_);

 private:
  void run() EXCLUDES(mutex_);

  mutable Mutex mutex_;
  Condition changed_;
  std::deque<Job*> waiting_ GUARDED_BY(mutex_);
  std::size_t at_work_ GUARDED_BY(mutex_) = 0;
  std::size_t ended_ GUARDED_BY(mutex_) = 0;
  bool is_stopped_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace fencepool
