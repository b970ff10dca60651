// One pool's copy to its backup, during a pause.
#pragma once

#include <memory>
#include <vector>

#include "backup/provision.h"
#include "pool/claim.h"
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
  // Provisions it, and submits every copy as soon as the memory it goes to is ready. Needs a Device::Scope.
  // Throws kHostMemory.
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

  void place_by_digest(const Interrupt& interrupt);
  void copy_to_stand_in(const Segment& segment, const Piece& piece);
  void copy(CUdeviceptr from, const Piece& piece, const Interrupt& interrupt);
  void end_batch(std::vector<Segment*>& segments);

  Pool::Claim& claim_;
  DigestMemory digest_memory_;
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
