// Physical memory of a device or of its host, not mapped anywhere by itself.
#pragma once

#include <utility>

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Physical {
 public:
  // Takes `size` bytes, a multiple of the device's granularity, from the driver.
  // CUDA Driver API, cuMemCreate. Throws kOutOfMemory, kHostMemory for memory of the host.
  Physical(Device& device, std::size_t size, Where where = Where::kDevice)
      : device_(device), size_(size), where_(where) {
    const CUmemAllocationProp wanted = device.properties(where);
    const CUresult status = device_.driver().call<Call::cuMemCreate>(&handle_, size, &wanted, 0ULL);
    if (status != CUDA_SUCCESS) {
      Error error = device_.driver().failure(Call::cuMemCreate, status);
      if (error.kind == Kind::kOutOfMemory && where == Where::kHost) error.kind = Kind::kHostMemory;
      throw error;
    }
    is_held_ = true;
  }
  ~Physical() { static_cast<void>(give_back()); }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  // As the destructor does. False when it had to be leaked.
  bool give_back() noexcept {
    return !std::exchange(is_held_, false) || undo<Call::cuMemRelease>(device_, handle_);
  }
  // The undo call where its failure can be acted on: on failure the memory is still held.
  CUresult release() noexcept {
    const CUresult status = device_.driver().call<Call::cuMemRelease>(handle_);
    is_held_ = status != CUDA_SUCCESS;
    return status;
  }

  CUmemGenericAllocationHandle handle() const { return handle_; }
  std::size_t size() const { return size_; }  // bytes
  Where where() const { return where_; }

 private:
  Device& device_;
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t size_;
  Where where_;
  bool is_held_ = false;
};

}  // namespace fencepool
