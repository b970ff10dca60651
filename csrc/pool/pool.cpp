#include "pool/pool.h"

#include <algorithm>
#include <atomic>

#include "backup/provision.h"
#include "base/problems.h"
#include "base/process.h"
#include "pool/claim.h"

namespace fencepool {
namespace {

std::size_t round_up(std::size_t size, std::size_t step) { return (size + step - 1) / step * step; }

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> serial{0};
  return ++serial;
}

}  // namespace

Block::~Block() { pool_->give_back(*segment_, offset_, size_); }

Pool::Pool(std::uint64_t id, std::string tag, Device& device, Policy policy)
    : id_(id), tag_(std::move(tag)), device_(device), policy_(policy), buffer_(device) {}

Pool::~Pool() = default;

std::string Pool::describe() const { return "pool '" + tag_ + "' on " + device_.name(); }

void Pool::explain(Error& error, std::size_t wanted, const std::string& advice) const noexcept {
  try {
    error.pool = tag_;
    error.wanted = wanted;
    std::string text = describe() + ": " + error.message;
    if (error.kind == Kind::kOutOfMemory) {
      const Device::Scope scope(device_);
      error.free = device_.memory().free;
      text += "; " + format_bytes(wanted) + " wanted, " + format_bytes(error.free) + " free";
      if (wanted > error.free) text += ", " + format_bytes(wanted - error.free) + " missing";
    }
    error.message = text + ". " + advice;
  } catch (const std::exception&) {
    problems::record("an error of " + tag_ + " could not be explained in full");
  }
}

void Pool::wait_until_unclaimed() {
  while (claimed_for_ != nullptr) unclaimed_.wait(mutex_);
}

void Pool::require_allocatable() {
  wait_until_unclaimed();
  if (is_closed_) throw Error(Kind::kInvalid, describe() + " is closed; fencepool.pool() makes a new one");
  if (state_ == State::kPaused) {
    Error error(Kind::kPaused, describe() + " is paused and takes no new memory; resume(\"" + tag_ + "\") first");
    error.pool = tag_;
    throw error;
  }
}

std::unique_ptr<Segment> Pool::make_segment(std::size_t size) {
  auto segment = std::make_unique<Segment>(device_, round_up(size, device_.granularity()), next_serial());
  segment->physical = std::make_unique<Physical>(device_, segment->range.size());
  segment->mapping = std::make_unique<Mapping>(segment->range, *segment->physical);
  return segment;
}

Segment& Pool::insert(std::unique_ptr<Segment> segment) {
  const CUdeviceptr address = segment->range.address();
  return *segments_.emplace(address, std::move(segment)).first->second;
}

template <class Make>
auto Pool::retry_when_freed(Make make) {
  process::require_owner();
  const Device::Scope scope(device_);
  try {
    return make();
  } catch (const Error& error) {
    if (error.kind != Kind::kOutOfMemory || !wait_for_freed()) throw;
  }
  return make();
}

Segment& Pool::shared_segment(std::size_t size, std::size_t* offset) {
  std::size_t shared_bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (!segment->is_shared) continue;
    shared_bytes += segment->range.size();
    if (const auto place = segment->extents.take(size)) {
      *offset = *place;
      return *segment;
    }
  }
  // As large as all before it together, so that many small blocks need few segments.
  auto segment = make_segment(std::clamp(shared_bytes, device_.granularity(), kLargestShared));
  segment->is_shared = true;
  *offset = *segment->extents.take(size);
  return insert(std::move(segment));
}

std::unique_ptr<Block> Pool::allocate(std::size_t size) {
  const std::size_t padded = round_up(size, kAlignment);
  const auto make = [&] {
    const Lock lock(mutex_);
    require_allocatable();
    reap(/*is_idle=*/false);
    std::size_t offset = 0;
    Segment* segment = nullptr;
    if (padded < kOwnSegment) {
      segment = &shared_segment(padded, &offset);
    } else {
      auto own = make_segment(padded);
      offset = *own->extents.take(padded);
      segment = &insert(std::move(own));
    }
    ++segment->live_blocks;
    return std::make_unique<Block>(shared_from_this(), *segment, offset, padded);
  };
  try {
    return retry_when_freed(make);
  } catch (Error& error) {
    if (error.kind == Kind::kOutOfMemory || error.kind == Kind::kDriver) {
      explain(error, padded, "Nothing was allocated; pause another pool or free tensors, then try again");
    }
    throw;
  }
}

