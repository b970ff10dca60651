// The embedded driver: CUDA's virtual-memory, stream and event calls on ordinary host memory.
//
// It keeps the real driver's rules and error codes; docs/host-driver.md lists each rule it keeps,
// the CUDA document the rule comes from, and each it does not keep. This header is what the rest of
// fencepool may ask of it beyond the driver table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/table.h"

namespace fencepool::host_driver {

inline constexpr int kDeviceCount = 4;                             // "cpu" is device 0; "cpu:1" to "cpu:3"
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;  // bytes, as on the GPUs of today
inline constexpr int kNumaNode = 0;                                // the host has one

// Settings of the emulated machine. They apply to calls made after the change.
struct Settings {
  std::size_t memory_limit = 0;  // bytes of physical memory a device; 0: the memory of the machine
  std::uint64_t bandwidth = 0;   // bytes per second of the link, each direction; 0: as fast as memcpy
  bool is_poisoned = false;      // fill new physical memory with kPoison instead of zero
};
inline constexpr unsigned char kPoison = 0xA5;

// Thread-safe. `device` is 0 .. kDeviceCount-1.
Settings settings(int device);
void set_settings(int device, const Settings& settings);

// What is alive, for tests that look for leaks. Counts over all devices of this process.
struct Counts {
  std::size_t ranges, handles, mappings, streams, events, registrations, graphs;
  std::size_t physical_bytes;  // held by handles and mappings
};
Counts counts();

// Clears a device's sticky error, as ending the process would on a GPU. For tests. Work given to the broken
// context is dropped first; a host function that still runs is waited for.
void clear_sticky_error(int device);

// Whether [address, address + size) is mapped and accessible now. For tests and for checks before use.
bool is_accessible(std::uintptr_t address, std::size_t size);

}  // namespace fencepool::host_driver
