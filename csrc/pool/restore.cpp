#include "pool/restore.h"

#include <algorithm>

#include "base/clock.h"
#include "base/problems.h"
#include "base/retry.h"
#include "pool/claims.h"
#include "pool/digest_pass.h"
#include "pool/disk_in.h"

namespace fencepool {

// What one segment is about to get. Dies in reverse order: unmapped, then given back.
struct Restore::Staged {
  explicit Staged(Segment& target) : segment(target) {}
  // Takes the stand-in, or a debugging page, from the segment's addresses, which device memory is about to
  // get.
  void hide() {
    const auto unmap = [this](auto& mapped) {
      const CUresult status = mapped.unmap();
      if (status != CUDA_SUCCESS) throw segment.range.device().driver().failure(Call::cuMemUnmap, status);
    };
    if (segment.tripwire != nullptr) {
      unmap(*segment.tripwire);
      segment.tripwire.reset();
    }
    if (segment.shown == nullptr) return;
    unmap(*segment.shown);
    is_hidden = true;
  }
  // As it was before hide(). False when the driver refuses twice.
  bool show_again() noexcept {
    if (!is_hidden) return true;
    Call failed = Call::cuMemMap;
    const bool is_shown =
        succeeds_in_two([&] { return segment.shown->map(segment.stand_in->memory, failed) == CUDA_SUCCESS; });
    if (!is_shown) forget_shown();
    is_hidden = false;
    return is_shown;
  }
  void forget_shown() noexcept {
    if (is_hidden) segment.shown.reset();
    is_hidden = false;
  }

  const Physical& memory() const { return physical != nullptr ? *physical : *segment.physical; }

