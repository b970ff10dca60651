// A pool: the segments that share a tag, a device and a policy; the unit of state.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backup/disk_store.h"
#include "backup/host_buffer.h"
#include "backup/pinned_memory.h"
#include "base/interrupt.h"
#include "base/mutex.h"
#include "owners/stream.h"
#include "pool/block.h"
#include "pool/fence.h"
#include "pool/image.h"
#include "pool/segment.h"

namespace fencepool {

enum class Backup {
  kNone,
  kHost,      // in pinned memory, out of reach of the tensors
  kResident,  // in host memory that stands at the tensors' addresses
  kDisk,      // in a file
};
enum class Digests {
  kNone,       // every byte is copied at every pause
  kAvailable,  // where the device can take them
};
enum class Fill { kUndefined, kZero };

struct Policy {
  Backup backup = Backup::kNone;
  bool is_retained = true;       // keep the backup's host memory between cycles
  Fill fill = Fill::kUndefined;  // what a pool without backup holds after a resume
  Digests digests = Digests::kAvailable;
  std::string directory;  // of the file, for a backup on a disk
};

enum class State { kActive, kPaused };

// Seconds by phase, in the order they ran.
using Phases = std::vector<std::pair<std::string, double>>;

struct PoolStatus {
  std::string state;       // "active", "paused", or what it is in the middle of: "pausing", "resuming"
  bool is_paused = false;  // settled: before a transition's end, what it was
  std::size_t segments = 0;
  std::size_t bytes_reserved = 0;   // of address space
  std::size_t bytes_mapped = 0;     // of device memory held
  std::size_t bytes_used = 0;       // by live tensors
  std::size_t bytes_backed_up = 0;  // contents in the backup now, while paused
  std::size_t host_bytes = 0;       // host memory held for the backup
  std::size_t disk_bytes = 0;       // of a disk, the same
  std::optional<bool> is_direct;    // the disk is read and written past the page cache
  bool has_digests = false;         // only blocks that changed are copied to the backup
  std::size_t pending_frees = 0;    // blocks whose last work has not ended
  Phases last_pause, last_resume;
};

// A run of bytes in a backup. It stays readable while the chunks live, and true until the pool resumes.
struct BackupPart {
  std::vector<std::shared_ptr<const HostChunk>> chunks;
  std::shared_ptr<const void> owner;  // of what lies in no chunk: zeros, a stand-in
  const char* start;
  std::size_t size;  // bytes
};

// Thread-safe. A transition claims the pool and works on its insides without the lock: allocations
// wait for it, and what is freed meanwhile is put aside.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static constexpr std::size_t kAlignment = 512;                    // bytes, of every block
  static constexpr std::size_t kOwnSegment = std::size_t{1} << 20;  // a block this large gets one
  static constexpr std::size_t kLargestShared = std::size_t{64} << 20;
  static constexpr std::size_t kBatchSegment = std::size_t{1} << 30;  // of allocate_batch()
  static constexpr std::size_t kLargest = std::size_t{1} << 47;       // no address space holds more

  // `disk` is there for a backup on a disk alone.
  Pool(std::uint64_t id, std::string tag, Device& device, Policy policy, std::unique_ptr<DiskStore> disk);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // A block of `size` > 0 bytes. Throws kPaused, kOutOfMemory, kInvalid; nothing has changed then.
  std::unique_ptr<Block> allocate(std::size_t size, const Interrupt& interrupt) EXCLUDES(mutex_);
  // Blocks that will live and die together, packed into few large segments. All or none.
  std::vector<std::unique_ptr<Block>> allocate_batch(const std::vector<std::size_t>& sizes,
                                                     const Interrupt& interrupt) EXCLUDES(mutex_);

  bool contains(CUdeviceptr address) const EXCLUDES(mutex_);
  PoolStatus status() EXCLUDES(mutex_);
  // Provisions the backup for what is live now, ahead of the first pause. Returns bytes added.
  std::size_t prepare(const Interrupt& interrupt) EXCLUDES(mutex_);
  // Gives the backup's host memory back; not while it holds the contents of a paused pool (throws
  // kPaused). Waits for the restore that reads it. Returns bytes given back.
  std::size_t trim(const Interrupt& interrupt) EXCLUDES(mutex_);
  // Gives everything back. Throws kBusy while blocks live. The pool cannot be used afterwards.
  void close(const Interrupt& interrupt) EXCLUDES(mutex_);
  // Where [address, address + size) of a paused pool lies in its backup, in order. Neighbouring parts are
  // merged where the host memory is contiguous. Throws kInvalid when the pool has no such bytes in a backup.
  // With `is_view` somebody may write to them: bytes that are not stored for themselves alone are refused,
  // and the backup's digests count no longer.
  std::vector<BackupPart> backup_of(CUdeviceptr address, std::size_t size, bool is_view,
                                    const Interrupt& interrupt) EXCLUDES(mutex_);
  bool is_closed() const EXCLUDES(mutex_);

