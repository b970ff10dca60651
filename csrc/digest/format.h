// What a digest is, and what its kernel is told. Shared by the kernel (csrc/kernels/) and by the CPU's
// implementation, so it holds plain data only.
//
// A digest is a keyed universal hash, in two levels:
//
// 1. NH with Toeplitz extension (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC: Fast and Secure Message
//    Authentication", CRYPTO 1999) over strips of 256 bytes, with 32-bit words and four sums of 64 bits. Two
//    different strips have equal sums with a probability of at most 2^-128, and sums that are equal modulo
//    2^61 - 1 with at most 2^-111.
// 2. Two polynomial hashes over the field of 2^61 - 1 elements, one over the first two sums of each strip
//    and one over the others, along the strips of a lane (degree 8), then two linear combinations with keys
//    of their own, over the lanes of a warp and over the warps. Each level collides with at most 8 / 2^61.
//
// So two different blocks of the same size share a digest with a probability below 2^-104, over the choice of
// the key. The key is drawn at random once a process, after which nothing that a program stores can depend on
// it.
//
// The strips of a block are spread so that a warp reads memory in one run: a tile of 8 KiB holds 16 rows of
// 32 units of 16 bytes, and lane i of a warp has the i-th unit of every row. A block shorter than its largest
// size counts as if zeros followed, so digests are compared between blocks of one size only.
#pragma once

#include <cstdint>

namespace fencepool::digest {

constexpr std::uint32_t kUnit = 16;  // bytes
constexpr std::uint32_t kLanes = 32;
constexpr std::uint32_t kWarps = 8;
constexpr std::uint32_t kRows = 16;
constexpr std::uint32_t kTile = kRows * kLanes * kUnit;           // bytes
constexpr std::uint32_t kTilesPerWarp = 4;                        // of one block
constexpr std::uint32_t kBlock = kTile * kWarps * kTilesPerWarp;  // 256 KiB
constexpr std::uint32_t kWords = 4 * kRows + 6;                   // each further sum starts two words later
constexpr std::uint64_t kPrime = (std::uint64_t{1} << 61) - 1;

struct Digest {
  std::uint64_t first, second;  // elements of the field
};
inline bool operator==(const Digest& a, const Digest& b) {
  return a.first == b.first && a.second == b.second;
}

struct Key {
  std::uint64_t point[2];         // where the polynomials are evaluated
  std::uint64_t lane[2][kLanes];  // factors of the linear combinations
  std::uint64_t warp[2][kWarps];
  std::uint32_t words[kWords];  // of NH
};

// A run of bytes, cut into blocks: the first has at most `head` bytes, so that the rest lie on a grid.
struct Run {
  std::uint64_t address;      // a multiple of kUnit
  std::uint64_t bytes;        // the same; above 0
  std::uint32_t head;         // bytes, at most kBlock
  std::uint32_t first_block;  // its first block's place in the output
};

constexpr std::uint32_t kMostRuns = 120;

// The kernel's only argument; kernel arguments hold 4 KiB everywhere.
struct Launch {
  std::uint64_t output;  // address of a Digest for each block
  std::uint32_t blocks;
  std::uint32_t runs;
  Key key;
  Run run[kMostRuns];
};
static_assert(sizeof(Launch) <= 4096, "a kernel takes 4 KiB of arguments");

constexpr std::uint32_t kThreads = kLanes * kWarps;  // of a thread block, which does one block
constexpr const char* kKernel = "fencepool_digest";

}  // namespace fencepool::digest
