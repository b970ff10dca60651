// A mutex, a lock and a condition variable that clang's thread-safety analysis understands.
//
// Lock order, outermost first: the GIL, registry, pool, staging, device, driver, problems. A thread that
// holds one never takes one further out. No lock is held across a copy or a wait for the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define FENCEPOOL_TSA(x) __attribute__((x))
#else
#define FENCEPOOL_TSA(x)
#endif
#define CAPABILITY(x) FENCEPOOL_TSA(capability(x))
#define SCOPED_CAPABILITY FENCEPOOL_TSA(scoped_lockable)
#define GUARDED_BY(x) FENCEPOOL_TSA(guarded_by(x))
#define REQUIRES(...) FENCEPOOL_TSA(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) FENCEPOOL_TSA(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) FENCEPOOL_TSA(acquire_capability(__VA_ARGS__))
#define RELEASE(...) FENCEPOOL_TSA(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS FENCEPOOL_TSA(no_thread_safety_analysis)

namespace fencepool {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() RELEASE() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits atomically release the mutex and take it again before they return.
class Condition {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> inner(mutex.mutex_, std::adopt_lock);
    condition_.wait(inner);
    inner.release();
  }
  // The same, for at most `limit`.
  void wait_for(Mutex& mutex, std::chrono::milliseconds limit) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> inner(mutex.mutex_, std::adopt_lock);
    condition_.wait_for(inner, limit);
    inner.release();
  }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace fencepool
