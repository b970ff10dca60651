#include "driver/host/memory_book.h"

#include <algorithm>
#include <shared_mutex>

namespace fencepool::host_driver {

MemoryBook& memory_book() {
  static auto* const book = new MemoryBook();
  return *book;
}

MemoryBook::MappingIterator MemoryBook::mapping_at(Address address) {
  auto found = mappings.upper_bound(address);
  if (found == mappings.begin()) return mappings.end();
  --found;
  return address - found->first < found->second.size ? found : mappings.end();
}

bool MemoryBook::is_reserved(Address address, std::size_t size) {
  auto found = reservations.upper_bound(address);
  if (found == reservations.begin()) return false;
  --found;
  const std::size_t offset = address - found->first;
  return offset < found->second && size <= found->second - offset;
}

bool MemoryBook::touches_reservation(Address address, std::size_t size) {
  auto found = reservations.upper_bound(address);
  if (found != reservations.end() && found->first - address < size) return true;
  return found != reservations.begin() && address - (--found)->first < found->second;
}

MemoryBook::MappingIterator MemoryBook::whole_mappings(Address address, std::size_t size) {
  const auto first = mappings.find(address);
  if (size == 0 || first == mappings.end()) return mappings.end();
  std::size_t covered = 0;
  auto next = first;
  while (covered < size) {
    if (next == mappings.end() || next->first != address + covered) return mappings.end();
    covered += next->second.size;
    ++next;
  }
  return covered == size ? first : mappings.end();
}

bool MemoryBook::is_on_host(Address address) {
  const auto found = mapping_at(address);
  return found != mappings.end() && handles.at(found->second.handle).physical->is_on_host();
}

bool MemoryBook::is_accessible_by(int device, Address address, std::size_t size, bool is_write) {
  return is_covered(address, size, [&](const Mapping& mapping) {
    const CUmemAccess_flags access = mapping.access[static_cast<std::size_t>(device)];
    return access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
           (!is_write && access == CU_MEM_ACCESS_FLAGS_PROT_READ);
  });
}

bool is_accessible(std::uintptr_t address, std::size_t size) {
  MemoryBook& book = memory_book();
  const std::shared_lock<SharedMutex> lock(book.mutex);
  return book.is_covered(address, size, [](const Mapping& mapping) {
    return std::any_of(mapping.access.begin(), mapping.access.end(),
                       [](CUmemAccess_flags access) { return access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE; });
  });
}

}  // namespace fencepool::host_driver
