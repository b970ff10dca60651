#include "pool/pool.h"

#include "backup/provision.h"
#include "base/problems.h"
#include "base/process.h"
#include "pool/claim.h"
#include "pool/stand_ins.h"

namespace fencepool {

static_assert(Pool::kAlignment % kPositionStep == 0);  // blocks begin where pieces may

Pool::Pool(std::uint64_t id, std::string tag, Device& device, Policy policy, std::unique_ptr<DiskStore> disk)
    : id_(id),
      tag_(std::move(tag)),
      device_(device),
      policy_(std::move(policy)),
      buffer_(device),
      disk_(std::move(disk)) {}

Pool::~Pool() = default;

std::string Pool::describe() const { return "pool '" + tag_ + "' on " + device_.name(); }

void Pool::explain(Error& error, std::size_t wanted, const char* advice) const noexcept {
  try {
    error.pool = tag_;
    // Of a disk only what it has too little of counts.
    if (error.wanted == 0 && error.kind != Kind::kDisk) error.wanted = wanted;
    std::string text = describe() + ": " + error.message;
    const bool is_about_memory = error.kind == Kind::kOutOfMemory || error.kind == Kind::kDriver;
    if (is_about_memory && error.wanted != 0) text += "; " + format_bytes(error.wanted) + " wanted";
    if (is_about_memory && ask_for_free_memory(error)) {
      text += (error.wanted == 0 ? "; " : ", ") + format_bytes(error.free) + " free";
      if (error.kind == Kind::kOutOfMemory && error.wanted > error.free) {
        text += ", " + format_bytes(error.wanted - error.free) + " missing";
      }
    }
    error.message = text + ". " + advice;
  } catch (const std::exception& second) {
    problems::record({tag_, ": an error could not be explained in full: ", second.what()});
  }
}

// A context that an error has broken cannot say.
bool Pool::ask_for_free_memory(Error& error) const noexcept {
  try {
    const Device::Scope scope(device_);
    error.free = device_.memory().free;
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Waits for the claimant, without the lock while it looks for a reason to stop.
void Pool::wait_until_unclaimed(const Interrupt& interrupt) {
  while (claimed_for_ != nullptr) {
    if (claimant_ == std::this_thread::get_id()) {
      Error error(Kind::kBusy,
                  describe() + " is " + claimed_for_ +
                      " on this very thread, which would wait for itself: do not change pools from "
                      "a signal handler");
      error.pool = tag_;
      throw error;
    }
    unclaimed_.wait_for(mutex_, std::chrono::milliseconds(50));
    if (claimed_for_ != nullptr) call_unlocked(mutex_, interrupt);
  }
}

bool Pool::contains(CUdeviceptr address) const {
  process::require_owner();
  const Lock lock(mutex_);
  const auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return false;
  const Range& range = std::prev(after)->second->range;
  return address < range.address() + range.size();
}

bool Pool::is_closed() const {
  const Lock lock(mutex_);
  return is_closed_;
}

PoolStatus Pool::status() {
  process::require_owner();
  const Lock lock(mutex_);
  PoolStatus status;
  const bool is_settled = claimed_for_ == nullptr;
  if (is_settled) reap_as_it_is();
  status.state = !is_settled ? claimed_for_ : state_ == State::kActive ? "active" : "paused";
  status.is_paused = state_ == State::kPaused;
  status.segments = segments_.size();
  for (const auto& [address, segment] : segments_) {
    status.bytes_reserved += segment->range.size();
    status.bytes_used += segment->extents.taken_bytes();
    // Mid-way the claimant may be changing this: then what held before it began is reported.
    if (is_settled ? segment->physical != nullptr : state_ == State::kActive) {
      status.bytes_mapped += segment->range.size();
    }
  }
  status.bytes_used -= freed_bytes();
  status.bytes_backed_up = backed_up_;
  status.host_bytes = is_settled ? buffer_.capacity() + stand_in_bytes() : host_bytes_;
  if (disk_ != nullptr) {
    status.disk_bytes = is_settled ? disk_->file.size() : disk_bytes_;
    status.is_direct = disk_->file.is_direct();
  }
  status.has_digests = has_digests();
  status.pending_frees = freed_count();
  status.last_pause = last_pause_;
  status.last_resume = last_resume_;
  return status;
}

std::size_t Pool::prepare(const Interrupt& interrupt) {
  process::require_owner();
  try {
    const Device::Scope scope(device_);
    Claim claim(shared_from_this(), "preparing", interrupt);
    // What is paused needs no more than it has: equal bytes and zeros take less than what is live.
    if (policy_.backup == Backup::kNone || claim.state() == State::kPaused) return 0;
    if (policy_.backup == Backup::kResident) {
      StandIns stand_ins(claim, interrupt);
      stand_ins.keep();
      return stand_ins.bytes_added();
    }
    if (policy_.backup == Backup::kDisk) return prepare_disk(claim);
    Provision provision(buffer_, bytes_of(claim.plan_image({})));
    provision.keep(interrupt);
    return provision.bytes_added();
  } catch (Error& error) {
    if (error.kind == Kind::kHostMemory || error.kind == Kind::kDriver) {
      explain(error, 0, "Nothing was changed. Free host memory, or raise the container's limit");
    } else if (error.kind == Kind::kDisk) {
      explain(error, 0,
              error.wanted > 0 ? "Nothing was changed. Free space there, or use another directory"
                               : "Nothing was changed. See to the disk, or use another directory");
    }
    throw;
  }
}

// Space for what is live now, and the buffers to it.
std::size_t Pool::prepare_disk(Claim& claim) {
  DiskFile& file = disk_->file;
  DiskFile::check(file.directory());
  const std::size_t before = file.size();
  const std::size_t wanted = end_of(claim.plan_image({}), file.step());
  try {
    if (!file.grow(wanted)) file.require_free(wanted - before);
    disk_->staging->prepare((wanted + Staging::kBuffer - 1) / Staging::kBuffer);
  } catch (...) {
    file.shrink(before);
    throw;
  }
  return file.size() - before;
}

std::size_t Pool::trim(const Interrupt& interrupt) {
  process::require_owner();
  const Device::Scope scope(device_);
  Claim claim(shared_from_this(), "trimming", interrupt);
  if (claim.state() == State::kPaused && claim.keeps_contents()) {
    Error error(Kind::kPaused,
                describe() + " is paused, and its contents are in the backup; resume it first");
    error.pool = tag_;
    throw error;
  }
  claim.wait_for_restore(interrupt);
  claim.settle();
  const std::size_t bytes = claim.backup_bytes();
  claim.clear_backup();
  return bytes - claim.backup_bytes();
}

void Pool::close(const Interrupt& interrupt) {
  process::require_owner();
  const Device::Scope scope(device_);
  Claim claim(shared_from_this(), "closing", interrupt);
  claim.wait_for_restore(interrupt);
  claim.settle();
  static_cast<void>(wait_for_freed(/*is_claimant=*/true, interrupt));
  {
    const Lock lock(mutex_);
    if (state_ == State::kPaused) reap_as_it_is();
    std::size_t blocks = 0;
    for (const auto& [address, segment] : segments_) blocks += segment->live_blocks;
    if (blocks > 0) {
      Error error(Kind::kBusy, describe() + " still holds " + std::to_string(blocks) +
                                   " live tensors; delete them before it is closed");
      error.pool = tag_;
      throw error;
    }
    is_closed_ = true;
  }
  stream_.reset();
  claim.clear_backup();
  std::unique_ptr<DiskStore> disk;
  {
    const Lock lock(mutex_);
    disk.swap(disk_);
  }
  image_.clear();
  restore_.reset();
}

}  // namespace fencepool
