#include "pool/claims.h"

#include <algorithm>
#include <utility>

#include "base/problems.h"

namespace fencepool {

namespace {

// Whether the pool's last restore is still under way, as far as can be told.
bool is_restoring(const Pool::Claim& claim) {
  if (claim.restore() == nullptr) return false;
  try {
    return !claim.restore()->is_done();
  } catch (const Error&) {
    return true;  // whoever waits for it learns why
  }
}

}  // namespace

Claims::Claims(std::vector<std::shared_ptr<Pool>> pools, State target, const char* doing,
               const Interrupt& interrupt, TransitionReport& report)
    : report_(report) {
  std::sort(pools.begin(), pools.end(), [](const auto& a, const auto& b) { return a->id() < b->id(); });
  pools.erase(std::unique(pools.begin(), pools.end()), pools.end());
  for (const auto& pool : pools) add(pool, target, doing, interrupt);
}

void Claims::add(const std::shared_ptr<Pool>& pool, State target, const char* doing,
                 const Interrupt& interrupt) {
  std::unique_ptr<Pool::Claim> claim;
  try {
    claim = std::make_unique<Pool::Claim>(pool, doing, interrupt);
  } catch (const Error& error) {
    if (error.kind == Kind::kInvalid && pool->is_closed()) return;
    throw;
  }
  PoolTransition transition;
  transition.id = pool->id();
  transition.tag = pool->tag();
  transition.device = pool->device().name();
  transition.backup = pool->policy().backup;
  const bool is_there = claim->state() == target && (target == State::kActive || !claim->holds_memory());
  if (is_there) {
    if (target == State::kActive && is_restoring(*claim)) restores_.push_back(claim->restore());
  } else {
    transition.is_changed = true;
    add_once(devices_, pool->device());
    claims_.push_back(std::move(claim));
    report_index_.push_back(report_.pools.size());
  }
  report_.pools.push_back(std::move(transition));
}

void note(TransitionReport& report, std::initializer_list<std::string_view> parts) noexcept {
  problems::record(parts);
  try {
    std::string text;
    for (const std::string_view part : parts) text += part;
    report.notes.push_back(std::move(text));
  } catch (const std::exception&) {  // recorded above, where there was memory for it
    return;
  }
}

PoolTransition& Claims::report_of(const Pool::Claim& claim) {
  const auto found =
      std::find_if(claims_.begin(), claims_.end(), [&](const auto& c) { return c.get() == &claim; });
  return report_.pools[report_index_[static_cast<std::size_t>(found - claims_.begin())]];
}

void require_no_capture(const std::vector<Device*>& devices, const StreamsByDevice& streams,
                        const char* doing) {
  for (Device* device : devices) {
    const Device::Scope scope(*device);
    const auto own = streams.find(device);
    if (device->is_capturing(own == streams.end() ? std::vector<CUstream>{} : own->second)) {
      throw Error(Kind::kCapture,
                  std::string(doing) + " on " + device->name() +
                      ": a stream of the device is being captured into a CUDA graph, which this "
                      "would break. Nothing was changed; end the capture first");
    }
  }
}

void Claims::require_no_capture(const StreamsByDevice& streams, const char* doing) const {
  fencepool::require_no_capture(devices_, streams, doing);
}

void Claims::note_memory_before() {
  for (Device* device : devices_) {
    const Device::Scope scope(*device);
    const DeviceMemory memory = device->memory();
    report_.memory.push_back({device->name(), memory.free, memory.free, memory.total});
  }
}

void Claims::note_memory_after() noexcept {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    try {
      const Device::Scope scope(*devices_[i]);
      report_.memory[i].free_after = devices_[i]->memory().free;
    } catch (const std::exception& error) {  // too late to fail: what was asked for has been done
      problems::record({"the free memory after a transition is unknown: ", error.what()});
    }
  }
}

}  // namespace fencepool
