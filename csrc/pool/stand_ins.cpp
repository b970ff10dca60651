#include "pool/stand_ins.h"

#include "base/host_memory.h"
#include "pool/quiesce.h"

namespace fencepool {

StandIns::StandIns(Pool::Claim& claim, const Interrupt& interrupt) : claim_(claim) {
  std::vector<Segment*> lacking;
  for (Segment* segment : claim.segments()) {
    if (segment->stand_in == nullptr) lacking.push_back(segment);
  }
  const std::size_t bytes = bytes_missing(claim);
  if (lacking.empty()) return;
  host_memory::Promise promise(bytes);
  made_.reserve(lacking.size());
  try {
    for (Segment* segment : lacking) {
      segment->stand_in = std::make_shared<StandIn>(claim.device(), segment->range.size());
      made_.push_back(segment);
      promise.fulfil(segment->range.size());
      if (interrupt) interrupt();
    }
  } catch (...) {
    drop();
    throw;
  }
  bytes_added_ = bytes;
}

std::size_t StandIns::bytes_missing(const Pool::Claim& claim) {
  std::size_t bytes = 0;
  for (const Segment* segment : claim.segments()) {
    if (segment->stand_in == nullptr) bytes += segment->range.size();
  }
  return bytes;
}

StandIns::~StandIns() {
  if (claim_.state() != State::kPaused) drop();
}

void StandIns::drop() noexcept {
  // Copies that could not be awaited may still write there: then the segment keeps it.
  if (claim_.buffer().is_unsettled()) return;
  for (Segment* segment : made_) {
    if (segment->shown == nullptr) segment->stand_in.reset();
  }
}

bool quiesce_stand_ins(Claims& claims, const Interrupt& interrupt) {
  const std::vector<Device*> devices =
      claims.devices_with([](const Segment* segment) { return segment->shown != nullptr; });
  if (!devices.empty()) quiesce(devices, -1, interrupt);
  return !devices.empty();
}

}  // namespace fencepool
