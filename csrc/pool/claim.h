// The exclusive right to change a pool's state, and access to its insides while it lasts.
#pragma once

#include "pool/pool.h"

namespace fencepool {

// Bytes inside live blocks that hold nothing: an allocator above us has them free. Start to size, disjoint.
using DeadBytes = std::map<CUdeviceptr, std::size_t>;

class Pool::Claim {
 public:
  // Waits for other transitions of the pool. `doing` is shown by status() meanwhile. Whoever claims
  // several pools does it in the order of their ids. Throws kInvalid for a closed pool, kBusy when this
  // thread itself holds the claim.
  Claim(std::shared_ptr<Pool> pool, const char* doing, const Interrupt& interrupt);
  // Unclaims. The state is the one set, or the one it had. What was freed meanwhile is given back.
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  State state() const { return state_; }
  void set_state(State state) noexcept { state_ = state; }
  Pool& pool() const { return *pool_; }
  Device& device() const { return pool_->device_; }
  const Policy& policy() const { return pool_->policy_; }
  // Whether the contents are kept over this pause: the policy says so, and the pause does not drop them.
  bool keeps_contents() const { return policy().backup != Backup::kNone && !pool_->is_discarded_; }
  // Whether host memory stands at its addresses over this pause.
  bool is_resident() const { return policy().backup == Backup::kResident && keeps_contents(); }
  // Whether the contents are on a disk over this pause.
  bool is_on_disk() const { return policy().backup == Backup::kDisk && keeps_contents(); }
  DiskStore& disk() const { return *pool_->disk_; }
  // What positions in the backup are multiples of, in bytes, and how much the backup takes now.
  std::size_t step() const { return pool_->disk_ == nullptr ? 1 : pool_->disk_->file.step(); }
  std::size_t capacity() const {
    return pool_->disk_ == nullptr ? pool_->buffer_.capacity() : pool_->disk_->file.size();
  }
  void set_discarded(bool is_discarded) noexcept { pool_->is_discarded_ = is_discarded; }

  // In allocation order. Stable while the claim lasts.
  std::vector<Segment*> segments() const;
  // Whether a segment holds device memory or a mapping: a paused pool does only after a driver call
  // failed twice.
  bool holds_memory() const;
  // What was freed up to now can be given back once the device has become idle after this: first set
  // aside, then, after the wait, reaped. Only before segments() is used.
  void set_freed_aside();
  void reap_aside();
  // The pool's own stream for copies, made on first use. Needs a Device::Scope.
  Stream& stream() const;
  HostBuffer& buffer() const { return pool_->buffer_; }
  // Copies of a restore that is undone could not be awaited: what is freed stays mapped while they may run.
  void set_undrained() noexcept;
  // Before memory is given back: ends copies that could not be awaited earlier, if that works now.
  void settle() const;

  // Whether pauses go by digests: the policy allows it, and the device can take them.
  bool has_digests() const { return pool_->has_digests(); }
  // What the backup holds now, if pauses may rely on it; null otherwise.
  const Image* stored() const { return pool_->is_stored_ ? &pool_->image_ : nullptr; }
  void set_stored(bool is_stored) noexcept { pool_->is_stored_ = is_stored; }
  // Memory for so many bytes of digests, as the device sees it. Needs a Device::Scope.
  CUdeviceptr digest_memory(std::size_t size);
  bool has_digest_memory() const { return pool_->digest_memory_ != nullptr; }
  void drop_digest_memory() noexcept { pool_->digest_memory_.reset(); }
  const digest::Digest* digests() const {
    return static_cast<const digest::Digest*>(pool_->digest_memory_->start());
  }
  void leak_digests() noexcept;
  // Gives the backup's host memory, or its space on a disk, back, and forgets what was in it.
  void clear_backup() noexcept;
  std::size_t backup_bytes() const;  // that it would give back

  // Where each live run of bytes goes in a backup, in allocation order, packed from position 0. What is
  // `dead` is no contents.
  Image plan_image(const DeadBytes& dead) const;
  const Image& image() const { return pool_->image_; }
  Image& image() { return pool_->image_; }
  void set_image(Image image) noexcept {
    pool_->image_.swap(image);
    pool_->is_stored_ = false;
  }

  // The fence of the last resume. Unless the device's later work is ordered behind it, no block is taken
  // from the gaps it may still write before it is done.
  void set_restore(std::shared_ptr<Fence> fence, bool is_ordered) noexcept;
  const std::shared_ptr<Fence>& restore() const { return pool_->restore_; }
  // Waits until the last restore has ended, or has failed: either way nothing reads the backup any more.
  // Throws when that cannot be found out.
  void wait_for_restore(const Interrupt& interrupt) const;
  void set_last_pause(Phases phases) noexcept;
  void set_last_resume(Phases phases) noexcept;

 private:
  std::shared_ptr<Pool> pool_;
  State state_ = State::kActive;
  Places aside_;
};

// Ends the copies on a claimed pool's stream, whatever they come to: nothing may be unmapped or given
// back while they run. False when even that could not be found out. Never throws.
bool drain(const Pool::Claim& claim) noexcept;

}  // namespace fencepool
