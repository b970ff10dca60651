#include "pool/extents.h"

#include <algorithm>
#include <iterator>

namespace fencepool {

std::optional<std::size_t> Extents::take(std::size_t size) {
  auto best = free_.end();
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    if (gap->second >= size && (best == free_.end() || gap->second < best->second)) best = gap;
  }
  if (best == free_.end()) return std::nullopt;
  const auto [offset, length] = *best;
  if (length > size) free_.emplace(offset + size, length - size);  // first: it may throw
  free_.erase(best);
  taken_ += size;
  return offset;
}

bool Extents::take_at(std::size_t offset, std::size_t size) {
  const auto after = free_.upper_bound(offset);
  if (after == free_.begin()) return false;
  const auto gap = std::prev(after);
  const std::size_t end = gap->first + gap->second;
  if (size > end - std::min(end, offset)) return false;
  if (end > offset + size) free_.emplace(offset + size, end - (offset + size));  // first: it may throw
  taken_ += size;
  if (gap->first < offset) {
    gap->second = offset - gap->first;
  } else {
    free_.erase(gap);
  }
  return true;
}

std::size_t Extents::end() const {
  if (free_.empty()) return size_;
  const auto& [offset, length] = *free_.rbegin();
  return offset + length == size_ ? offset : size_;
}

void Extents::give_back(std::size_t offset, std::size_t size) {
  auto gap = free_.emplace(offset, size).first;
  taken_ -= size;
  const auto next = std::next(gap);
  if (next != free_.end() && offset + size == next->first) {
    gap->second += next->second;
    free_.erase(next);
  }
  if (gap != free_.begin()) {
    const auto previous = std::prev(gap);
    if (previous->first + previous->second == offset) {
      previous->second += gap->second;
      free_.erase(gap);
    }
  }
}

std::vector<Extent> Extents::taken(std::size_t bridge) const {
  std::vector<Extent> runs;
  std::size_t at = 0;
  const auto add = [&](std::size_t end) {
    if (end <= at) return;
    if (!runs.empty() && at - (runs.back().offset + runs.back().size) < bridge) {
      runs.back().size = end - runs.back().offset;
    } else {
      runs.push_back({at, end - at});
    }
  };
  for (const auto& [offset, size] : free_) {
    add(offset);
    at = offset + size;
  }
  add(size_);
  return runs;
}

}  // namespace fencepool
