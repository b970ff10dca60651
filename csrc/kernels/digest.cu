// The digest kernel: one thread block a block of memory. csrc/digest/format.h says what it computes, and
// csrc/digest/digest.cpp does the same on the CPU.
//
// It is bound by reading device memory: every lane has a strip of 256 bytes in flight at once, and reads each
// byte once.
#include "digest/field.h"

namespace {

using namespace fencepool::digest;

// The sum over a warp's lanes, in all of them; at most kPrime + 7.
__device__ __forceinline__ std::uint64_t sum_of_warp(std::uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fold(value + __shfl_xor_sync(0xffffffffU, value, distance));
  }
  return value;
}

__device__ __forceinline__ std::uint64_t product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint64_t>(a) * b;
}

struct Place {
  const char* start;
  std::uint32_t size;
};

__device__ __forceinline__ Place place_of(const Launch& launch, std::uint32_t block) {
  std::uint32_t low = 0;
  std::uint32_t high = launch.runs - 1;  // the last run that begins at or before the block
  while (low < high) {
    const std::uint32_t middle = (low + high + 1) / 2;
    if (launch.run[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const std::uint32_t inside = block - launch.run[low].first_block;
  const std::uint32_t head = launch.run[low].head;
  const std::uint64_t begin = inside == 0 ? 0 : head + static_cast<std::uint64_t>(inside - 1) * kBlock;
  const std::uint64_t longest = inside == 0 ? head : kBlock;
  const std::uint64_t left = launch.run[low].bytes - begin;
  return {reinterpret_cast<const char*>(launch.run[low].address + begin),
          static_cast<std::uint32_t>(left < longest ? left : longest)};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2) fencepool_digest(const __grid_constant__ Launch launch) {
  if (blockIdx.x >= launch.blocks) return;
  const Place place = place_of(launch, blockIdx.x);
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t lane = threadIdx.x % kLanes;

  std::uint64_t value[2] = {0, 0};
#pragma unroll 1
  for (std::uint32_t i = 0; i < kTilesPerWarp; ++i) {
    const std::uint32_t tile = (i * kWarps + warp) * kTile;
    const std::uint32_t first = tile + lane * kUnit;
    uint4 units[kRows];
    if (tile + kTile <= place.size) {
#pragma unroll
      for (std::uint32_t row = 0; row < kRows; ++row) {
        units[row] = __ldcs(reinterpret_cast<const uint4*>(place.start + first + row * kLanes * kUnit));
      }
    } else {
#pragma unroll
      for (std::uint32_t row = 0; row < kRows; ++row) {
        const std::uint32_t at = first + row * kLanes * kUnit;
        units[row] = at < place.size ? __ldcs(reinterpret_cast<const uint4*>(place.start + at))
                                     : make_uint4(0, 0, 0, 0);
      }
    }
    std::uint64_t sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (std::uint32_t row = 0; row < kRows; ++row) {
      const uint4 unit = units[row];
#pragma unroll
      for (std::uint32_t sum = 0; sum < 4; ++sum) {
        const std::uint32_t at = 4 * row + 2 * sum;
        sums[sum] += product(unit.x + launch.key.words[at], unit.y + launch.key.words[at + 1]);
        sums[sum] += product(unit.z + launch.key.words[at + 2], unit.w + launch.key.words[at + 3]);
      }
    }
#pragma unroll
    for (std::uint32_t part = 0; part < 2; ++part) {
      value[part] = multiply(value[part], launch.key.point[part]) + fold(sums[2 * part]);
      value[part] = multiply(value[part], launch.key.point[part]) + fold(sums[2 * part + 1]);
    }
  }

  __shared__ std::uint64_t of_warps[2][kWarps];
#pragma unroll
  for (std::uint32_t part = 0; part < 2; ++part) {
    const std::uint64_t sum = sum_of_warp(multiply(value[part], launch.key.lane[part][lane]));
    if (lane == 0) of_warps[part][warp] = multiply(sum, launch.key.warp[part][warp]);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::uint64_t digest[2] = {0, 0};
#pragma unroll
  for (std::uint32_t part = 0; part < 2; ++part) {
#pragma unroll
    for (std::uint32_t i = 0; i < kWarps; ++i) digest[part] = fold(digest[part] + of_warps[part][i]);
  }
  reinterpret_cast<ulonglong2*>(launch.output)[blockIdx.x] =
      make_ulonglong2(canonical(digest[0]), canonical(digest[1]));
}
