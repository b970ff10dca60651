#include "digest/digest.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "digest/field.h"

namespace fencepool::digest {
namespace {

void fill_with_random(void* to, std::size_t size) {
  auto* at = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t got = getrandom(at, size, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw Error(
          Kind::kUnavailable,
          std::string("the system gives no random numbers for digests: getrandom: ") + std::strerror(errno));
    }
    at += got;
    size -= static_cast<std::size_t>(got);
  }
}

// Uniform among the field's elements.
void draw(std::uint64_t& element) {
  do {
    fill_with_random(&element, sizeof element);
    element &= kPrime;
  } while (element == kPrime);
}

Key draw_key() {
  Key key{};
  fill_with_random(key.words, sizeof key.words);
  for (std::size_t i = 0; i < 2; ++i) {
    draw(key.point[i]);
    for (std::uint64_t& factor : key.lane[i]) draw(factor);
    for (std::uint64_t& factor : key.warp[i]) draw(factor);
  }
  return key;
}

using Sums = std::array<std::uint64_t, 4>;

// Adds one unit to NH's four sums; `key` is that row's first word.
inline void add_unit(Sums& sums, const std::uint32_t* words, const std::uint32_t* key) {
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint32_t* k = key + 2 * i;
    sums[i] += std::uint64_t{words[0] + k[0]} * std::uint64_t{words[1] + k[1]} +
               std::uint64_t{words[2] + k[2]} * std::uint64_t{words[3] + k[3]};
  }
}

// The sums of a strip of zeros, which every strip behind a block's end has.
Sums sums_of_zeros(const Key& key) {
  Sums sums{};
  const std::array<std::uint32_t, 4> zeros{};
  for (std::size_t row = 0; row < kRows; ++row) add_unit(sums, zeros.data(), key.words + 4 * row);
  return sums;
}

// A lane's two polynomials.
struct Lane {
  std::uint64_t value[2] = {0, 0};

  void append(const Key& key, const Sums& sums) {
    for (std::size_t i = 0; i < 2; ++i) {
      value[i] = multiply(value[i], key.point[i]) + fold(sums[2 * i]);
      value[i] = multiply(value[i], key.point[i]) + fold(sums[2 * i + 1]);
    }
  }
};

}  // namespace

const Key& process_key() {
  static const Key& key = *new Key(draw_key());
  return key;
}

Digest of(const Key& key, const void* data, std::size_t size) noexcept {
  const auto* bytes = static_cast<const char*>(data);
  const Sums of_zeros = sums_of_zeros(key);
  Digest digest{0, 0};
  for (std::size_t warp = 0; warp < kWarps; ++warp) {
    std::array<Lane, kLanes> lanes;
    for (std::size_t tile = warp; tile < std::size_t{kWarps} * kTilesPerWarp; tile += kWarps) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        Sums sums{};
        std::size_t at = tile * kTile + lane * kUnit;
        if (at >= size) {
          lanes[lane].append(key, of_zeros);
          continue;
        }
        for (std::size_t row = 0; row < kRows; ++row, at += std::size_t{kLanes} * kUnit) {
          std::array<std::uint32_t, 4> words{};
          if (at < size) std::memcpy(words.data(), bytes + at, kUnit);
          add_unit(sums, words.data(), key.words + 4 * row);
        }
        lanes[lane].append(key, sums);
      }
    }
    for (std::size_t i = 0; i < 2; ++i) {
      std::uint64_t sum = 0;
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        sum = fold(sum + multiply(lanes[lane].value[i], key.lane[i][lane]));
      }
      std::uint64_t& part = i == 0 ? digest.first : digest.second;
      part = fold(part + multiply(sum, key.warp[i][warp]));
    }
  }
  return {canonical(digest.first), canonical(digest.second)};
}

std::uint64_t blocks_in(std::uint64_t bytes, std::uint32_t head) noexcept {
  if (bytes <= head) return 1;
  return 1 + (bytes - head + kBlock - 1) / kBlock;
}

BlockPlace place_of(const Launch& launch, std::uint32_t block) noexcept {
  std::uint32_t at = 0;  // the last run that begins at or before the block
  while (at + 1 < launch.runs && launch.run[at + 1].first_block <= block) ++at;
  const Run& run = launch.run[at];
  const std::uint32_t inside = block - run.first_block;
  const std::uint64_t begin = inside == 0 ? 0 : run.head + std::uint64_t{inside - 1} * kBlock;
  const std::uint64_t longest = inside == 0 ? run.head : kBlock;
  return {run.address + begin, static_cast<std::uint32_t>(std::min(longest, run.bytes - begin))};
}

}  // namespace fencepool::digest
