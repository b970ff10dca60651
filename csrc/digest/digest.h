// Digests on the CPU, and the process's key.
#pragma once

#include <cstddef>

#include "digest/format.h"

namespace fencepool::digest {

// The key of this process, drawn from the kernel's random numbers on first use. Thread-safe.
// Throws Error(kUnavailable) when the kernel gives none.
const Key& process_key();

// The digest of [data, data + size); `size` is a multiple of kUnit and at most kBlock. Thread-safe.
Digest of(const Key& key, const void* data, std::size_t size) noexcept;

// What the kernel does, on the CPU, for one block of the launch; its address and size.
struct BlockPlace {
  std::uint64_t address;
  std::uint32_t size;  // bytes
};
BlockPlace place_of(const Launch& launch, std::uint32_t block) noexcept;

// How many blocks a run is cut into.
std::uint64_t blocks_in(std::uint64_t bytes, std::uint32_t head) noexcept;

}  // namespace fencepool::digest
