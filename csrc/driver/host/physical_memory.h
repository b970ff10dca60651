// Physical memory: one anonymous file (memfd) an allocation, shared by whoever maps or imports it.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <utility>

#include "driver/host/devices.h"
#include "driver/host/entry.h"
#include "driver/host/host_driver.h"

namespace fencepool::host_driver {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

// In place of a device: memory of the host's NUMA node, which is in no device's account.
inline constexpr int kOnHost = -1;

// Owns one memfd and its place in the device's account. The last owner (a handle or a mapping) frees the
// memory: the descriptor is closed, then the device is credited, so that memory reported free is free.
// Immutable, hence thread-safe.
class Physical {
 public:
  // New memory of `size` bytes. Pages come into being when they are first touched, unless the device's
  // memory is poisoned (memory of the host: with device 0's). OUT_OF_MEMORY past the device's limit; nothing
  // is held after a failure.
  static CUresult create(int device, std::size_t size, bool is_exportable, std::shared_ptr<Physical>& made);

  // Memory another owner made, from its descriptor, which stays the caller's. INVALID_VALUE when it is not
  // one of ours. It counts in the account of the process that created it, not here.
  static CUresult import(int descriptor, std::shared_ptr<Physical>& made);

  Physical(int device, bool is_exportable, HeldMemory held, Descriptor descriptor, const struct stat& status);
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  int descriptor() const { return descriptor_.number(); }
  // A new descriptor of the memory, the caller's to close; -1 when there is none (errno says why).
  int duplicate() const;
  // Whether both are one and the same memory.
  bool is_same(const Physical& other) const {
    return file_system_ == other.file_system_ && file_ == other.file_;
  }

  bool is_on_host() const { return device == kOnHost; }

  const int device;
  const std::size_t size;
  const bool is_exportable;

 private:
  const dev_t file_system_;
  const ino_t file_;
  // In this order: the descriptor is closed first.
  const HeldMemory held_;
  const Descriptor descriptor_;
};

// The CUDA error for a failed system call that allocates: OUT_OF_MEMORY, or OPERATING_SYSTEM.
CUresult allocation_error(int error_number);

}  // namespace fencepool::host_driver
