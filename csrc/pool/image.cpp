#include "pool/image.h"

#include <algorithm>
#include <utility>

namespace fencepool {
namespace {

// Which positions of a backup are in use, by where a block begins.
class Used {
 public:
  explicit Used(std::size_t end) : bits_(end / kPositionStep + 1) {}
  void add(std::size_t position) { bits_[position / kPositionStep] = true; }
  bool has(std::size_t position) const { return bits_[position / kPositionStep]; }

 private:
  std::vector<bool> bits_;
};

// A block that is not where it was.
struct Missing {
  std::uint64_t segment;
  Piece* block;
  const Piece* home;  // what was at its place in the stored image; null: something else, or nothing
  std::size_t same;   // the first missing block with equal contents; itself, if it is that one
  bool is_found;      // its position is known
};

bool is_equal(const Piece& a, const Piece& b) { return a.digest == b.digest && a.size == b.size; }

// Finds missing blocks by contents: open addressing, since a node for each of a hundred thousand blocks is
// slow. A slot holds half of the digest, so that blocks which differ are told apart without a look at them.
class ByContents {
 public:
  explicit ByContents(std::vector<Missing>& missing) : missing_(missing) {
    std::size_t size = 16;
    while (size < 2 * missing.size()) size *= 2;
    slots_.assign(size, {0, kNone});
  }
  // The first missing block equal to it; null when there is none.
  Missing* find(const Piece& piece) {
    const std::size_t at = slots_[slot_of(piece)].index;
    return at == kNone ? nullptr : &missing_[at];
  }
  // The first one equal to block number `index`, which may be itself.
  std::size_t add(std::size_t index) {
    const Piece& block = *missing_[index].block;
    Slot& slot = slots_[slot_of(block)];
    if (slot.index == kNone) slot = {block.digest.second, index};
    return slot.index;
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  struct Slot {
    std::uint64_t half;
    std::size_t index;
  };

  std::size_t slot_of(const Piece& piece) const {
    std::size_t at = piece.digest.first & (slots_.size() - 1);
    for (;; at = (at + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[at];
      if (slot.index == kNone) return at;
      if (slot.half == piece.digest.second && is_equal(*missing_[slot.index].block, piece)) return at;
    }
  }

  std::vector<Missing>& missing_;
  std::vector<Slot> slots_;
};

constexpr std::size_t kUnplaced = kZeros - 1;

// Each place that blocks are stored at, once and in order: position and size.
std::vector<std::pair<std::size_t, std::size_t>> places_of(const Image& blocks) {
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (const auto& [segment, pieces] : blocks) {
    for (const Piece& piece : pieces) {
      if (piece.position < kUnplaced) places.emplace_back(piece.position, piece.size);
    }
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

// Hands out what lies between the positions in use, then what lies behind them.
class Gaps {
 public:
  Gaps(const Image& blocks, std::size_t step) : used_(places_of(blocks)), step_(step) {}
  std::size_t take(std::size_t size) {
    while (next_ < used_.size() && used_[next_].first < at_ + size) {
      at_ = std::max(at_, in_steps(used_[next_].first + used_[next_].second, step_));
      ++next_;
    }
    return std::exchange(at_, at_ + in_steps(size, step_));
  }

 private:
  const std::vector<std::pair<std::size_t, std::size_t>> used_;
  const std::size_t step_;
  std::size_t next_ = 0;
  std::size_t at_ = 0;
};

// Leaves every block where it is stored, if it is what it was; the others are missing.
std::vector<Missing> find_missing(Image& blocks, const Image& stored, const digest::Digest& zeros,
                                  Used& used) {
  std::vector<Missing> missing;
  static const std::vector<Piece> nothing;
  for (auto& [segment, own] : blocks) {
    const auto found = stored.find(segment);
    const std::vector<Piece>& before = found == stored.end() ? nothing : found->second;
    std::size_t next = 0;
    for (Piece& block : own) {
      while (next < before.size() && before[next].offset < block.offset) ++next;
      const bool has_home = next < before.size() && before[next].offset == block.offset &&
                            before[next].size == block.size && before[next].position != kZeros;
      const Piece* home = has_home ? &before[next] : nullptr;
      if (block.digest == zeros) {
        block.position = kZeros;
      } else if (home != nullptr && home->is_digested && home->digest == block.digest) {
        block.position = home->position;
        used.add(block.position);
      } else {
        block.position = kUnplaced;
        missing.push_back({segment, &block, home, 0, false});
      }
    }
  }
  return missing;
}

// Where the missing blocks' contents are stored under another block.
void find_elsewhere(std::vector<Missing>& missing, const Image& stored, Used& used) {
  if (missing.empty()) return;
  ByContents by_contents(missing);
  for (std::size_t i = 0; i < missing.size(); ++i) missing[i].same = by_contents.add(i);
  for (const auto& [segment, pieces] : stored) {
    for (const Piece& piece : pieces) {
      if (!piece.is_digested || piece.position == kZeros) continue;
      Missing* const one = by_contents.find(piece);
      if (one == nullptr || one->is_found) continue;
      one->is_found = true;
      one->block->position = piece.position;
      used.add(piece.position);
    }
  }
}

}  // namespace

std::size_t bytes_of(const Image& image) {
  std::size_t bytes = 0;
  for (const auto& [segment, pieces] : image) {
    for (const Piece& piece : pieces) bytes += piece.size;
  }
  return bytes;
}

std::size_t bytes_stored(const Image& image, std::size_t step) {
  std::size_t bytes = 0;
  for (const auto& [position, size] : places_of(image)) bytes += in_steps(size, step);
  return bytes;
}

std::size_t end_of(const Image& image, std::size_t step) {
  std::size_t end = 0;
  for (const auto& [segment, pieces] : image) {
    for (const Piece& piece : pieces) {
      if (piece.position != kZeros) end = std::max(end, in_steps(piece.position + piece.size, step));
    }
  }
  return end;
}

void append_run(std::vector<Piece>& runs, const Piece& piece) {
  if (!runs.empty()) {
    Piece& last = runs.back();
    const std::size_t next = piece.position == kZeros ? kZeros : last.position + last.size;
    if (last.offset + last.size == piece.offset && next == piece.position &&
        (last.position == kZeros) == (piece.position == kZeros)) {
      last.size += piece.size;
      return;
    }
  }
  runs.push_back({piece.offset, piece.size, piece.position});
}

Placed place_blocks(Image& blocks, const Image* stored, const digest::Digest& zeros, std::size_t step) {
  static const Image nothing;
  const Image& before = stored == nullptr ? nothing : *stored;
  Placed placed;
  Used used(end_of(before, step));
  std::vector<Missing> missing = find_missing(blocks, before, zeros, used);
  find_elsewhere(missing, before, used);
  const auto needs_place = [&](std::size_t i) { return missing[i].same == i && !missing[i].is_found; };
  std::vector<std::size_t> homeless;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    if (!needs_place(i)) continue;
    const Piece* home = missing[i].home;
    if (home != nullptr && !used.has(home->position)) {
      missing[i].block->position = home->position;
      used.add(home->position);
    } else {
      homeless.push_back(i);
    }
  }
  if (!homeless.empty()) {
    Gaps gaps(blocks, step);
    for (const std::size_t i : homeless) missing[i].block->position = gaps.take(missing[i].block->size);
  }
  for (std::size_t i = 0; i < missing.size(); ++i) {
    if (needs_place(i)) {
      append_run(placed.copies[missing[i].segment], *missing[i].block);
    } else {
      missing[i].block->position = missing[missing[i].same].block->position;
    }
  }
  placed.end = end_of(blocks, step);
  return placed;
}

}  // namespace fencepool
