// One address range of a pool, with or without memory behind it. It never moves while it lives.
#pragma once

#include <cstdint>
#include <memory>

#include "owners/mapping.h"
#include "pool/extents.h"
#include "pool/stand_in.h"
#include "pool/tripwire.h"

namespace fencepool {

// Members die in reverse order: unmapped, memory given back, range freed.
//
// An active segment has both `physical` and `mapping`; a paused one has neither. In between, after a
// driver call failed twice, a paused one may keep either: the next resume or pause carries on there.
struct Segment {
  Segment(Device& device, std::size_t size, std::uint64_t serial_number)
      : range(device, size), extents(size), serial(serial_number) {}

  Range range;
  std::shared_ptr<StandIn> stand_in;  // of a resident pool; kept while active too
  std::unique_ptr<Physical> physical;
  std::unique_ptr<Mapping> mapping;
  std::unique_ptr<Mapping> shown;      // the stand-in at these addresses, while paused
  std::unique_ptr<Tripwire> tripwire;  // at these addresses while paused, for debugging
  Extents extents;
  std::uint64_t serial;  // rises with each segment of the process: allocation order
  std::size_t live_blocks = 0;
  bool is_shared = false;          // small blocks that come later may lie in it
  bool has_contents_kept = false;  // paused, yet `physical` still holds the contents
  bool is_backed_up = false;       // paused, and the backup holds the contents
};

}  // namespace fencepool
