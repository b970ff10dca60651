// A CUDA event without timing: a point in the device's work that can be waited for.
#pragma once

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Event {
 public:
  // Needs a Device::Scope. CUDA Driver API, cuEventCreate.
  explicit Event(Device& device) : device_(device) {
    device_.driver().check<Call::cuEventCreate>(&event_, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING));
  }
  ~Event() { static_cast<void>(undo<Call::cuEventDestroy>(device_, event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Whether the recorded work has ended. NOT_READY is a value; a failure of that work is thrown.
  bool is_done() const {
    const CUresult status = device_.driver().call<Call::cuEventQuery>(event_);
    if (status == CUDA_SUCCESS) return true;
    if (status == CUDA_ERROR_NOT_READY) return false;
    throw device_.driver().failure(Call::cuEventQuery, status);
  }

  Device& device() const { return device_; }
  CUevent get() const { return event_; }

 private:
  Device& device_;
  CUevent event_ = nullptr;
};

}  // namespace fencepool
