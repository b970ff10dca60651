// A page of a pattern at the addresses of a paused segment, over and over.
#pragma once

#include <memory>

#include "owners/mapping.h"

namespace fencepool {

class Tripwire {
 public:
  // Maps the page at every granule of the range, all of which it covers then. Throws; nothing is mapped then.
  Tripwire(Range& range, std::shared_ptr<const Physical> page) : range_(range), page_(std::move(page)) {
    Driver& driver = range.device().driver();
    Call failed = Call::cuMemMap;
    CUresult status = CUDA_SUCCESS;
    std::size_t mapped = 0;
    while (mapped < range.size()) {
      status = driver.call<Call::cuMemMap>(range.address() + mapped, page_->size(), std::size_t{0},
                                           page_->handle(), 0ULL);
      if (status != CUDA_SUCCESS) break;
      mapped += page_->size();
    }
    if (status == CUDA_SUCCESS) {
      const Device::Accesses granted = range.device().accesses(page_->where());
      failed = Call::cuMemSetAccess;
      status =
          driver.call<Call::cuMemSetAccess>(range.address(), range.size(), granted.who.data(), granted.count);
    }
    if (status == CUDA_SUCCESS) return;
    if (mapped > 0) static_cast<void>(undo<Call::cuMemUnmap>(range.device(), range.address(), mapped));
    throw driver.failure(failed, status);
  }
  ~Tripwire() {
    if (is_mapped_)
      static_cast<void>(undo<Call::cuMemUnmap>(range_.device(), range_.address(), range_.size()));
  }
  Tripwire(const Tripwire&) = delete;
  Tripwire& operator=(const Tripwire&) = delete;

  // The undo call where its failure can be acted on: on failure it is still mapped.
  CUresult unmap() noexcept {
    const CUresult status = range_.device().driver().call<Call::cuMemUnmap>(range_.address(), range_.size());
    is_mapped_ = status != CUDA_SUCCESS;
    return status;
  }

  const Range& range() const { return range_; }
  std::size_t page_size() const { return page_->size(); }  // bytes

 private:
  Range& range_;
  std::shared_ptr<const Physical> page_;
  bool is_mapped_ = true;
};

}  // namespace fencepool
