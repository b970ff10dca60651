// Giving blocks and segments back: by event, without stopping the device, and never by throwing.
#include <algorithm>
#include <atomic>

#include "base/problems.h"
#include "base/process.h"
#include "pool/pool.h"

namespace fencepool {

void Pool::give_back(Segment& segment, std::size_t offset, std::size_t size) noexcept {
  if (process::is_forked_child()) return;
  try {
    const Lock lock(mutex_);
    freed_.push_back({&segment, offset, size, nullptr});
    if (claimed_for_ != nullptr) return;  // the transition sees to it when it ends
    const Device::Scope scope(device_);
    reap(/*is_idle=*/state_ == State::kPaused);
  } catch (const std::exception& error) {
    problems::record(describe() + ": a freed block is kept for now: " + error.what());
  }
}

// Records the device's work so far behind the blocks freed since the last time. While a stream of
// the device captures, a context-wide record would break the capture: later, then. The same where
// the driver has no cuCtxRecordEvent: those blocks wait for the next pause, or for memory to run out.
void Pool::order_freed() {
  const auto is_unordered = [](const Freed& freed) { return freed.after == nullptr; };
  if (std::none_of(freed_.begin(), freed_.end(), is_unordered)) return;
  if (!device_.driver().has<Call::cuCtxRecordEvent>() || device_.is_capturing()) return;
  const auto event = std::make_shared<Event>(device_);
  device_.driver().check<Call::cuCtxRecordEvent>(device_.context(), event->get());
  for (Freed& freed : freed_) {
    if (freed.after == nullptr) freed.after = event;
  }
}

// Gives back the freed blocks whose last work has ended; all of them when the device is idle for
// this pool. Needs a Device::Scope.
void Pool::reap(bool is_idle) {
  if (freed_.empty()) return;
  try {
    if (!is_idle) order_freed();
    for (std::size_t i = 0; i < freed_.size();) {
      const Freed freed = freed_[i];
      if (!is_idle && (freed.after == nullptr || !freed.after->is_done())) {
        ++i;
        continue;
      }
      freed.segment->extents.give_back(freed.offset, freed.size);  // may throw; nothing has changed then
      freed_[i] = freed_.back();
      freed_.pop_back();
      if (--freed.segment->live_blocks == 0) segments_.erase(freed.segment->range.address());
    }
  } catch (const std::exception& error) {
    problems::record(describe() + ": freed memory is kept for now: " + error.what());
  }
}

// Waits for the last work of what was freed. False when nothing was waiting.
bool Pool::wait_for_freed() {
  std::vector<std::shared_ptr<Event>> events;
  bool is_unordered = false;
  {
    const Lock lock(mutex_);
    if (freed_.empty()) return false;
    for (const Freed& freed : freed_) {
      if (freed.after != nullptr) events.push_back(freed.after);
      is_unordered = is_unordered || freed.after == nullptr;
    }
  }
  if (is_unordered) {
    if (device_.is_capturing()) return false;
    // Only drivers without cuCtxRecordEvent get here: stopping the device is all they offer.
    device_.driver().check<Call::cuCtxSynchronize>();
    const Lock lock(mutex_);
    reap(/*is_idle=*/false);
  }
  for (const auto& event : events) static_cast<void>(wait_for(*event, -1, {}));
  return true;
}

}  // namespace fencepool
