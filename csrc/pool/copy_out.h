// One pool's copy to its backup, during a pause.
#pragma once

#include "backup/provision.h"
#include "pool/claim.h"

namespace fencepool {

// Until it is finished, its death ends the copies and takes the new host memory away again.
class CopyOut {
 public:
  // Plans where everything goes and starts to provision host memory. Throws kHostMemory.
  explicit CopyOut(Pool::Claim& claim);
  ~CopyOut();
  CopyOut(const CopyOut&) = delete;
  CopyOut& operator=(const CopyOut&) = delete;

  // Submits the copies, each as soon as the host memory it goes to is ready. Needs a Device::Scope.
  void start();
  // Waits for them; the backup is true from here on. Needs a Device::Scope.
  void finish();

  Pool::Claim& claim() const { return claim_; }
  double seconds_waited() const { return seconds_waited_; }  // for host memory
  std::size_t bytes() const { return bytes_; }               // copied

 private:
  void copy(CUdeviceptr from, const Pool::Claim::Piece& piece, CUstream stream);

  Pool::Claim& claim_;
  Pool::Claim::Image image_;
  Provision provision_;
  bool is_running_ = false;
  double seconds_waited_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace fencepool
