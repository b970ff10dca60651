#include "pool/disk_out.h"

#include "base/problems.h"

namespace fencepool {

DiskOut::~DiskOut() {
  jobs_.stop();
  if (!copying_.empty() && !drain(jobs_.claim())) {
    problems::record(
        {jobs_.claim().pool().tag(), ": copies to a disk's buffers could not be awaited; leaked"});
    for (DiskJobs::Slot& slot : copying_) jobs_.leak(slot);
  }
  for (DiskJobs::Slots* slots : {&copying_, &writing_}) {
    for (DiskJobs::Slot& slot : *slots) {
      for (StagingBuffer& buffer : slot.buffer) buffer.is_recorded = false;
      jobs_.give_back(slot);
    }
  }
}

void DiskOut::run() {
  while (jobs_.has_next() || !copying_.empty() || !writing_.empty()) {
    jobs_.look();
    const bool is_any_written = take_written();
    const bool is_any_copied = write_copied();
    if (!copy_next() && !is_any_written && !is_any_copied) jobs_.rest(!copying_.empty());
  }
  DiskFile& file = jobs_.claim().disk().file;
  if (bytes_ > 0 && !file.is_direct()) file.sync();
}

bool DiskOut::take_written() {
  bool is_any = false;
  for (auto next = writing_.begin(); next != writing_.end();) {
    const auto slot = next++;
    if (!slot->job.is_done()) continue;
    jobs_.recycle(writing_, slot);
    is_any = true;
  }
  return is_any;
}

bool DiskOut::write_copied() {
  bool is_any = false;
  while (!copying_.empty() && copying_.front().is_copied()) {
    DiskJobs::Slot& slot = copying_.front();
    writing_.splice(writing_.end(), copying_, copying_.begin());
    jobs_.write(slot);
    is_any = true;
  }
  return is_any;
}

bool DiskOut::copy_next() {
  if (!jobs_.has_next() || !jobs_.begin_next(copying_)) return false;
  DiskJobs::Slot& slot = copying_.back();
  Pool::Claim& claim = jobs_.claim();
  for (const DiskLoad::Part& part : slot.load.parts) {
    claim.device().driver().check<Call::cuMemcpyDtoHAsync>(static_cast<void*>(slot.start() + part.at),
                                                           part.segment->range.address() + part.offset,
                                                           part.size, claim.stream().get());
    bytes_ += part.size;
  }
  slot.mark(claim.stream());
  return true;
}

}  // namespace fencepool
