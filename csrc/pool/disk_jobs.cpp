#include "pool/disk_jobs.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"

namespace fencepool {
namespace {

constexpr double kInterruptEvery = 50e-3;  // seconds
constexpr std::chrono::microseconds kNap(50);

// Says which contents lie there.
void add_place(Error& error, const DiskLoad& load, const DiskLoad::Extent& extent, std::size_t position) {
  const std::size_t at = extent.at + (position - extent.position);
  const DiskLoad::Part* found = nullptr;
  for (const DiskLoad::Part& part : load.parts) {
    if (part.at != kZeros && part.at <= at && (found == nullptr || part.at > found->at)) found = &part;
  }
  if (found == nullptr) return;
  const std::size_t inside = std::min(at - found->at, found->size);
  error.message += ": what is missing begins at byte " + std::to_string(found->offset + inside) +
                   " of the segment at " + format_address(found->segment->range.address());
}

std::size_t extents_of(const std::vector<DiskLoad>& loads) {
  return static_cast<std::size_t>(
      std::count_if(loads.begin(), loads.end(), [](const DiskLoad& load) { return !load.extents.empty(); }));
}

}  // namespace

DiskJobs::DiskJobs(Pool::Claim& claim, std::vector<DiskLoad> loads, const Interrupt& interrupt)
    : claim_(claim),
      interrupt_(interrupt),
      loads_(std::move(loads)),
      most_(std::min(extents_of(loads_), Staging::kMost)),
      asked_(now_seconds()) {
  if (most_ > 0) threads_ = std::make_unique<JobThreads>(std::min(most_, kThreads));
}

DiskJobs::~DiskJobs() {
  stop();
  claim_.disk().staging->give_back(free_);
}

// Fewer buffers than wanted only cost time.
bool DiskJobs::has_buffer() {
  if (!free_.empty() || held_ == most_) return !free_.empty();
  try {
    claim_.disk().staging->take(free_, /*is_awaited=*/held_ == 0, interrupt_);
    ++held_;
  } catch (const Error& error) {
    if (error.kind != Kind::kHostMemory || held_ == 0) throw;
    most_ = held_;
  }
  return !free_.empty();
}

bool DiskJobs::begin_next(Slots& slots) {
  const bool needs_buffer = !loads_[next_].extents.empty();
  if (needs_buffer && !has_buffer()) return false;
  Slot& slot = slots.emplace_back(loads_[next_]);
  ++next_;
  if (needs_buffer) slot.buffer.splice(slot.buffer.end(), free_, free_.begin());
  return true;
}

void DiskJobs::write(Slot& slot) {
  threads_->submit(slot.job, [&file = claim_.disk().file, &slot] {
    for (const DiskLoad::Extent& extent : slot.load.extents) {
      file.write(extent.position, slot.start() + extent.at, extent.size);
    }
  });
}

void DiskJobs::read(Slot& slot) {
  threads_->submit(slot.job, [&file = claim_.disk().file, &slot] {
    for (const DiskLoad::Extent& extent : slot.load.extents) {
      try {
        file.read(extent.position, slot.start() + extent.at, extent.size);
      } catch (DiskFile::Ended& error) {
        add_place(error, slot.load, extent, error.position);
        throw;
      }
    }
  });
}

void DiskJobs::recycle(Slots& slots, Slots::iterator slot) noexcept {
  for (StagingBuffer& buffer : slot->buffer) buffer.is_recorded = false;
  free_.splice(free_.end(), slot->buffer);
  slots.erase(slot);
}

void DiskJobs::give_back(Slot& slot) noexcept { claim_.disk().staging->give_back(slot.buffer); }

void DiskJobs::leak(Slot& slot) noexcept { claim_.disk().staging->leak(slot.buffer); }

void DiskJobs::look() {
  if (threads_ != nullptr) ended_ = threads_->ended();
  const double now = now_seconds();
  if (!interrupt_ || now - asked_ < kInterruptEvery) return;
  interrupt_();
  asked_ = now;
}

void DiskJobs::rest(bool is_device_awaited) {
  if (is_device_awaited && (threads_ == nullptr || threads_->has_idle())) {
    std::this_thread::sleep_for(kNap);
  } else if (threads_ != nullptr) {
    threads_->wait(ended_);
  }
}

}  // namespace fencepool
