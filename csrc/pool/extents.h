// Which bytes of a segment are taken. Pure bookkeeping: no driver, no memory.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

namespace fencepool {

struct Extent {
  std::size_t offset;  // bytes from the segment's start
  std::size_t size;    // bytes
  bool operator==(const Extent& other) const { return offset == other.offset && size == other.size; }
};

class Extents {
 public:
  explicit Extents(std::size_t size) : size_(size), free_{{0, size}} {}

  // Takes `size` bytes, a multiple of every earlier size's alignment, from the smallest gap that fits.
  std::optional<std::size_t> take(std::size_t size);
  // Gives back what take() gave; adjoining gaps become one.
  void give_back(std::size_t offset, std::size_t size);

  // Taken bytes in order, with gaps smaller than `bridge` counted as taken: fewer, longer copies.
  std::vector<Extent> taken(std::size_t bridge) const;
  std::size_t taken_bytes() const { return taken_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::size_t taken_ = 0;
  std::map<std::size_t, std::size_t> free_;  // offset to size, never adjoining
};

}  // namespace fencepool
