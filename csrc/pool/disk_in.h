// The way from a disk to a device, for one pool: reads to staging buffers, and copies from there, in order.
#pragma once

#include <functional>
#include <memory>

#include "pool/disk_jobs.h"

namespace fencepool {

class DiskIn {
 public:
  // Submits what brings one part back; `from` is where it lies in host memory, null for zeros.
  using Bring = std::function<void(const DiskLoad::Part&, const char* from)>;

  DiskIn(Pool::Claim& claim, std::vector<DiskLoad> loads, Bring bring, const Interrupt& interrupt)
      : jobs_(claim, std::move(loads), interrupt), bring_(std::move(bring)) {}
  // Ends the reads. Copies that were submitted go on, and their buffers wait for them.
  ~DiskIn();
  DiskIn(const DiskIn&) = delete;
  DiskIn& operator=(const DiskIn&) = delete;

  // Returns when everything has been read and the last copy is submitted. Needs a Device::Scope. Throws
  // kDisk, kHostMemory, kDriver, and what interrupts it.
  void run();

 private:
  bool take_copied();
  bool copy_read();
  bool read_next();

  DiskJobs jobs_;
  Bring bring_;
  DiskJobs::Slots reading_;  // in the order of the contents
  DiskJobs::Slots copying_;  // in the order of the pool's stream
};

}  // namespace fencepool
