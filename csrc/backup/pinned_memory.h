// A little pinned host memory that kernels write to.
#pragma once

#include "base/host_memory.h"
#include "owners/registration.h"

namespace fencepool {

class PinnedMemory {
 public:
  // At least `size` bytes. Needs a Device::Scope. Throws kHostMemory.
  PinnedMemory(Device& device, std::size_t size) : memory_(size, device.numa_node()) {
    memory_.populate();
    registration_ = std::make_unique<Registration>(device, memory_.start(), memory_.size());
    device_address_ = registration_->device_address();
  }
  ~PinnedMemory() {
    if (registration_ != nullptr && !registration_->unpin()) memory_.leak();
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  // Kernels may still write to it: it stays for good.
  void leak() noexcept {
    static_cast<void>(registration_.release());
    memory_.leak();
  }

  const void* start() const { return memory_.start(); }
  CUdeviceptr device_address() const { return device_address_; }
  std::size_t size() const { return memory_.size(); }  // bytes

 private:
  host_memory::Reservation memory_;
  std::unique_ptr<Registration> registration_;
  CUdeviceptr device_address_ = 0;
};

}  // namespace fencepool
