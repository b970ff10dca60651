#include "pool/extents.h"

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
