// Where a paused pool's contents are in its backup.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "digest/format.h"

namespace fencepool {

// A run of bytes of a segment. With digests each is a block of the segment's grid, or a part of one.
struct Piece {
  std::size_t offset = 0;    // bytes from the segment's start
  std::size_t size = 0;      // bytes
  std::size_t position = 0;  // in the backup, or kZeros
  digest::Digest digest{};
  bool is_digested = false;  // `digest` is what the contents have
};

constexpr std::size_t kPositionStep = 512;       // bytes; every position in a backup is a multiple
constexpr std::size_t kZeros = ~std::size_t{0};  // stored nowhere: all bytes are zero

// By segment serial; each segment's pieces in order.
using Image = std::map<std::uint64_t, std::vector<Piece>>;

// `size` bytes in whole steps.
constexpr std::size_t in_steps(std::size_t size, std::size_t step) { return (size + step - 1) / step * step; }

std::size_t bytes_of(const Image& image);  // of contents, whatever is stored

// Of what is stored, each place in whole steps: equal contents once, zeros not at all.
std::size_t bytes_stored(const Image& image, std::size_t step);
// Bytes that a backup with these places has to have, in whole steps.
std::size_t end_of(const Image& image, std::size_t step);

// Appends a run, to the last one where it goes on both here and in the backup.
void append_run(std::vector<Piece>& runs, const Piece& piece);

// Where each block of a new image goes.
struct Placed {
  Image copies;         // what is not stored yet, in long runs
  std::size_t end = 0;  // bytes the backup has to have
};

// Gives every block, whose digest is known, its position: that of an equal block where there is one, in
// `stored` or before it in the new image; else its old place where that is free, or a new one. Zeros are
// stored nowhere. `stored` is what the backup holds now; null: nothing. Blocks of equal size and digest count
// as equal. Positions are multiples of `step`, which is the same as when `stored` was placed.
Placed place_blocks(Image& blocks, const Image* stored, const digest::Digest& zeros, std::size_t step);

}  // namespace fencepool
