// One pool's copy to its backup, during a pause.
#pragma once

#include <memory>
#include <vector>

#include "backup/provision.h"
#include "pool/claim.h"
#include "pool/disk_out.h"
#include "pool/stand_ins.h"

namespace fencepool {

// Until its copies have ended, its death ends them. Host memory that was taken for them goes away with
// it, unless keep() was called.
class CopyOut {
 public:
  // Segments whose copies end together.
  struct Batch {
    std::vector<Segment*> segments;
    std::shared_ptr<Event> copied;
  };
  static constexpr std::size_t kBatch = std::size_t{128} << 20;  // bytes, at least

  // Plans where everything goes, by digest where the pool has digests. `dead` bytes are left out. Needs a
  // Device::Scope. Throws what the device failed with.
  CopyOut(Pool::Claim& claim, const DeadBytes& dead, const Interrupt& interrupt);
  ~CopyOut();
  CopyOut(const CopyOut&) = delete;
  CopyOut& operator=(const CopyOut&) = delete;

  // Host memory that the pool does not have yet.
  std::size_t bytes_missing() const;
  // Takes the space on a disk that the pool does not have yet. How much of it the file system has not set
  // aside, since it cannot: require_disk() asks whether so much is free. Throw kDisk.
  std::size_t reserve();
  void require_disk(std::size_t bytes) const { claim_.disk().file.require_free(bytes); }
  // Provisions host memory, and submits every copy as soon as the memory it goes to is ready. Where the
  // contents go to a disk, returns when they are there. Needs a Device::Scope. Throws kHostMemory, kDisk.
  void start(const Interrupt& interrupt);
  // The host memory and the places of the contents stay with the pool: from here on the backup is true
  // for every segment whose copies have ended.
  void keep(const Interrupt& interrupt);
  // All copies have ended: later pauses need not repeat them.
  void commit() noexcept;
  // In the order in which they end. One batch while host memory is still being provisioned: the driver
  // then makes every call wait, and events are calls.
  const std::vector<Batch>& batches() const { return batches_; }

  Pool::Claim& claim() const { return claim_; }
  double seconds_waited() const { return seconds_waited_; }        // for host memory
  double seconds_digesting() const { return seconds_digesting_; }  // and for planning by digest
  std::size_t bytes() const { return bytes_; }                     // copied

 private:
  // The memory for digests goes again when a pause fails that made it.
  class DigestMemory {
   public:
    explicit DigestMemory(Pool::Claim& claim) : claim_(claim), is_kept_(claim.has_digest_memory()) {}
    ~DigestMemory() {
      if (!is_kept_) claim_.drop_digest_memory();
    }
    DigestMemory(const DigestMemory&) = delete;
    DigestMemory& operator=(const DigestMemory&) = delete;
    void keep() noexcept { is_kept_ = true; }

   private:
    Pool::Claim& claim_;
    bool is_kept_;
  };

  // The space on a disk goes again when a pause fails that took it, unless the pool is paused by now.
  class DiskSpace {
   public:
    explicit DiskSpace(Pool::Claim& claim) : claim_(claim), before_(claim.capacity()) {}
    ~DiskSpace() {
      if (!is_kept_ && claim_.is_on_disk() && claim_.state() != State::kPaused) {
        claim_.disk().file.shrink(before_);
      }
    }
    DiskSpace(const DiskSpace&) = delete;
    DiskSpace& operator=(const DiskSpace&) = delete;
    void keep() noexcept { is_kept_ = true; }

   private:
    Pool::Claim& claim_;
    const std::size_t before_;  // bytes
    bool is_kept_ = false;
  };

  void write_to_disk(const Interrupt& interrupt);
  void place_by_digest(const Interrupt& interrupt);
  void copy_to_stand_in(const Segment& segment, const Piece& piece);
  void copy(CUdeviceptr from, const Piece& piece, const Interrupt& interrupt);
  void end_batch(std::vector<Segment*>& segments);

  Pool::Claim& claim_;
  DigestMemory digest_memory_;
  DiskSpace disk_space_;
  // Somebody holds a view of the backup, and may have written to it or do so later: neither what it held nor
  // what it gets now can be relied on by any other pause.
  const bool is_exposed_;
  Image image_;
  Image copies_;                          // what of it is not in the backup yet
  std::size_t wanted_ = 0;                // bytes the backup has to have
  std::unique_ptr<Provision> provision_;  // null where stand-ins take the contents
  std::unique_ptr<StandIns> stand_ins_;
  std::vector<Batch> batches_;
  double seconds_waited_ = 0;
  double seconds_digesting_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace fencepool
