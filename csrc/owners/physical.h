// Physical device memory, not mapped anywhere by itself.
#pragma once

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Physical {
 public:
  // Takes `size` bytes, a multiple of the device's granularity, from the driver.
  // CUDA Driver API, cuMemCreate. Throws kOutOfMemory.
  Physical(Device& device, std::size_t size) : device_(device), size_(size) {
    const CUmemAllocationProp wanted = device.properties();
    device_.driver().check<Call::cuMemCreate>(&handle_, size, &wanted, 0ULL);
    is_held_ = true;
  }
  ~Physical() {
    if (is_held_) static_cast<void>(undo<Call::cuMemRelease>(device_, handle_));
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  // The undo call where its failure can be acted on: on failure the memory is still held.
  CUresult release() noexcept {
    const CUresult status = device_.driver().call<Call::cuMemRelease>(handle_);
    is_held_ = status != CUDA_SUCCESS;
    return status;
  }

  CUmemGenericAllocationHandle handle() const { return handle_; }
  std::size_t size() const { return size_; }  // bytes

 private:
  Device& device_;
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t size_;
  bool is_held_ = false;
};

}  // namespace fencepool
