// One pool's copy to its backup, during a pause.
#pragma once

#include <memory>
#include <vector>

#include "backup/provision.h"
#include "pool/claim.h"

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

  // Plans where everything goes and starts to provision host memory. Throws kHostMemory.
  explicit CopyOut(Pool::Claim& claim);
  ~CopyOut();
  CopyOut(const CopyOut&) = delete;
  CopyOut& operator=(const CopyOut&) = delete;

  // Submits every copy, each as soon as the host memory it goes to is ready. Needs a Device::Scope.
  void start(const Interrupt& interrupt);
  // The host memory and the places of the contents stay with the pool: from here on the backup is true
  // for every segment whose copies have ended.
  void keep(const Interrupt& interrupt);
  // In the order in which they end. One batch while host memory is still being provisioned: the driver
  // then makes every call wait, and events are calls.
  const std::vector<Batch>& batches() const { return batches_; }

  Pool::Claim& claim() const { return claim_; }
  double seconds_waited() const { return seconds_waited_; }  // for host memory
  std::size_t bytes() const { return bytes_; }               // copied

 private:
  void copy(CUdeviceptr from, const Pool::Claim::Piece& piece, const Interrupt& interrupt);
  void end_batch(std::vector<Segment*>& segments);

  Pool::Claim& claim_;
  Pool::Claim::Image image_;
  Provision provision_;
  std::vector<Batch> batches_;
  double seconds_waited_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace fencepool
