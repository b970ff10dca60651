// A little pinned host memory that kernels write to. It is no part of a backup, and no budget counts it.
#pragma once

#include <memory>

#include "base/host_memory.h"
#include "owners/registration.h"

namespace fencepool {

class PinnedMemory {
 public:
  // At least `size` bytes. Needs a Device::Scope. Throws kHostMemory.
  PinnedMemory(Device& device, std::size_t size) : pinned_(size, device.numa_node()) {
    pinned_.memory.populate();
    pinned_.registration =
        std::make_unique<Registration>(device, pinned_.memory.start(), pinned_.memory.size());
    device_address_ = pinned_.registration->device_address();
  }

  // Kernels may still write to it: it stays for good.
  void leak() noexcept {
    static_cast<void>(pinned_.registration.release());
    pinned_.memory.leak();
  }

  const void* start() const { return pinned_.memory.start(); }
  CUdeviceptr device_address() const { return device_address_; }
  std::size_t size() const { return pinned_.memory.size(); }  // bytes

 private:
  // Unpinned first, then given back; what cannot be unpinned is leaked.
  struct Pinned {
    Pinned(std::size_t size, int numa_node) : memory(size, numa_node) {}
    ~Pinned() {
      if (registration != nullptr && !registration->unpin()) memory.leak();
    }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

    host_memory::Reservation memory;
    std::unique_ptr<Registration> registration;
  };

  Pinned pinned_;
  CUdeviceptr device_address_ = 0;
};

}  // namespace fencepool
