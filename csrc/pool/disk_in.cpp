#include "pool/disk_in.h"

#include "base/problems.h"

namespace fencepool {

DiskIn::~DiskIn() {
  jobs_.stop();
  for (DiskJobs::Slot& slot : reading_) jobs_.give_back(slot);
  const bool is_unmarked = !copying_.empty() && !copying_.back().is_marked;  // a call failed in between
  if (is_unmarked && !drain(jobs_.claim())) {
    problems::record(
        {jobs_.claim().pool().tag(), ": copies from a disk's buffer could not be awaited; leaked"});
    jobs_.leak(copying_.back());
  }
  for (DiskJobs::Slot& slot : copying_) jobs_.give_back(slot);
}

void DiskIn::run() {
  while (jobs_.has_next() || !reading_.empty()) {
    jobs_.look();
    const bool is_any_free = take_copied();
    const bool is_any_begun = read_next();
    if (!copy_read() && !is_any_free && !is_any_begun) jobs_.rest(!copying_.empty());
  }
}

bool DiskIn::take_copied() {
  bool is_any = false;
  while (jobs_.has_next() && !copying_.empty()) {
    if (!copying_.front().is_copied()) break;
    jobs_.recycle(copying_, copying_.begin());
    is_any = true;
  }
  return is_any;
}

bool DiskIn::read_next() {
  if (!jobs_.has_next() || !jobs_.begin_next(reading_)) return false;
  if (!reading_.back().buffer.empty()) jobs_.read(reading_.back());
  return true;
}

bool DiskIn::copy_read() {
  if (reading_.empty()) return false;
  DiskJobs::Slot& slot = reading_.front();
  if (!slot.buffer.empty() && !slot.job.is_done()) return false;
  copying_.splice(copying_.end(), reading_, reading_.begin());
  for (const DiskLoad::Part& part : slot.load.parts) {
    bring_(part, part.at == kZeros ? nullptr : slot.start() + part.at);
  }
  slot.mark(jobs_.claim().stream());
  return true;
}

}  // namespace fencepool
