// Host memory made known to the driver, so that copies to and from it run at the link's speed.
#pragma once

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Registration {
 public:
  // Pins [start, start + size), which must outlive the registration. Needs a Device::Scope.
  // CUDA Driver API, cuMemHostRegister (portable: every context may copy from it).
  Registration(Device& device, void* start, std::size_t size) : device_(device), start_(start) {
    device_.driver().check<Call::cuMemHostRegister>(start, size, static_cast<unsigned>(CU_MEMHOSTREGISTER_PORTABLE));
  }
  ~Registration() { undo<Call::cuMemHostUnregister>(device_, start_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  Device& device_;
  void* start_;
};

}  // namespace fencepool
