// Handing out blocks: which segment they come from, and what happens when memory is short.
#include <algorithm>
#include <atomic>

#include "base/process.h"
#include "pool/pool.h"

namespace fencepool {
namespace {

std::size_t round_up(std::size_t size, std::size_t step) { return (size + step - 1) / step * step; }

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> serial{0};
  return ++serial;
}

// A place in a segment that was made for what is taken from it.
std::size_t take_room(Segment& segment, std::size_t size) {
  const auto offset = segment.extents.take(size);
  if (!offset) throw Error(Kind::kInvalid, "a new segment has no room for what it was made for");
  return *offset;
}

// Throws when less than the margin would stay free.
void keep_margin(Device& device, std::size_t size) {
  const std::size_t margin = device.margin();
  if (margin == 0) return;
  const std::size_t available = device.memory().free;
  if (available >= margin && size <= available - margin) return;
  Error error(Kind::kOutOfMemory, "a memory margin of " + format_bytes(margin) + " is to stay free");
  error.wanted = size;
  error.free = available;
  throw error;
}

}  // namespace

Block::~Block() { pool_->give_back(place_); }

void Pool::require_allocatable(const Interrupt& interrupt) {
  // What is paused stays unusable until its resume has ended: no use in waiting for that here.
  if (state_ == State::kActive) wait_until_unclaimed(interrupt);
  if (is_closed_) throw Error(Kind::kInvalid, describe() + " is closed; fencepool.pool() makes a new one");
  if (state_ == State::kPaused) {
    Error error(Kind::kPaused,
                describe() + " is paused and takes no new memory; resume(\"" + tag_ + "\") first");
    error.pool = tag_;
    throw error;
  }
}

std::unique_ptr<Segment> Pool::make_segment(std::size_t size) {
  keep_margin(device_, round_up(size, device_.granularity()));
  auto segment = std::make_unique<Segment>(device_, round_up(size, device_.granularity()), next_serial());
  segment->physical = std::make_unique<Physical>(device_, segment->range.size());
  segment->mapping = std::make_unique<Mapping>(segment->range, *segment->physical);
  return segment;
}

// A place in a shared segment, a new one when none has a gap that is large enough.
Place Pool::take_small(std::size_t size) {
  std::uint64_t untouchable = restoring_until_;
  if (untouchable > 0 && (restore_ == nullptr || restore_->is_done())) untouchable = restoring_until_ = 0;
  std::size_t shared_bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (!segment->is_shared) continue;
    shared_bytes += segment->range.size();
    if (segment->serial <= untouchable) continue;
    if (const auto offset = segment->extents.take(size)) return {segment.get(), *offset, size};
  }
  // As large as all before it together, so that many small blocks need few segments.
  auto segment =
      make_segment(std::max(size, std::clamp(shared_bytes, device_.granularity(), kLargestShared)));
  segment->is_shared = true;
  const std::size_t offset = take_room(*segment, size);
  Segment& inserted = *segments_.emplace(segment->range.address(), std::move(segment)).first->second;
  return {&inserted, offset, size};
}

Places Pool::take_places(const std::vector<std::size_t>& sizes, bool is_batch, const Interrupt& interrupt) {
  const Lock lock(mutex_);
  require_allocatable(interrupt);
  reap();
  Places places(sizes.size());  // all of them before anything is taken
  auto place = places.begin();
  if (!is_batch && sizes.front() < kOwnSegment) {
    *place = take_small(sizes.front());
  } else {
    // New segments are shared with the pool at the end, by a merge, which cannot fail.
    std::map<CUdeviceptr, std::unique_ptr<Segment>> made;
    for (std::size_t first = 0; first < sizes.size();) {
      std::size_t bytes = 0;
      std::size_t last = first;
      while (last < sizes.size() && (last == first || bytes + sizes[last] <= kBatchSegment))
        bytes += sizes[last++];
      auto segment = make_segment(bytes);
      for (; first < last; ++first, ++place)
        *place = {segment.get(), take_room(*segment, sizes[first]), sizes[first]};
      const CUdeviceptr address = segment->range.address();
      made.emplace(address, std::move(segment));
    }
    segments_.merge(made);
  }
  for (const Place& taken : places) ++taken.segment->live_blocks;
  return places;
}

// Whether what was freed has been given back. When the caller waits no longer, memory is as short as it was.
bool Pool::is_freed_in_time(const Interrupt& interrupt) {
  try {
    return wait_for_freed(/*is_claimant=*/false, interrupt);
  } catch (const Error& error) {
    if (error.kind != Kind::kBusy) throw;
    return false;
  }
}

std::vector<std::unique_ptr<Block>> Pool::make_blocks(const std::vector<std::size_t>& sizes, bool is_batch,
                                                      const Interrupt& interrupt) {
  process::require_owner();
  std::vector<std::size_t> padded;
  padded.reserve(sizes.size());
  std::size_t total = 0;
  for (const std::size_t size : sizes) {
    if (size == 0 || size > kLargest || total > kLargest) {
      throw Error(Kind::kInvalid, describe() + " cannot hand out " + std::to_string(size) + " bytes");
    }
    padded.push_back(round_up(size, kAlignment));
    total += padded.back();
  }
  Places places;
  try {
    const Device::Scope scope(device_);
    try {
      places = take_places(padded, is_batch, interrupt);
    } catch (const Error& error) {
      if (error.kind != Kind::kOutOfMemory || !is_freed_in_time(interrupt)) throw;
      places = take_places(padded, is_batch, interrupt);
    }
  } catch (Error& error) {
    if (error.kind == Kind::kOutOfMemory || error.kind == Kind::kDriver) {
      explain(error, total, "Nothing was allocated; pause another pool or free tensors, then try again");
    }
    throw;
  }
  std::vector<std::unique_ptr<Block>> blocks;
  try {
    blocks.reserve(places.size());
    while (!places.empty()) {
      auto block = std::make_unique<Block>(shared_from_this());
      block->take(places);
      blocks.push_back(std::move(block));
    }
  } catch (const std::exception&) {
    give_back(places);
    throw;
  }
  return blocks;
}

std::unique_ptr<Block> Pool::allocate(std::size_t size, const Interrupt& interrupt) {
  return std::move(make_blocks({size}, /*is_batch=*/false, interrupt).front());
}

std::vector<std::unique_ptr<Block>> Pool::allocate_batch(const std::vector<std::size_t>& sizes,
                                                         const Interrupt& interrupt) {
  return make_blocks(sizes, /*is_batch=*/true, interrupt);
}

}  // namespace fencepool
