// Physical memory mapped at a range, readable and writable by its device, and by the processor where it is
// the host's.
#pragma once

#include <utility>

#include "owners/physical.h"
#include "owners/range.h"

namespace fencepool {

class Mapping {
 public:
  // Maps all of `physical` over all of `range` and grants access; both must outlive the mapping.
  // When access cannot be granted the mapping is undone. CUDA Driver API, cuMemMap, cuMemSetAccess.
  Mapping(Range& range, const Physical& physical) : range_(range) {
    Call failed = Call::cuMemMap;
    const CUresult status = map(physical, failed);
    if (status != CUDA_SUCCESS) throw range.device().driver().failure(failed, status);
  }
  ~Mapping() { static_cast<void>(give_back()); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // As the destructor does. False when it had to be leaked.
  bool give_back() noexcept {
    return !std::exchange(is_mapped_, false) ||
           undo<Call::cuMemUnmap>(range_.device(), range_.address(), range_.size());
  }
  // The undo call where its failure can be acted on: on failure it is still mapped.
  CUresult unmap() noexcept {
    const CUresult status = range_.device().driver().call<Call::cuMemUnmap>(range_.address(), range_.size());
    is_mapped_ = status != CUDA_SUCCESS;
    return status;
  }
  // Maps anew what was unmapped, without a need for memory of our own. Says which call failed.
  CUresult map(const Physical& physical, Call& failed) noexcept {
    Driver& driver = range_.device().driver();
    failed = Call::cuMemMap;
    CUresult status =
        driver.call<Call::cuMemMap>(range_.address(), range_.size(), std::size_t{0}, physical.handle(), 0ULL);
    if (status != CUDA_SUCCESS) return status;
    const Device::Accesses granted = range_.device().accesses(physical.where());
    failed = Call::cuMemSetAccess;
    status =
        driver.call<Call::cuMemSetAccess>(range_.address(), range_.size(), granted.who.data(), granted.count);
    is_mapped_ = status == CUDA_SUCCESS;
    if (!is_mapped_) {
      static_cast<void>(undo<Call::cuMemUnmap>(range_.device(), range_.address(), range_.size()));
    }
    return status;
  }

 private:
  Range& range_;
  bool is_mapped_ = false;
};

}  // namespace fencepool
