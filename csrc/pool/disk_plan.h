// How contents go through staging buffers: which bytes of segments and of the file are in which buffer.
#pragma once

#include <cstddef>
#include <vector>

#include "pool/image.h"
#include "pool/segment.h"

namespace fencepool {

// What one buffer has at a time.
struct DiskLoad {
  // A run of bytes of the file, in whole steps of its alignment.
  struct Extent {
    std::size_t position, at, size;  // bytes: in the file, in the buffer
  };
  // A run of bytes of a segment.
  struct Part {
    const Segment* segment;
    std::size_t offset, size;  // bytes
    std::size_t at;            // in the buffer; kZeros: stored nowhere
    bool is_last;              // of its segment
  };
  std::vector<Extent> extents;
  std::vector<Part> parts;  // in the order in which they were added
};

// Pieces that follow each other in the file come in one extent, those that do here too in one part.
class DiskPlan {
 public:
  // `step` and `buffer` are bytes; a buffer holds whole steps.
  DiskPlan(std::size_t step, std::size_t buffer) : step_(step), buffer_(buffer) {}

  void add(const Segment& segment, const Piece& piece);
  // All pieces of the segment have been added.
  void end_segment();
  std::vector<DiskLoad> take() { return std::move(loads_); }

 private:
  std::size_t stretch(std::size_t position, std::size_t size);
  void append(const Segment& segment, std::size_t offset, std::size_t size, std::size_t at);

  const std::size_t step_;
  const std::size_t buffer_;
  std::vector<DiskLoad> loads_;
  std::size_t used_ = 0;  // bytes of the last load's buffer
};

}  // namespace fencepool
