#include "pool/giving_away.h"

#include <algorithm>

#include "base/clock.h"
#include "base/problems.h"
#include "pool/restore.h"

namespace fencepool {
namespace {

constexpr const char* kUnchanged = "Nothing was changed; pause again";

}  // namespace

GivingAway::GivingAway(Claims& claims, TransitionReport& report) : claims_(claims), report_(report) {
  std::size_t count = 0;
  for (const auto& claim : claims) {
    pools_.push_back({claim.get(), claim->segments(), claim->state() == State::kPaused});
    count += pools_.back().segments.size();
  }
  aside_.reserve(count);
}

void GivingAway::run(const std::vector<std::unique_ptr<CopyOut>>& copies, const Interrupt& interrupt) {
  const Scopes scopes(claims_.devices());  // all of them before anything is unmapped
  try {
    for (const auto& copy : copies) {
      for (const CopyOut::Batch& batch : copy->batches()) {
        set_aside(*copy, batch, interrupt);
        release_the_rest();
      }
    }
    set_aside_without_backup();
    release_the_rest();
  } catch (Error& error) {
    take_back(&error);
    throw;
  } catch (const std::exception&) {
    take_back(nullptr);
    throw;
  }
}

void GivingAway::set_aside(const CopyOut& copy, const CopyOut::Batch& batch, const Interrupt& interrupt) {
  const Pool::Claim& claim = copy.claim();
  Stopwatch watch;
  try {
    static_cast<void>(wait_for(*batch.copied, -1, interrupt));
  } catch (Error& error) {
    claim.pool().explain(error, copy.bytes(), kUnchanged);
    throw;
  }
  waiting_ += watch.lap();
  is_begun_ = true;
  for (Segment* segment : batch.segments) segment->is_backed_up = true;
  for (Segment* segment : batch.segments) set_aside(claim, *segment);
}

void GivingAway::set_aside(const Pool::Claim& claim, Segment& segment) {
  unmap(claim, segment);
  show(claim, segment);
  if (segment.physical != nullptr) aside_.emplace_back(&claim, &segment);
}

std::unique_ptr<Physical> GivingAway::hand_over(const Device& device, std::size_t size) noexcept {
  const auto fits = [&](const auto& entry) {
    return &entry.first->device() == &device && entry.second->range.size() == size;
  };
  const auto found = std::find_if(aside_.begin(), aside_.end(), fits);
  if (found == aside_.end()) return nullptr;
  const auto [claim, segment] = *found;
  aside_.erase(found);
  std::unique_ptr<Physical> memory = std::move(segment->physical);
  count_as_released(*claim, *segment);
  return memory;
}

std::size_t GivingAway::bytes_aside() const {
  std::size_t bytes = 0;
  for (const auto& entry : aside_) bytes += entry.second->range.size();
  return bytes;
}

void GivingAway::release_the_rest() {
  for (const auto& [claim, segment] : aside_) release(*claim, *segment);
  aside_.clear();
}

// Everything is unmapped, which can be undone, before the first is released, which drops its contents.
void GivingAway::set_aside_without_backup() {
  is_begun_ = true;
  for (const auto& [claim, segments, was_paused, is_dropped] : pools_) {
    if (claim->keeps_contents() && !was_paused) continue;  // set aside already
    for (Segment* segment : segments) {
      if (is_only_copy(*claim, *segment)) {
        report_.unreleased_bytes += segment->range.size();
      } else {
        set_aside(*claim, *segment);
      }
    }
  }
}

const GivingAway::Own& GivingAway::own(const Pool::Claim& claim) const {
  return *std::find_if(pools_.begin(), pools_.end(),
                       [&claim](const Own& one) { return one.claim == &claim; });
}

void GivingAway::note_dropped(const Pool::Claim& claim) noexcept {
  if (claim.keeps_contents()) return;
  for (Own& one : pools_) one.is_dropped = one.is_dropped || one.claim == &claim;
}

bool GivingAway::is_only_copy(const Pool::Claim& claim, const Segment& segment) {
  return claim.keeps_contents() && segment.has_contents_kept && !segment.is_backed_up;
}

std::size_t GivingAway::bytes_without_backup(const Device& device) const {
  std::size_t bytes = 0;
  for (const Own& own : pools_) {
    const Pool::Claim& claim = *own.claim;
    if (&claim.device() != &device || (claim.keeps_contents() && claim.state() == State::kActive)) continue;
    bytes += memory_behind(own.segments,
                           [&claim](const Segment& segment) { return !is_only_copy(claim, segment); });
  }
  return bytes;
}

void GivingAway::unmap(const Pool::Claim& claim, Segment& segment) {
  if (segment.mapping == nullptr) return;
  Stopwatch watch;
  const CUresult status = segment.mapping->unmap();
  unmapping_ += watch.lap();
  if (status != CUDA_SUCCESS) {
    Error error = claim.device().driver().failure(Call::cuMemUnmap, status);
    claim.pool().explain(error, segment.range.size(), kUnchanged);
    throw error;
  }
  segment.mapping.reset();
}

// In a resident pool the host memory with the contents stands at the addresses from here on.
void GivingAway::show(const Pool::Claim& claim, Segment& segment) {
  if (!claim.is_resident() || segment.shown != nullptr || !segment.is_backed_up) return;
  Stopwatch watch;
  try {
    segment.shown = std::make_unique<Mapping>(segment.range, segment.stand_in->memory);
    segment.has_contents_kept = false;  // of a pool that was paused before: what is written here now counts
  } catch (Error& error) {
    claim.pool().explain(error, segment.range.size(), kUnchanged);
    throw;
  }
  unmapping_ += watch.lap();
}

void GivingAway::release(const Pool::Claim& claim, Segment& segment) {
  if (segment.physical == nullptr) return;
  Stopwatch watch;
  CUresult status = segment.physical->release();
  if (status != CUDA_SUCCESS) status = segment.physical->release();
  releasing_ += watch.lap();
  if (status == CUDA_SUCCESS) {
    segment.physical.reset();
    count_as_released(claim, segment);
    return;
  }
  if (!is_any_released_) {
    Error error = claim.device().driver().failure(Call::cuMemRelease, status);
    claim.pool().explain(error, segment.range.size(), kUnchanged);
    throw error;
  }
  // What it holds counts no longer: the backup does, where views may be written to, or it was dropped, and
  // what comes after a resume is said by the fill.
  segment.has_contents_kept = false;
  note_dropped(claim);
  report_.unreleased_bytes += segment.range.size();
  note(report_, {claim.pool().tag(), ": cuMemRelease was refused twice; the memory stays held for now"});
}

void GivingAway::count_as_released(const Pool::Claim& claim, Segment& segment) noexcept {
  segment.has_contents_kept = false;
  is_any_released_ = true;
  note_dropped(claim);
  claims_.report_of(claim).bytes += segment.range.size();
}

// Makes every pool active again as it was: memory that was kept is mapped, contents and all; what was
// released is taken again and filled from the backup. A pool for which that fails is paused, its
// contents partly in the memory it keeps and partly in the backup: resume() puts them together.
void GivingAway::take_back(Error* error) noexcept {
  if (!is_begun_) return;
  for (const auto& [claim, segments, was_paused, is_dropped] : pools_) {
    if (was_paused) {
      // Of contents of which a part is gone nothing stays.
      for (Segment* segment : segments)
        segment->has_contents_kept = segment->has_contents_kept && !is_dropped;
      continue;
    }
    bool is_lost = is_dropped;
    try {
      bool is_whole = true;
      for (Segment* segment : segments) {
        // Where host memory shows, it is what counts: somebody may write to it. Of contents of which a part
        // is gone nothing stays.
        segment->has_contents_kept = segment->physical != nullptr && segment->shown == nullptr && !is_dropped;
        is_whole = is_whole && segment->mapping != nullptr;
        is_lost = is_lost || (segment->physical == nullptr && !claim->keeps_contents());
      }
      if (is_whole) {
        for (Segment* segment : segments) segment->has_contents_kept = segment->is_backed_up = false;
        continue;
      }
      Restore restore(*claim);
      restore.take_memory();
      restore.map();
      if (restore.submit(/*is_fine=*/false, {}) != nullptr && !drain(*claim)) {
        throw Error(Kind::kDriver, "copies from the backup could not be awaited");
      }
      restore.commit();
    } catch (const std::exception& second) {
      claim->set_state(State::kPaused);
      problems::record({claim->pool().tag(), ": is paused after a pause that failed: ", second.what()});
      try {
        if (error != nullptr) {
          error->add_note("while undoing: " + std::string(second.what()) + "; " + claim->pool().describe() +
                          (is_lost ? " is paused now, without its contents; resume() brings its memory back"
                                   : " is paused now, its contents are kept; resume() brings it back"));
        }
      } catch (const std::exception&) {
        problems::record({claim->pool().tag(), ": no memory to say so in the error"});
      }
    }
  }
}

}  // namespace fencepool
