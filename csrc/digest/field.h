// Arithmetic modulo 2^61 - 1 on values below 2^62, for the CPU and for the kernel.
#pragma once

#include "digest/format.h"

#ifdef __CUDACC__
#define FENCEPOOL_BOTH __host__ __device__ __forceinline__
#else
#define FENCEPOOL_BOTH inline
#endif

namespace fencepool::digest {

// Any 64 bits, to at most kPrime + 7 and the same modulo kPrime.
FENCEPOOL_BOTH std::uint64_t fold(std::uint64_t value) { return (value & kPrime) + (value >> 61); }

// The product, at most kPrime + 7; for factors whose product is below 2^124.
FENCEPOOL_BOTH std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  const std::uint64_t low = a * b;
  const std::uint64_t high = __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  const auto low = static_cast<std::uint64_t>(product);
  const auto high = static_cast<std::uint64_t>(product >> 64);
#endif
  return fold((low & kPrime) + ((low >> 61) | (high << 3)));
}

// The one below kPrime.
FENCEPOOL_BOTH std::uint64_t canonical(std::uint64_t value) {
  const std::uint64_t folded = fold(value);
  return folded >= kPrime ? folded - kPrime : folded;
}

}  // namespace fencepool::digest
