// Physical memory mapped at a range, readable and writable by its device.
#pragma once

#include "owners/physical.h"
#include "owners/range.h"

namespace fencepool {

class Mapping {
 public:
  // Maps all of `physical` over all of `range` and grants access; both must outlive the mapping.
  // When access cannot be granted the mapping is undone. CUDA Driver API, cuMemMap, cuMemSetAccess.
  Mapping(Range& range, const Physical& physical) : range_(range) {
    Driver& driver = range.device().driver();
    driver.check<Call::cuMemMap>(range.address(), range.size(), std::size_t{0}, physical.handle(), 0ULL);
    const CUmemAccessDesc granted = range.device().access();
    const CUresult status =
        driver.call<Call::cuMemSetAccess>(range.address(), range.size(), &granted, std::size_t{1});
    if (status != CUDA_SUCCESS) {
      static_cast<void>(undo<Call::cuMemUnmap>(range.device(), range.address(), range.size()));
      throw driver.failure(Call::cuMemSetAccess, status);
    }
    is_mapped_ = true;
  }
  ~Mapping() {
    if (is_mapped_)
      static_cast<void>(undo<Call::cuMemUnmap>(range_.device(), range_.address(), range_.size()));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // The undo call where its failure can be acted on: on failure it is still mapped.
  CUresult unmap() noexcept {
    const CUresult status = range_.device().driver().call<Call::cuMemUnmap>(range_.address(), range_.size());
    is_mapped_ = status != CUDA_SUCCESS;
    return status;
  }

 private:
  Range& range_;
  bool is_mapped_ = false;
};

}  // namespace fencepool
