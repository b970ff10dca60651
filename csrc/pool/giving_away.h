// The part of a pause that gives device memory away, and how it is taken back when something fails.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/interrupt.h"
#include "pool/claims.h"
#include "pool/copy_out.h"

namespace fencepool {

// Unmaps and releases the memory of all claimed pools: pools with a backup first, batch by batch as
// their copies end, so that releasing hides behind copying; then, when nothing of those can fail any
// more, the pools without.
//
// On failure everything given away so far is taken back, contents from the backup, and the error is
// thrown. A release that is refused twice, after others have succeeded, is no failure: that memory
// stays with its segment until the next pause or resume, and is counted in the report.
class GivingAway {
 public:
  // Takes the memory for its tables here: what undoes a step must not need any.
  GivingAway(Claims& claims, TransitionReport& report);

  void run(const std::vector<std::unique_ptr<CopyOut>>& copies, const Interrupt& interrupt);

  // The same in steps, for a swap: every batch in turn, then the pools without a backup. Need Scopes of all
  // devices. Whoever takes the steps takes back what they have given away when anything fails later.
  //
  // Each step unmaps memory and sets it aside, since somebody may have use for it. A batch is waited for.
  void set_aside(const CopyOut& copy, const CopyOut::Batch& batch, const Interrupt& interrupt);
  // Contents are not dropped yet. A pool that was paused before gives up what it still holds, except contents
  // that are nowhere else.
  void set_aside_without_backup();
  // Memory of exactly that size that was set aside there; null when there is none. It counts as released.
  std::unique_ptr<Physical> hand_over(const Device& device, std::size_t size) noexcept;
  // Releases what is set aside and has not been handed over.
  void release_the_rest();
  std::size_t bytes_aside() const;
  void take_back(Error* error) noexcept;

  // What the last step sets aside there: memory whose contents are dropped, and what pools that were paused
  // before still hold, as after a pause that could not be undone.
  std::size_t bytes_without_backup(const Device& device) const;
  // Whether contents of a pool without a backup are gone, and whether a pool was paused to begin with.
  bool is_dropped(const Pool::Claim& claim) const { return own(claim).is_dropped; }
  bool was_paused(const Pool::Claim& claim) const { return own(claim).was_paused; }
  // Contents of a paused pool that are nowhere but in its device memory, which stays.
  static bool is_only_copy(const Pool::Claim& claim, const Segment& segment);

  double seconds_waiting() const { return waiting_; }  // for copies to end
  double seconds_unmapping() const { return unmapping_; }
  double seconds_releasing() const { return releasing_; }

 private:
  struct Own {  // what each pool has
    Pool::Claim* claim;
    std::vector<Segment*> segments;
    bool was_paused;
    bool is_dropped = false;
  };

  void set_aside(const Pool::Claim& claim, Segment& segment);
  void unmap(const Pool::Claim& claim, Segment& segment);
  void release(const Pool::Claim& claim, Segment& segment);
  void count_as_released(const Pool::Claim& claim, Segment& segment) noexcept;
  void note_dropped(const Pool::Claim& claim) noexcept;
  const Own& own(const Pool::Claim& claim) const;
  void show(const Pool::Claim& claim, Segment& segment);

  Claims& claims_;
  TransitionReport& report_;
  std::vector<Own> pools_;
  std::vector<std::pair<const Pool::Claim*, Segment*>> aside_;  // unmapped, and not released yet
  bool is_begun_ = false;                                       // else there is nothing to take back
  bool is_any_released_ = false;
  double waiting_ = 0;
  double unmapping_ = 0;
  double releasing_ = 0;
};

}  // namespace fencepool
