#include "pool/disk_plan.h"

#include <algorithm>

namespace fencepool {

void DiskPlan::add(const Segment& segment, const Piece& piece) {
  if (loads_.empty()) loads_.emplace_back();
  if (piece.position == kZeros) return append(segment, piece.offset, piece.size, kZeros);
  for (std::size_t done = 0; done < piece.size;) {
    if (used_ == buffer_) {
      loads_.emplace_back();
      used_ = 0;
    }
    const std::size_t part = std::min(piece.size - done, buffer_ - used_);
    append(segment, piece.offset + done, part, stretch(piece.position + done, part));
    done += part;
  }
}

void DiskPlan::end_segment() {
  if (!loads_.empty() && !loads_.back().parts.empty()) loads_.back().parts.back().is_last = true;
}

// Room in the buffer for that part of the file; returns where.
std::size_t DiskPlan::stretch(std::size_t position, std::size_t size) {
  const std::size_t whole = in_steps(size, step_);
  std::vector<DiskLoad::Extent>& extents = loads_.back().extents;
  if (!extents.empty() && extents.back().position + extents.back().size == position) {
    extents.back().size += whole;
  } else {
    extents.push_back({position, used_, whole});
  }
  const std::size_t at = used_;
  used_ += whole;
  return at;
}

void DiskPlan::append(const Segment& segment, std::size_t offset, std::size_t size, std::size_t at) {
  std::vector<DiskLoad::Part>& parts = loads_.back().parts;
  if (!parts.empty()) {
    DiskLoad::Part& last = parts.back();
    const std::size_t next = last.at == kZeros ? kZeros : last.at + last.size;
    if (last.segment == &segment && last.offset + last.size == offset && next == at) {
      last.size += size;
      return;
    }
  }
  parts.push_back({&segment, offset, size, at, false});
}

}  // namespace fencepool
