// The pools of one transition, claimed together, and what pause and resume share.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "pool/claim.h"
#include "pool/transition.h"

namespace fencepool {

// Throws kCapture when a stream of any of the devices is being captured.
void require_no_capture(const std::vector<Device*>& devices, const StreamsByDevice& streams,
                        const char* doing);

// Bytes of the device memory behind those of the segments for which that holds.
template <class Holds>
std::size_t memory_behind(const std::vector<Segment*>& segments, Holds holds) {
  std::size_t bytes = 0;
  for (const Segment* segment : segments) {
    if (segment->physical != nullptr && holds(*segment)) bytes += segment->range.size();
  }
  return bytes;
}

class Claims {
 public:
  // Claims every pool in the order of ids. Closed ones are left out; those already in `target` are
  // unclaimed again at once and only reported, their unfinished restores kept in restores(). A paused
  // pool that still holds device memory is not in the paused state yet. Duplicates count once.
  Claims(std::vector<std::shared_ptr<Pool>> pools, State target, const char* doing,
         const Interrupt& interrupt, TransitionReport& report);
  // None yet.
  explicit Claims(TransitionReport& report) : report_(report) {}

  // Claims one more, whose id is above those before. Whoever fills several at a time does it in the order of
  // ids over all of them.
  void add(const std::shared_ptr<Pool>& pool, State target, const char* doing, const Interrupt& interrupt);
  bool is_empty() const { return claims_.empty(); }
  std::vector<std::unique_ptr<Pool::Claim>>::iterator begin() { return claims_.begin(); }
  std::vector<std::unique_ptr<Pool::Claim>>::iterator end() { return claims_.end(); }
  PoolTransition& report_of(const Pool::Claim& claim);
  const std::vector<std::shared_ptr<Fence>>& restores() const { return restores_; }

  // Each device once, in the order of the pools.
  const std::vector<Device*>& devices() const { return devices_; }
  // Those with a claimed segment for which that holds, in the same order.
  template <class Holds>
  std::vector<Device*> devices_with(Holds holds) const {
    std::vector<Device*> found;
    for (Device* device : devices_) {
      const bool is_any = std::any_of(claims_.begin(), claims_.end(), [&](const auto& claim) {
        if (&claim->device() != device) return false;
        const std::vector<Segment*> segments = claim->segments();
        return std::any_of(segments.begin(), segments.end(), holds);
      });
      if (is_any) found.push_back(device);
    }
    return found;
  }
  void require_no_capture(const StreamsByDevice& streams, const char* doing) const;
  // The driver's figures, into the report. The second never throws: by then it is done.
  void note_memory_before();
  void note_memory_after() noexcept;

 private:
  TransitionReport& report_;
  std::vector<std::unique_ptr<Pool::Claim>> claims_;
  std::vector<std::size_t> report_index_;
  std::vector<Device*> devices_;
  std::vector<std::shared_ptr<Fence>> restores_;
};

}  // namespace fencepool
