#include "pool/tripwires.h"

#include <algorithm>
#include <atomic>

#include "base/problems.h"
#include "pool/quiesce.h"

namespace fencepool::tripwires {
namespace {

std::atomic<bool> is_wanted{false};

bool leads_nowhere(const Segment& segment) {
  return segment.mapping == nullptr && segment.shown == nullptr && segment.tripwire == nullptr;
}

void lay(const Pool::Claim& claim) {
  const Device::Scope scope(claim.device());
  std::shared_ptr<Physical> page;
  for (Segment* segment : claim.segments()) {
    if (!leads_nowhere(*segment)) continue;
    const bool is_new = page == nullptr;
    if (is_new) page = std::make_shared<Physical>(claim.device(), claim.device().granularity());
    auto tripwire = std::make_unique<Tripwire>(segment->range, page);
    if (is_new) {
      claim.device().driver().check<Call::cuMemsetD8Async>(segment->range.address(), kPattern, page->size(),
                                                           claim.stream().get());
      claim.stream().synchronize();
    }
    segment->tripwire = std::move(tripwire);
  }
}

// What differs from the pattern in a claimed pool's page.
StrayWrites strays_in(const Pool::Claim& claim, const Tripwire& tripwire) {
  std::vector<unsigned char> bytes(tripwire.page_size());
  const Device::Scope scope(claim.device());
  claim.device().driver().check<Call::cuMemcpyDtoHAsync>(
      static_cast<void*>(bytes.data()), tripwire.range().address(), bytes.size(), claim.stream().get());
  claim.stream().synchronize();
  StrayWrites strays;
  strays.id = claim.pool().id();
  strays.page = bytes.size();
  const auto is_wrong = [](unsigned char byte) { return byte != kPattern; };
  strays.bytes = static_cast<std::size_t>(std::count_if(bytes.begin(), bytes.end(), is_wrong));
  strays.first = static_cast<std::size_t>(std::find_if(bytes.begin(), bytes.end(), is_wrong) - bytes.begin());
  return strays;
}

const Tripwire* tripwire_of(const Pool::Claim& claim) {
  for (const Segment* segment : claim.segments()) {
    if (segment->tripwire != nullptr) return segment->tripwire.get();
  }
  return nullptr;
}

}  // namespace

void set_on(bool is_on) noexcept { is_wanted = is_on; }

void lay(Claims& claims) noexcept {
  if (!is_wanted) return;
  for (const auto& claim : claims) {
    try {
      lay(*claim);
    } catch (const std::exception& error) {
      problems::record(
          {claim->pool().tag(), ": no page for stray accesses while it is paused: ", error.what()});
    }
  }
}

void look(Claims& claims, TransitionReport& report, const Interrupt& interrupt) {
  const std::vector<Device*> devices =
      claims.devices_with([](const Segment* segment) { return segment->tripwire != nullptr; });
  if (devices.empty()) return;
  quiesce(devices, -1, interrupt);
  for (const auto& claim : claims) {
    const Tripwire* tripwire = tripwire_of(*claim);
    if (tripwire == nullptr) continue;
    const StrayWrites strays = strays_in(*claim, *tripwire);
    if (strays.bytes == 0) continue;
    report.strays.push_back(strays);
    problems::record({claim->pool().describe(), ": was written to while it was paused"});
  }
}

}  // namespace fencepool::tripwires
