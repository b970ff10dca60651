// Host memory made known to the driver, so that copies to and from it run at the link's speed.
#pragma once

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Registration {
 public:
  // Pins [start, start + size), which must outlive the registration. Needs a Device::Scope.
  // CUDA Driver API, cuMemHostRegister (portable: every context may copy from it; mapped: kernels may
  // access it).
  // Throws kHostMemory when the host cannot pin so much.
  Registration(Device& device, void* start, std::size_t size) : device_(device), start_(start) {
    const CUresult status = device_.driver().call<Call::cuMemHostRegister>(
        start, size, static_cast<unsigned>(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    if (status == CUDA_SUCCESS) return;
    Error error = device_.driver().failure(Call::cuMemHostRegister, status);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) error.kind = Kind::kHostMemory;
    error.wanted = size;
    throw error;
  }
  ~Registration() { static_cast<void>(unpin()); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Where kernels find it. Needs a Device::Scope. CUDA Driver API, cuMemHostGetDevicePointer.
  CUdeviceptr device_address() const {
    CUdeviceptr address = 0;
    device_.driver().check<Call::cuMemHostGetDevicePointer>(&address, start_, 0U);
    return address;
  }

  // The undo call. False when the memory stays pinned: then it must never be given back.
  bool unpin() noexcept {
    if (is_pinned_) is_pinned_ = !undo<Call::cuMemHostUnregister>(device_, start_);
    return !is_pinned_;
  }

 private:
  Device& device_;
  void* start_;
  bool is_pinned_ = true;
};

}  // namespace fencepool