  std::uint64_t id() const { return id_; }
  const std::string& tag() const { return tag_; }
  Device& device() const { return device_; }
  const Policy& policy() const { return policy_; }
  std::string describe() const;  // "pool 'weights' on cuda:0"
  // Puts the pool, the bytes wanted and free, and what to do into an error on its way out.
  void explain(Error& error, std::size_t wanted, const char* advice) const noexcept;

  // Whether only blocks that changed are copied to the backup.
  bool has_digests() const { return wants_digests(policy_) && device_.digest_kernel() != nullptr; }

  static bool wants_digests(const Policy& policy) {
    return (policy.backup == Backup::kHost || policy.backup == Backup::kDisk) &&
           policy.digests == Digests::kAvailable;
  }

  // What a transition needs: the state, and the insides while the claim lasts. See claim.h.
  class Claim;

 private:
  friend class Block;

  // Blocks freed before an event was recorded behind the device's work.
  struct FreedBatch {
    std::shared_ptr<Event> after;
    Places places;
  };

  void wait_until_unclaimed(const Interrupt& interrupt) REQUIRES(mutex_);
  void require_allocatable(const Interrupt& interrupt) REQUIRES(mutex_);
  std::unique_ptr<Segment> make_segment(std::size_t size) REQUIRES(mutex_);
  Place take_small(std::size_t size) REQUIRES(mutex_);
  Places take_places(const std::vector<std::size_t>& sizes, bool is_batch, const Interrupt& interrupt)
      EXCLUDES(mutex_);
  std::vector<std::unique_ptr<Block>> make_blocks(const std::vector<std::size_t>& sizes, bool is_batch,
                                                  const Interrupt& interrupt) EXCLUDES(mutex_);

  std::size_t prepare_disk(Claim& claim);
  std::vector<BackupPart> stand_in_of(const Segment& segment, std::size_t offset, std::size_t size) const;
  BackupPart read_from_disk(Claim& claim, const Segment& segment, std::size_t offset, std::size_t size,
                            const Interrupt& interrupt) const;
  void expose(Claim& claim, std::vector<Piece>& pieces, std::size_t offset, std::size_t end);

  // freeing.cpp
  void give_back(Places& places) noexcept EXCLUDES(mutex_);
  void release_all(Places& places) REQUIRES(mutex_);
  void order_freed(bool is_awaited) REQUIRES(mutex_);
  void reap() noexcept REQUIRES(mutex_);
  void reap_idle() noexcept REQUIRES(mutex_);
  bool may_copies_run() REQUIRES(mutex_);
  void reap_as_it_is() noexcept REQUIRES(mutex_);
  bool wait_for_freed(bool is_claimant, const Interrupt& interrupt) EXCLUDES(mutex_);
  bool is_freed_in_time(const Interrupt& interrupt) EXCLUDES(mutex_);
  bool ask_for_free_memory(Error& error) const noexcept;
  std::size_t stand_in_bytes() const REQUIRES(mutex_);
  std::size_t freed_bytes() const REQUIRES(mutex_);
  std::size_t freed_count() const REQUIRES(mutex_);

  const std::uint64_t id_;
  const std::string tag_;
  Device& device_;
  const Policy policy_;

  mutable Mutex mutex_;
  Condition unclaimed_;
  State state_ GUARDED_BY(mutex_) = State::kActive;
  const char* claimed_for_ GUARDED_BY(mutex_) = nullptr;  // "pausing"; null: unclaimed
  std::thread::id claimant_ GUARDED_BY(mutex_);
  bool is_closed_ GUARDED_BY(mutex_) = false;
  std::map<CUdeviceptr, std::unique_ptr<Segment>> segments_ GUARDED_BY(mutex_);
  Places freed_ GUARDED_BY(mutex_);                          // not ordered behind the device's work yet
  std::deque<FreedBatch> freed_batches_ GUARDED_BY(mutex_);  // oldest first
  Phases last_pause_ GUARDED_BY(mutex_);
  Phases last_resume_ GUARDED_BY(mutex_);
  std::size_t backed_up_ GUARDED_BY(mutex_) = 0;
  std::size_t host_bytes_ GUARDED_BY(mutex_) = 0;  // at the end of the last claim
  std::size_t disk_bytes_ GUARDED_BY(mutex_) = 0;  // the same
  // Segments up to this serial may still be written by the last restore: no block is taken from their
  // gaps before its fence is done. 0: none.
  std::uint64_t restoring_until_ GUARDED_BY(mutex_) = 0;

  // A restore was undone whose copies could not be awaited: they may still write to what stays mapped.
  bool is_undrained_ GUARDED_BY(mutex_) = false;

  // Belongs to whoever has claimed the pool; `restore_` may be read under the lock while unclaimed.
  std::unique_ptr<Stream> stream_;
  HostBuffer buffer_;
  std::unique_ptr<DiskStore> disk_;              // null: the backup is none or elsewhere
  Image image_;                                  // where the contents are; while active, where they were
  bool is_stored_ = false;                       // the backup holds what `image_` says, by its digests
  std::unique_ptr<PinnedMemory> digest_memory_;  // where the device puts them
  std::shared_ptr<Fence> restore_;               // of the last resume
  bool is_discarded_ = false;  // the last pause dropped the contents, though the policy keeps them
};

}  // namespace fencepool
