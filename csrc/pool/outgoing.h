// What a pause does with its pools before their memory is given away. A swap does the same.
#pragma once

#include <memory>
#include <vector>

#include "pool/claims.h"
#include "pool/copy_out.h"

namespace fencepool {

using Copies = std::vector<std::unique_ptr<CopyOut>>;

// Waits for the work in flight, gives back what was freed before, and notes whose contents are dropped.
void settle_work(Claims& claims, const PauseOptions& options);

// Submits the copies of every pool with a backup. All of them before anything is given away: what can
// fail for want of host memory or in a driver call has not failed then.
Copies start_copies(Claims& claims, const PauseOptions& options);

// How much host memory pools have before the pause that they would not keep after the next resume.
class KeptBackups {
 public:
  explicit KeptBackups(Claims& claims);
  // After a pause that failed: what it added goes back.
  void restore() noexcept;

 private:
  Claims& claims_;
  std::vector<std::size_t> chunks_;
};

// Seconds of a pause, by phase.
struct PauseSeconds {
  double quiesce = 0, digest = 0, provision = 0, copy = 0, unmap = 0, release = 0, total = 0;
  Phases phases() const;
};

// What each pool remembers of the pause. Room for it is made beforehand: by then nothing may fail.
class PauseRecords {
 public:
  explicit PauseRecords(Claims& claims);
  void complete(const PauseSeconds& seconds, TransitionReport& report) noexcept;

 private:
  Claims& claims_;
  Phases whole_;
  std::vector<Phases> own_;
};

}  // namespace fencepool
