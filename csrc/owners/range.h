// A reserved address range, without memory behind it.
#pragma once

#include "owners/device.h"
#include "owners/undo.h"

namespace fencepool {

class Range {
 public:
  // Reserves `size` bytes, a multiple of the device's granularity. Needs a Device::Scope.
  // CUDA Driver API, cuMemAddressReserve.
  Range(Device& device, std::size_t size) : device_(device), size_(size) {
    device_.driver().check<Call::cuMemAddressReserve>(&address_, size, device.granularity(), CUdeviceptr{0},
                                                      0ULL);
  }
  ~Range() { static_cast<void>(undo<Call::cuMemAddressFree>(device_, address_, size_)); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  Device& device() const { return device_; }
  CUdeviceptr address() const { return address_; }
  std::size_t size() const { return size_; }  // bytes

 private:
  Device& device_;
  CUdeviceptr address_ = 0;
  std::size_t size_;
};

}  // namespace fencepool
