// Host memory for backups: how much there is to take, and pages that are really there.
#pragma once

#include <atomic>
#include <cstddef>

namespace fencepool::host_memory {

// Bytes that can be taken without driving the machine, or this process's control group, out of
// memory: the smaller of the kernel's MemAvailable and what the group's limit leaves.
// The largest value of the type when neither can be read.
std::size_t available();

// Memory that is about to be taken, while it lives: later promises count it as gone already.
class Promise {
 public:
  // Throws Error(kHostMemory) when `bytes` more are not available. FENCEPOOL_HOST_MEMORY_CHECK=0 turns
  // the check off, for virtual machines whose memory grows only when it is used.
  explicit Promise(std::size_t bytes);
  ~Promise();
  // So many of the bytes have been taken: the kernel counts them from now on. Thread-safe.
  void fulfil(std::size_t bytes) noexcept;
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

 private:
  std::atomic<std::size_t> left_;
};

// Private anonymous memory, without pages behind it yet, aligned for huge pages and preferring them.
class Reservation {
 public:
  // Throws Error(kHostMemory). `numa_node` is preferred for the pages; -1: no preference.
  Reservation(std::size_t size, int numa_node);
  // Takes the first `size` bytes from another one, which keeps the rest: parts of one reservation lie one
  // after the other, and are given back each by itself.
  Reservation(Reservation& whole, std::size_t size) noexcept;
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Puts pages behind all of it. Whether there are enough is Promise's business: the kernel offers no
  // way to be told here.
  void populate();
  // Forgets the memory without giving it back: something may still write to it.
  void leak() noexcept { start_ = nullptr; }

  char* start() const { return start_; }
  std::size_t size() const { return size_; }  // bytes

 private:
  char* start_ = nullptr;
  std::size_t size_;
};

}  // namespace fencepool::host_memory