  Segment& segment;
  std::unique_ptr<Physical> physical;  // null: the segment kept its own
  std::unique_ptr<Mapping> mapping;    // null: the segment kept its own
  bool is_hidden = false;              // its stand-in, for the time of this restore
};

Restore::Restore(Pool::Claim& claim) : claim_(claim) {
  for (Segment* segment : claim.segments()) staged_.push_back(std::make_unique<Staged>(*segment));
}

Restore::~Restore() {
  const bool is_drained = !is_running_ || drain(claim_);
  if (!is_drained) claim_.set_undrained();
  for (auto& staged : staged_) {
    const auto is_unmapped = [&] { return staged->mapping->unmap() == CUDA_SUCCESS; };
    if (staged->mapping == nullptr || (is_drained && succeeds_in_two(is_unmapped))) {
      if (staged->show_again()) continue;
      problems::record({claim_.pool().tag(),
                        ": a resume could not be undone; what is at its addresses stays away "
                        "until it resumes, its contents are kept"});
      continue;
    }
    staged->forget_shown();
    // It stays mapped, to memory without the contents, since copies may still write there or the driver
    // refused twice. The next resume or pause carries on from there.
    problems::record({claim_.pool().tag(), ": a resume could not be undone; its memory stays held for now"});
    if (staged->physical != nullptr) staged->segment.physical = std::move(staged->physical);
    staged->segment.mapping = std::move(staged->mapping);
  }
}

std::size_t Restore::bytes_wanted() const {
  std::size_t bytes = 0;
  for (const auto& staged : staged_) {
    if (staged->segment.physical == nullptr) bytes += staged->segment.range.size();
  }
  return bytes;
}

std::size_t Restore::bytes_missing() const {
  std::size_t bytes = 0;
  for (const auto& staged : staged_) {
    if (is_lacking(*staged)) bytes += staged->segment.range.size();
  }
  return bytes;
}

void Restore::take_memory() {
  const Device::Scope scope(claim_.device());
  for (const auto& staged : staged_) take(*staged);
}

bool Restore::is_lacking(const Staged& staged) {
  return staged.segment.physical == nullptr && staged.physical == nullptr;
}

void Restore::take(Staged& staged) {
  if (!is_lacking(staged)) return;
  staged.physical = std::make_unique<Physical>(claim_.device(), staged.segment.range.size());
}

void Restore::give_memory_back() {
  for (const auto& staged : staged_) staged->physical.reset();
}

void Restore::map() {
  const Device::Scope scope(claim_.device());
  for (const auto& staged : staged_) map(*staged);
}

void Restore::map(Staged& staged) {
  if (staged.segment.mapping != nullptr) return;
  staged.hide();
  staged.mapping = std::make_unique<Mapping>(staged.segment.range, staged.memory());
}

std::shared_ptr<const Marks> Restore::submit(bool is_fine, const Interrupt& interrupt) {
  const Device::Scope scope(claim_.device());
  interrupt_ = interrupt;
  if (!begin(is_fine)) return nullptr;
  if (claim_.is_on_disk()) {
    read_back(0, staged_.size());
  } else {
    for (const auto& staged : staged_) bring_back(*staged);
  }
  return marker_->finish();
}

void Restore::start(bool is_fine, const Interrupt& interrupt) {
  const Device::Scope scope(claim_.device());
  interrupt_ = interrupt;
  static_cast<void>(begin(is_fine));
}

Restore::Step Restore::advance(const Spare& spare) {
  if (next_ == staged_.size()) return Step::kDone;
  Staged& staged = *staged_[next_];
  const Device::Scope scope(claim_.device());
  Stopwatch watch;
  try {
    if (spare && is_lacking(staged)) staged.physical = spare(claim_.device(), staged.segment.range.size());
    take(staged);
  } catch (const Error& error) {
    taking_ += watch.lap();
    if (error.kind != Kind::kOutOfMemory) throw;
    return Step::kNoMemory;
  }
  taking_ += watch.lap();
  map(staged);
  mapping_ += watch.lap();
  if (marker_ != nullptr && claim_.is_on_disk()) {
    read_back(next_, next_ + 1);
  } else if (marker_ != nullptr) {
    bring_back(staged);
  }
  submitting_ += watch.lap();
  ++next_;
  return Step::kMoved;
}

std::shared_ptr<const Marks> Restore::finish() {
  if (marker_ == nullptr) return nullptr;
  const Device::Scope scope(claim_.device());
  return marker_->finish();
}

// False when there is nothing to bring back. Needs a Device::Scope, as what follows does.
bool Restore::begin(bool is_fine) {
  const bool is_copied = claim_.keeps_contents();
  is_zeroed_ = !is_copied && claim_.policy().fill == Fill::kZero;
  if (staged_.empty() || (!is_copied && !is_zeroed_)) return false;
  marker_ = std::make_unique<Marker>(claim_.stream(), bytes_to_bring_back(), is_fine);
  is_running_ = true;
  return true;
}

void Restore::bring_back(const Staged& staged) {
  if (staged.segment.has_contents_kept) return;
  const Range& range = staged.segment.range;
  const CUstream stream = claim_.stream().get();
  if (is_zeroed_) {
    claim_.device().driver().check<Call::cuMemsetD8Async>(range.address(), static_cast<unsigned char>(0),
                                                          range.size(), stream);
    marker_->add(range.address(), range.size());
  } else {
    copy_back(staged.segment, stream);
  }
  marker_->end_segment();
}

// The contents of those of staged_, from a disk. One after the other, so that what is read ahead may belong
// to the segments behind.
void Restore::read_back(std::size_t first, std::size_t last) {
  DiskPlan plan(claim_.step(), Staging::kBuffer);
  for (std::size_t i = first; i < last; ++i) {
    const Segment& segment = staged_[i]->segment;
    const auto found = claim_.image().find(segment.serial);
    if (segment.has_contents_kept || found == claim_.image().end()) continue;
    for (const Piece& piece : found->second) plan.add(segment, piece);
    plan.end_segment();
  }
  const auto bring = [this](const DiskLoad::Part& part, const char* from) { bring_part(part, from); };
  DiskIn(claim_, plan.take(), bring, interrupt_).run();
}

void Restore::bring_part(const DiskLoad::Part& part, const char* from) {
  Driver& driver = claim_.device().driver();
  const CUstream stream = claim_.stream().get();
  for (std::size_t done = 0; done < part.size;) {
    const CUdeviceptr to = part.segment->range.address() + part.offset + done;
    const std::size_t size = std::min(part.size - done, marker_->room());
    if (from == nullptr) {
      driver.check<Call::cuMemsetD8Async>(to, static_cast<unsigned char>(0), size, stream);
    } else {
      driver.check<Call::cuMemcpyHtoDAsync>(to, static_cast<const void*>(from + done), size, stream);
      bytes_copied_ += size;
    }
    marker_->add(to, size);
    done += size;
  }
  if (part.is_last) marker_->end_segment();
}

std::size_t Restore::bytes_to_bring_back() const {
  if (!is_zeroed_) return bytes_of(claim_.image());
  std::size_t bytes = 0;
  for (const auto& staged : staged_) bytes += staged->segment.range.size();
  return bytes;
}

void Restore::commit() noexcept {
  for (const auto& staged : staged_) {
    if (staged->physical != nullptr) staged->segment.physical = std::move(staged->physical);
    if (staged->mapping != nullptr) staged->segment.mapping = std::move(staged->mapping);
    staged->segment.has_contents_kept = false;
    staged->segment.is_backed_up = false;
    staged->forget_shown();
    bytes_mapped_ += staged->segment.range.size();
  }
  is_running_ = false;
  claim_.set_state(State::kActive);
}

// Pieces that follow each other, here and in the backup, come in one copy.
void Restore::copy_back(const Segment& segment, CUstream stream) {
  const auto found = claim_.image().find(segment.serial);
  if (found == claim_.image().end()) return;
  std::vector<Piece> runs;
  for (const Piece& piece : found->second) append_run(runs, piece);
  for (const Piece& run : runs) copy_run(segment, run, stream);
}

void Restore::copy_run(const Segment& segment, const Piece& run, CUstream stream) {
  Driver& driver = claim_.device().driver();
  for (std::size_t done = 0; done < run.size;) {
    const std::size_t offset = run.offset + done;
    const CUdeviceptr to = segment.range.address() + offset;
    std::size_t part = std::min(run.size - done, marker_->room());
    if (segment.stand_in != nullptr) {
      driver.check<Call::cuMemcpyDtoDAsync>(to, segment.stand_in->window.address() + offset, part, stream);
      bytes_copied_ += part;
    } else if (run.position == kZeros) {
      driver.check<Call::cuMemsetD8Async>(to, static_cast<unsigned char>(0), part, stream);
    } else {
      const HostBuffer::Place place = claim_.buffer().place(run.position + done, part);
      part = place.size;
      driver.check<Call::cuMemcpyHtoDAsync>(to, static_cast<const void*>(place.address), part, stream);
      bytes_copied_ += part;
    }
    marker_->add(to, part);
    done += part;
  }
}

void Restore::verify(const Interrupt& interrupt) {
  const Device::Scope scope(claim_.device());
  if (!claim_.keeps_contents()) return;
  DigestPass pass(claim_);
  std::vector<std::pair<const Segment*, const Piece*>> blocks;
  std::size_t unknown = 0;
  for (const auto& staged : staged_) {
    const Segment& segment = staged->segment;
    const auto found = claim_.image().find(segment.serial);
    if (segment.has_contents_kept || found == claim_.image().end()) continue;
    std::vector<Extent> runs;  // of blocks that follow each other
    for (const Piece& piece : found->second) {
      if (!piece.is_digested) {
        ++unknown;
      } else if (!runs.empty() && runs.back().offset + runs.back().size == piece.offset) {
        runs.back().size += piece.size;
      } else {
        runs.push_back({piece.offset, piece.size});
      }
      if (piece.is_digested) blocks.emplace_back(&segment, &piece);
    }
    for (const Extent& run : runs) pass.add(segment.range.address() + run.offset, run.offset, run.size);
  }
  if (unknown > 0 && blocks.empty()) {
    throw Error(
        Kind::kUnavailable,
        "its backup has no digests to verify it by: it was taken without, or there are views of all of it");
  }
  pass.submit();
  const digest::Digest* found = pass.wait(interrupt);
  std::size_t wrong = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (found[i] == blocks[i].second->digest) continue;
    if (wrong++ == 0) first = i;
  }
  if (wrong == 0) return;
  const auto& [segment, piece] = blocks[first];
  Error error(Kind::kCorrupted, "the backup is not what was stored: " + std::to_string(wrong) + " of " +
                                    std::to_string(blocks.size()) + " blocks differ, first " +
                                    format_bytes(piece->size) + " at byte " + std::to_string(piece->offset) +
                                    " of the segment at " + format_address(segment->range.address()));
  error.wanted = piece->size;
  throw error;
}

}  // namespace fencepool
