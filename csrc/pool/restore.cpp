#include "pool/restore.h"

#include "base/problems.h"
#include "base/retry.h"
#include "pool/claims.h"

namespace fencepool {

// What one segment is about to get. Dies in reverse order: unmapped, then given back.
struct Restore::Staged {
  explicit Staged(Segment& target) : segment(target) {}
  const Physical& memory() const { return physical != nullptr ? *physical : *segment.physical; }

  Segment& segment;
  std::unique_ptr<Physical> physical;  // null: the segment kept its own
  std::unique_ptr<Mapping> mapping;    // null: the segment kept its own
};

Restore::Restore(Pool::Claim& claim) : claim_(claim) {
  for (Segment* segment : claim.segments()) staged_.push_back(std::make_unique<Staged>(*segment));
}

Restore::~Restore() {
  const bool is_drained = !is_running_ || drain(claim_);
  for (auto& staged : staged_) {
    if (staged->mapping == nullptr) continue;
    const auto is_unmapped = [&] { return staged->mapping->unmap() == CUDA_SUCCESS; };
    if (is_drained && succeeds_in_two(is_unmapped)) continue;
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

void Restore::take_memory() {
  const Device::Scope scope(claim_.device());
  for (const auto& staged : staged_) {
    if (staged->segment.physical == nullptr && staged->physical == nullptr) {
      staged->physical = std::make_unique<Physical>(claim_.device(), staged->segment.range.size());
    }
  }
}

void Restore::give_memory_back() {
  for (const auto& staged : staged_) staged->physical.reset();
}

void Restore::map() {
  const Device::Scope scope(claim_.device());
  for (const auto& staged : staged_) {
    if (staged->segment.mapping == nullptr) {
      staged->mapping = std::make_unique<Mapping>(staged->segment.range, staged->memory());
    }
  }
}

std::shared_ptr<Event> Restore::submit() {
  const bool is_copied = claim_.keeps_contents();
  const bool is_zeroed = !is_copied && claim_.policy().fill == Fill::kZero;
  if (staged_.empty() || (!is_copied && !is_zeroed)) return nullptr;
  const Device::Scope scope(claim_.device());
  Driver& driver = claim_.device().driver();
  Stream& stream = claim_.stream();
  auto event = std::make_shared<Event>(claim_.device());
  is_running_ = true;
  for (const auto& staged : staged_) {
    const Range& range = staged->segment.range;
    if (staged->segment.has_contents_kept) continue;
    if (is_zeroed) {
      driver.check<Call::cuMemsetD8Async>(range.address(), static_cast<unsigned char>(0), range.size(),
                                          stream.get());
    } else {
      copy_back(staged->segment, stream.get());
    }
  }
  stream.record(*event);
  return event;
}

void Restore::commit() noexcept {
  for (const auto& staged : staged_) {
    if (staged->physical != nullptr) staged->segment.physical = std::move(staged->physical);
    if (staged->mapping != nullptr) staged->segment.mapping = std::move(staged->mapping);
    staged->segment.has_contents_kept = false;
    staged->segment.is_backed_up = false;
    bytes_mapped_ += staged->segment.range.size();
  }
  is_running_ = false;
  claim_.set_state(State::kActive);
}

void Restore::copy_back(const Segment& segment, CUstream stream) {
  const auto pieces = claim_.image().find(segment.serial);
  if (pieces == claim_.image().end()) return;
  for (const Pool::Claim::Piece& piece : pieces->second) {
    for (std::size_t done = 0; done < piece.size;) {
      const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
      claim_.device().driver().check<Call::cuMemcpyHtoDAsync>(segment.range.address() + piece.offset + done,
                                                              static_cast<const void*>(place.address),
                                                              place.size, stream);
      done += place.size;
      bytes_copied_ += place.size;
    }
  }
}

}  // namespace fencepool
