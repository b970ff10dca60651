// What the emulation knows of addresses: reservations, mappings, access, and the handles behind them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "driver/host/physical_memory.h"
#include "driver/host/shared_mutex.h"

namespace fencepool::host_driver {

using Address = std::uintptr_t;
using HandleId = CUmemGenericAllocationHandle;

// An allocation handle. It lives while it is referenced or mapped; its value is never used again.
struct Handle {
  std::shared_ptr<Physical> physical;
  std::size_t references = 1;  // cuMemCreate, import and cuMemRetainAllocationHandle, less cuMemRelease
  std::size_t mappings = 0;
};

// [address, address + size) shows the memory of a handle.
struct Mapping {
  std::size_t size;
  HandleId handle;
  // The devices', then the host's, which only memory of the host can grant; all
  // CU_MEM_ACCESS_FLAGS_PROT_NONE.
  std::array<CUmemAccess_flags, kDeviceCount + 1> access{};
};

// The books of all devices. One mutex guards every member: stream threads hold it shared while they copy a
// chunk, whoever changes the address space holds it exclusively. No other lock is taken under it except a
// device's account, a leaf.
struct MemoryBook {
  SharedMutex mutex;
  // Guarded by mutex.
  std::map<Address, std::size_t> reservations;  // start to size
  std::map<Address, Mapping> mappings;          // start to mapping; each lies inside one reservation
  std::map<HandleId, Handle> handles;
  HandleId next_handle = 1;

  // REQUIRES for all below: the mutex is held, shared or exclusively.
  using MappingIterator = std::map<Address, Mapping>::iterator;
  // The mapping that contains `address`, or mappings.end().
  MappingIterator mapping_at(Address address);
  // Whether one reservation contains the whole range.
  bool is_reserved(Address address, std::size_t size);
  // Whether any byte of the range is reserved.
  bool touches_reservation(Address address, std::size_t size);
  // Whether the range consists of mappings without a gap; `allows` may refuse one of them.
  template <typename Allows>
  bool is_covered(Address address, std::size_t size, Allows&& allows);
  // As is_covered, and the range begins and ends with a mapping. The first of them, else mappings.end().
  MappingIterator whole_mappings(Address address, std::size_t size);
  // Whether the mapping at `address` shows memory of the host.
  bool is_on_host(Address address);
  // Whether a device may read (or write) the whole range.
  bool is_accessible_by(int device, Address address, std::size_t size, bool is_write);
};

// Never destroyed.
MemoryBook& memory_book();

// The end of a range, or 0 when it wraps around the address space.
inline Address end_of(Address address, std::size_t size) {
  return size <= UINTPTR_MAX - address ? address + size : 0;
}

template <typename Allows>
bool MemoryBook::is_covered(Address address, std::size_t size, Allows&& allows) {
  const Address end = end_of(address, size);
  if (end == 0) return false;
  for (auto found = mapping_at(address); address < end; ++found) {
    if (found == mappings.end() || found->first > address || !allows(found->second)) return false;
    address = found->first + found->second.size;
  }
  return true;
}

}  // namespace fencepool::host_driver
