#include "pool/claim.h"

#include <algorithm>

#include "base/problems.h"
#include "base/process.h"
#include "base/retry.h"

namespace fencepool {
namespace {

// Gaps up to this many bytes are copied rather than skipped: a copy costs microseconds to submit.
constexpr std::size_t kBridge = std::size_t{64} << 10;

std::size_t down(std::size_t offset) { return offset / Pool::kAlignment * Pool::kAlignment; }
std::size_t up(std::size_t offset) { return down(offset + Pool::kAlignment - 1); }

// The parts of a run between its dead bytes, on the alignment of blocks.
std::vector<Extent> without_dead(CUdeviceptr start, const Extent& run, const DeadBytes& dead) {
  std::vector<Extent> parts;
  std::size_t at = run.offset;
  const std::size_t end = run.offset + run.size;
  const auto add = [&](std::size_t until) {
    if (until > at) parts.push_back({at, until - at});
  };
  auto gap = dead.upper_bound(start + at);
  if (gap != dead.begin()) --gap;
  for (; gap != dead.end() && gap->first < start + end; ++gap) {
    const CUdeviceptr gap_end = gap->first + gap->second;
    if (gap_end <= start + at) continue;
    const std::size_t from = gap->first <= start + at ? at : up(gap->first - start);
    const std::size_t to = gap_end >= start + end ? end : down(gap_end - start);
    if (to < from + kBridge) continue;  // not worth a copy more
    add(from);
    at = to;
  }
  add(end);
  return parts;
}

}  // namespace

Pool::Claim::Claim(std::shared_ptr<Pool> pool, const char* doing, const Interrupt& interrupt)
    : pool_(std::move(pool)) {
  process::require_owner();
  const Lock lock(pool_->mutex_);
  pool_->wait_until_unclaimed(interrupt);
  if (pool_->is_closed_) throw Error(Kind::kInvalid, pool_->describe() + " is closed");
  pool_->claimed_for_ = doing;
  pool_->claimant_ = std::this_thread::get_id();
  state_ = pool_->state_;
}

Pool::Claim::~Claim() {
  const Lock lock(pool_->mutex_);
  pool_->freed_.splice(pool_->freed_.end(), aside_);
  pool_->state_ = state_;
  pool_->claimed_for_ = nullptr;
  pool_->claimant_ = {};
  pool_->host_bytes_ = pool_->buffer_.capacity() + pool_->stand_in_bytes();
  pool_->disk_bytes_ = pool_->disk_ == nullptr ? 0 : pool_->disk_->file.size();
  pool_->backed_up_ = state_ == State::kPaused ? bytes_of(pool_->image_) : 0;
  pool_->reap_as_it_is();
  pool_->unclaimed_.notify_all();
}

bool drain(const Pool::Claim& claim) noexcept {
  const auto is_done = [&claim] {
    try {
      const Device::Scope scope(claim.device());
      claim.stream().synchronize();
      return true;
    } catch (const std::exception& error) {
      problems::record({"waiting for copies to end: ", error.what()});
      return false;
    }
  };
  return succeeds_in_two(is_done);
}

void Pool::Claim::set_undrained() noexcept {
  const Lock lock(pool_->mutex_);
  pool_->is_undrained_ = true;
}

void Pool::Claim::settle() const {
  bool is_undrained = false;
  {
    const Lock lock(pool_->mutex_);
    is_undrained = pool_->is_undrained_;
  }
  if ((pool_->buffer_.is_unsettled() || is_undrained) && drain(*this)) pool_->buffer_.set_settled();
}

std::vector<Segment*> Pool::Claim::segments() const {
  const Lock lock(pool_->mutex_);
  std::vector<Segment*> all;
  all.reserve(pool_->segments_.size());
  for (const auto& [address, segment] : pool_->segments_) all.push_back(segment.get());
  std::sort(all.begin(), all.end(), [](const Segment* a, const Segment* b) { return a->serial < b->serial; });
  return all;
}

bool Pool::Claim::holds_memory() const {
  const Lock lock(pool_->mutex_);
  return std::any_of(pool_->segments_.begin(), pool_->segments_.end(), [](const auto& entry) {
    return entry.second->physical != nullptr || entry.second->mapping != nullptr;
  });
}

void Pool::Claim::set_freed_aside() {
  const Lock lock(pool_->mutex_);
  aside_.swap(pool_->freed_);
  for (; !pool_->freed_batches_.empty(); pool_->freed_batches_.pop_front()) {
    aside_.splice(aside_.end(), pool_->freed_batches_.front().places);
  }
}

void Pool::Claim::reap_aside() {
  const Lock lock(pool_->mutex_);
  pool_->release_all(aside_);
}

Stream& Pool::Claim::stream() const {
  if (pool_->stream_ == nullptr) pool_->stream_ = std::make_unique<Stream>(pool_->device_);
  return *pool_->stream_;
}

Image Pool::Claim::plan_image(const DeadBytes& dead) const {
  Image image;
  std::size_t position = 0;
  for (const Segment* segment : segments()) {
    const Lock lock(pool_->mutex_);
    std::vector<Piece>& pieces = image[segment->serial];
    for (const Extent& run : segment->extents.taken(kBridge)) {
      for (const Extent& part : without_dead(segment->range.address(), run, dead)) {
        pieces.push_back({part.offset, part.size, position});
        position = in_steps(position + part.size, step());
      }
    }
  }
  return image;
}

CUdeviceptr Pool::Claim::digest_memory(std::size_t size) {
  auto& memory = pool_->digest_memory_;
  if (memory == nullptr || memory->size() < size) {
    constexpr std::size_t kStep = std::size_t{64} << 10;  // of 4,096 digests, which stand for a gibibyte
    memory.reset();
    memory = std::make_unique<PinnedMemory>(device(), (size + kStep - 1) / kStep * kStep);
  }
  return memory->device_address();
}

void Pool::Claim::leak_digests() noexcept {
  if (pool_->digest_memory_ == nullptr) return;
  pool_->digest_memory_->leak();
  pool_->digest_memory_.reset();
}

void Pool::Claim::clear_backup() noexcept {
  pool_->buffer_.clear();
  pool_->is_stored_ = false;
  pool_->digest_memory_.reset();
  if (pool_->disk_ != nullptr) {
    pool_->disk_->file.shrink(0);
    // Whoever is paused beside this one needs a buffer to come back, also where the budget allows no more.
    pool_->disk_->staging->trim(pool_->disk_->staging.use_count() > 1 ? 1 : 0);
  }
  if (pool_->buffer_.is_unsettled()) return;  // copies may still write to stand-ins: they stay
  for (bool is_any = true; is_any;) {
    std::shared_ptr<StandIn> next;  // dies without the lock: giving gigabytes back takes a while
    const Lock lock(pool_->mutex_);
    const auto found = std::find_if(pool_->segments_.begin(), pool_->segments_.end(), [](const auto& entry) {
      return entry.second->stand_in != nullptr && entry.second->shown == nullptr;
    });
    is_any = found != pool_->segments_.end();
    if (is_any) next.swap(found->second->stand_in);
  }
}

std::size_t Pool::Claim::backup_bytes() const {
  const Lock lock(pool_->mutex_);
  return capacity() + pool_->stand_in_bytes();
}

void Pool::Claim::set_restore(std::shared_ptr<Fence> fence, bool is_ordered) noexcept {
  const Lock lock(pool_->mutex_);
  pool_->restore_ = std::move(fence);
  pool_->restoring_until_ = 0;
  if (is_ordered) return;
  for (const auto& [address, segment] : pool_->segments_) {
    pool_->restoring_until_ = std::max(pool_->restoring_until_, segment->serial);
  }
}

void Pool::Claim::wait_for_restore(const Interrupt& interrupt) const {
  if (pool_->restore_ == nullptr) return;
  try {
    static_cast<void>(pool_->restore_->synchronize(-1, interrupt));
  } catch (const Error& error) {
    // Not being able to ask does not mean that it has ended. Only the stream's own end does.
    if (!drain(*this)) throw;
    problems::record({pool_->tag_, ": its last restore could not be asked about: ", error.what()});
  }
}

void Pool::Claim::set_last_pause(Phases phases) noexcept {
  const Lock lock(pool_->mutex_);
  pool_->last_pause_.swap(phases);
}

void Pool::Claim::set_last_resume(Phases phases) noexcept {
  const Lock lock(pool_->mutex_);
  pool_->last_resume_.swap(phases);
}

}  // namespace fencepool
