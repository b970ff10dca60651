// A little pinned host memory that kernels write to.
#pragma once

#include "backup/host_buffer.h"

namespace fencepool {

class PinnedMemory {
 public:
  // At least `size` bytes. Needs a Device::Scope. Throws kHostMemory.
  PinnedMemory(Device& device, std::size_t size)
      : whole_(size, device.numa_node()), chunk_(whole_, whole_.size()) {
    chunk_.memory.populate();
    chunk_.registration = std::make_unique<Registration>(device, chunk_.memory.start(), chunk_.memory.size());
    device_address_ = chunk_.registration->device_address();
  }

  // Kernels may still write to it: it stays for good.
  void leak() noexcept { chunk_.leak(); }

  const void* start() const { return chunk_.memory.start(); }
  CUdeviceptr device_address() const { return device_address_; }
  std::size_t size() const { return chunk_.memory.size(); }  // bytes

 private:
  host_memory::Reservation whole_;  // hands its memory over to the chunk
  HostChunk chunk_;
  CUdeviceptr device_address_ = 0;
};

}  // namespace fencepool
