// A reader-writer lock that lets a waiting writer go first.
//
// std::shared_mutex may starve writers: with two streams copying without pause, cuMemUnmap would wait for
// the end of both. glibc's writer-preferring kind has no such gap. Readers must not lock it twice.
#pragma once

#include <pthread.h>

#include <system_error>

namespace fencepool::host_driver {

// Meets the standard's SharedMutex operations that std::unique_lock and std::shared_lock need.
class SharedMutex {
 public:
  SharedMutex() {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    const int status = pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    check(status);
  }
  ~SharedMutex() { pthread_rwlock_destroy(&lock_); }
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;

  void lock() { check(pthread_rwlock_wrlock(&lock_)); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { check(pthread_rwlock_rdlock(&lock_)); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  static void check(int status) {
    if (status != 0) throw std::system_error(status, std::generic_category());
  }
  pthread_rwlock_t lock_{};
};

}  // namespace fencepool::host_driver
