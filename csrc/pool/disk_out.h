// The way from a device to a disk, for one pool: copies to staging buffers, and writes from there.
#pragma once

#include "pool/disk_jobs.h"

namespace fencepool {

class DiskOut {
 public:
  DiskOut(Pool::Claim& claim, std::vector<DiskLoad> loads, const Interrupt& interrupt)
      : jobs_(claim, std::move(loads), interrupt) {}
  // Ends what is under way.
  ~DiskOut();
  DiskOut(const DiskOut&) = delete;
  DiskOut& operator=(const DiskOut&) = delete;

  // Returns when everything has been written. Needs a Device::Scope. Throws kDisk, kHostMemory, kDriver, and
  // what interrupts it.
  void run();
  std::size_t bytes() const { return bytes_; }  // copied

 private:
  bool take_written();
  bool write_copied();
  bool copy_next();

  DiskJobs jobs_;
  DiskJobs::Slots copying_;  // in the order of the pool's stream
  DiskJobs::Slots writing_;
  std::size_t bytes_ = 0;
};

}  // namespace fencepool
