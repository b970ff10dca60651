// A stream that does not synchronise with the default stream, for copies beside the user's work.
#pragma once

#include "owners/device.h"
#include "owners/event.h"
#include "owners/undo.h"

namespace fencepool {

class Stream {
 public:
  // Needs a Device::Scope. CUDA Driver API, cuStreamCreate.
  explicit Stream(Device& device) : device_(device) {
    device_.driver().check<Call::cuStreamCreate>(&stream_, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
  }
  ~Stream() { static_cast<void>(undo<Call::cuStreamDestroy>(device_, stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void synchronize() { device_.driver().check<Call::cuStreamSynchronize>(stream_); }
  // Marks in `event` the end of what was submitted so far.
  void record(const Event& event) { device_.driver().check<Call::cuEventRecord>(event.get(), stream_); }

  Device& device() const { return device_; }
  CUstream get() const { return stream_; }

 private:
  Device& device_;
  CUstream stream_ = nullptr;
};

}  // namespace fencepool
