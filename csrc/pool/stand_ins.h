// Making the host memory that stands in for a resident pool's segments, and leaving it.
#pragma once

#include <vector>

#include "pool/claim.h"
#include "pool/claims.h"

namespace fencepool {

class StandIns {
 public:
  // Makes one for each segment that has none: a quarter of a second for a gibibyte, on an H200. Needs a
  // Device::Scope. Throws kHostMemory, kDriver; nothing has changed then.
  StandIns(Pool::Claim& claim, const Interrupt& interrupt);
  // Unless they were kept, the new ones go again, except from a pool that is paused by now.
  ~StandIns();
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  // Host memory that the segments without one will take.
  static std::size_t bytes_missing(const Pool::Claim& claim);
  void keep() noexcept { made_.clear(); }
  std::size_t bytes_added() const { return bytes_added_; }

 private:
  void drop() noexcept;

  Pool::Claim& claim_;
  std::vector<Segment*> made_;
  std::size_t bytes_added_ = 0;
};

// Waits for the work that may still use host memory at the addresses of claimed pools: it must not see the
// mappings change. Returns whether there are any such addresses.
bool quiesce_stand_ins(Claims& claims, const Interrupt& interrupt);

}  // namespace fencepool