std::vector<std::unique_ptr<Block>> Pool::allocate_batch(const std::vector<std::size_t>& sizes) {
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += round_up(size, kAlignment);
  const auto make = [&] {
    const Lock lock(mutex_);
    require_allocatable();
    reap(/*is_idle=*/false);
    // Everything that can fail comes before anything is shared with the pool.
    std::vector<std::unique_ptr<Segment>> made;
    std::vector<std::pair<Segment*, std::size_t>> places;
    places.reserve(sizes.size());
    for (std::size_t first = 0; first < sizes.size();) {
      std::size_t bytes = 0;
      std::size_t last = first;
      while (last < sizes.size() && (last == first || bytes + round_up(sizes[last], kAlignment) <= kBatchSegment)) {
        bytes += round_up(sizes[last++], kAlignment);
      }
      made.push_back(make_segment(bytes));
      for (; first < last; ++first) {
        places.emplace_back(made.back().get(), *made.back()->extents.take(round_up(sizes[first], kAlignment)));
      }
    }
    std::vector<std::unique_ptr<Block>> blocks;
    blocks.reserve(sizes.size());
    for (auto& segment : made) insert(std::move(segment));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      ++places[i].first->live_blocks;
      blocks.push_back(std::make_unique<Block>(shared_from_this(), *places[i].first, places[i].second,
                                               round_up(sizes[i], kAlignment)));
    }
    return blocks;
  };
  try {
    return retry_when_freed(make);
  } catch (Error& error) {
    if (error.kind == Kind::kOutOfMemory || error.kind == Kind::kDriver) {
      explain(error, total, "Nothing was allocated; pause another pool or free tensors, then try again");
    }
    throw;
  }
}

bool Pool::contains(CUdeviceptr address) const {
  const Lock lock(mutex_);
  const auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return false;
  const Range& range = std::prev(after)->second->range;
  return address < range.address() + range.size();
}

std::size_t Pool::used_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [address, segment] : segments_) bytes += segment->extents.taken_bytes();
  for (const Freed& freed : freed_) bytes -= freed.size;
  return bytes;
}

PoolStatus Pool::status() {
  process::require_owner();
  const Lock lock(mutex_);
  PoolStatus status;
  if (claimed_for_ == nullptr) {
    if (!freed_.empty()) {
      const Device::Scope scope(device_);
      reap(/*is_idle=*/state_ == State::kPaused);
    }
    for (const auto& [address, segment] : segments_) {
      if (segment->physical != nullptr) status.bytes_mapped += segment->range.size();
    }
  } else if (state_ == State::kActive) {
    // Mid-way, the claimant may be changing the segments: report what holds until it is done.
    for (const auto& [address, segment] : segments_) status.bytes_mapped += segment->range.size();
  }
  status.state = claimed_for_ != nullptr ? claimed_for_ : state_ == State::kActive ? "active" : "paused";
  status.segments = segments_.size();
  for (const auto& [address, segment] : segments_) status.bytes_reserved += segment->range.size();
  status.bytes_used = used_bytes();
  status.bytes_backed_up = backed_up_;
  status.host_bytes = host_bytes_;
  status.pending_frees = freed_.size();
  status.last_pause = last_pause_;
  status.last_resume = last_resume_;
  return status;
}

std::size_t Pool::prepare() {
  if (policy_.backup != Backup::kHost) return 0;
  const Device::Scope scope(device_);
  Claim claim(shared_from_this(), "preparing");
  Provision provision(buffer_, Claim::image_bytes(claim.plan_image()));
  provision.keep();
  return provision.bytes_added();
}

std::size_t Pool::trim() {
  const Device::Scope scope(device_);
  Claim claim(shared_from_this(), "trimming");
  if (claim.state() == State::kPaused && policy_.backup == Backup::kHost) {
    Error error(Kind::kPaused, describe() + " is paused, and its contents are in the backup; resume it first");
    error.pool = tag_;
    throw error;
  }
  if (restore_ != nullptr) static_cast<void>(restore_->synchronize(-1, {}));
  const std::size_t bytes = buffer_.capacity();
  buffer_.clear();
  return bytes;
}

void Pool::close() {
  const Device::Scope scope(device_);
  Claim claim(shared_from_this(), "closing");
  if (restore_ != nullptr) static_cast<void>(restore_->synchronize(-1, {}));
  static_cast<void>(wait_for_freed());
  const Lock lock(mutex_);
  reap(state_ == State::kPaused);
  std::size_t blocks = 0;
  for (const auto& [address, segment] : segments_) blocks += segment->live_blocks;
  if (blocks > 0) {
    Error error(Kind::kBusy, describe() + " still holds " + std::to_string(blocks) +
                                 " live tensors; delete them before it is closed");
    error.pool = tag_;
    throw error;
  }
  is_closed_ = true;
  stream_.reset();
  buffer_.clear();
  image_.clear();
  restore_.reset();
  claim.set_state(State::kActive);
}

}  // namespace fencepool
