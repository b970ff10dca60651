// Giving blocks and segments back: by event, without stopping the device, and never by throwing.
#include <algorithm>

#include "base/problems.h"
#include "base/process.h"
#include "pool/pool.h"

namespace fencepool {
namespace {

// Events waited for at once. While the device is busy, later frees share the next one.
constexpr std::size_t kBatches = 8;

}  // namespace

void Pool::give_back(Places& places) noexcept {
  if (process::is_forked_child()) return;
  try {
    const Lock lock(mutex_);
    freed_.splice(freed_.end(), places);
    if (claimed_for_ != nullptr) return;  // the claimant sees to it when it is done
    reap_as_it_is();
  } catch (const std::exception& error) {
    problems::record({tag_, ": a freed block is kept: ", error.what()});
  }
}

// Nothing on the device uses them any more. What is left in the list after an exception is still taken.
void Pool::release_all(Places& places) {
  for (; !places.empty(); places.pop_front()) {
    const Place place = places.front();
    place.segment->extents.give_back(place.offset, place.size);  // may throw; nothing has changed then
    if (--place.segment->live_blocks == 0) segments_.erase(place.segment->range.address());
  }
}

// Records the device's work so far behind the blocks freed since the last time. While a stream of
// the device captures, a context-wide record would break the capture: later, then. The same where
// the driver has no cuCtxRecordEvent: those blocks wait for the next pause, or for memory to run out.
void Pool::order_freed(bool is_awaited) {
  if (freed_.empty() || (!is_awaited && freed_batches_.size() >= kBatches)) return;
  if (!device_.driver().has<Call::cuCtxRecordEvent>()) return;
  const Device::Scope scope(device_);
  if (device_.is_capturing()) return;
  FreedBatch batch{std::make_shared<Event>(device_), {}};
  device_.driver().check<Call::cuCtxRecordEvent>(device_.context(), batch.after->get());
  freed_batches_.push_back(std::move(batch));  // may throw; the blocks are still in freed_ then
  freed_batches_.back().places.swap(freed_);
}

// Gives back the freed blocks whose last work has ended.
void Pool::reap() noexcept {
  if (freed_.empty() && freed_batches_.empty()) return;
  try {
    const Device::Scope scope(device_);
    for (bool is_ordered = false;; is_ordered = true) {
      // Context-wide events complete in the order they were recorded: the first says it for the rest.
      while (!freed_batches_.empty() && freed_batches_.front().after->is_done()) {
        release_all(freed_batches_.front().places);
        freed_batches_.pop_front();
      }
      if (is_ordered) return;
      order_freed(/*is_awaited=*/false);
    }
  } catch (const std::exception& error) {
    problems::record({tag_, ": freed memory is kept for now: ", error.what()});
  }
}

// Whether copies of an undone restore, which nobody could wait for, may still be under way. Does not wait.
bool Pool::may_copies_run() {
  if (!is_undrained_) return false;
  const Device::Scope scope(device_);
  is_undrained_ =
      stream_ != nullptr && device_.driver().call<Call::cuStreamQuery>(stream_->get()) != CUDA_SUCCESS;
  return is_undrained_;
}

// Gives back everything freed: nothing on the device uses this pool.
void Pool::reap_idle() noexcept {
  try {
    if (freed_.empty() && freed_batches_.empty()) return;
    if (may_copies_run()) return;  // the next operation on the pool tries again
    for (; !freed_batches_.empty(); freed_batches_.pop_front()) release_all(freed_batches_.front().places);
    release_all(freed_);
  } catch (const std::exception& error) {
    problems::record({tag_, ": freed memory is kept for now: ", error.what()});
  }
}

// The device can use a paused pool only where host memory stands at its addresses.
void Pool::reap_as_it_is() noexcept {
  const bool is_in_use = policy_.backup == Backup::kResident && !is_discarded_;
  if (state_ == State::kPaused && !is_in_use) {
    reap_idle();
  } else {
    reap();
  }
}

// Waits for the last work of what was freed so far, and gives it back; while a stream captures, what has no
// event yet stays. False when there was nothing, or when this driver cannot find out during a capture. Needs
// a Device::Scope, and no lock while it waits.
bool Pool::wait_for_freed(bool is_claimant, const Interrupt& interrupt) {
  const bool can_record = device_.driver().has<Call::cuCtxRecordEvent>();
  std::vector<std::shared_ptr<Event>> events;
  Places unordered;  // this driver can only stop the device for them
  {
    const Lock lock(mutex_);
    if (freed_.empty() && freed_batches_.empty()) return false;
    if (claimed_for_ != nullptr && !is_claimant) return true;  // its end gives them back
    if (can_record) {
      order_freed(/*is_awaited=*/true);
      for (const FreedBatch& batch : freed_batches_) events.push_back(batch.after);
    } else {
      if (device_.is_capturing()) return false;
      unordered.swap(freed_);
    }
  }
  try {
    if (!can_record) device_.driver().check<Call::cuCtxSynchronize>();
    for (const auto& event : events) static_cast<void>(wait_for(*event, -1, interrupt));
  } catch (...) {
    const Lock lock(mutex_);
    freed_.splice(freed_.end(), unordered);
    throw;
  }
  const Lock lock(mutex_);
  if (claimed_for_ != nullptr && !is_claimant) {
    freed_.splice(freed_.end(), unordered);
  } else {
    try {
      release_all(unordered);
    } catch (...) {
      freed_.splice(freed_.end(), unordered);
      throw;
    }
    reap();
  }
  return true;
}

std::size_t Pool::stand_in_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (segment->stand_in != nullptr) bytes += segment->range.size();
  }
  return bytes;
}

std::size_t Pool::freed_bytes() const {
  std::size_t bytes = 0;
  for (const Place& place : freed_) bytes += place.size;
  for (const FreedBatch& batch : freed_batches_) {
    for (const Place& place : batch.places) bytes += place.size;
  }
  return bytes;
}

std::size_t Pool::freed_count() const {
  std::size_t count = freed_.size();
  for (const FreedBatch& batch : freed_batches_) count += batch.places.size();
  return count;
}

}  // namespace fencepool
