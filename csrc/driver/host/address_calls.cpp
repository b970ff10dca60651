// Address ranges and mappings: reserve, free, map, unmap.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "driver/host/contexts.h"
#include "driver/host/memory_book.h"

namespace fencepool::host_driver {
namespace {

using Lock = std::unique_lock<SharedMutex>;

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

bool is_multiple(std::uint64_t value, std::size_t unit) { return value % unit == 0; }

void* as_pointer(Address address) { return reinterpret_cast<void*>(address); }

// Takes addresses that fault when they are touched. 0 when there are none.
Address take_addresses(std::size_t size, std::size_t alignment, Address hint) {
  if (hint != 0) {  // only a hint: another place will do
    void* at = mmap(as_pointer(hint), size, PROT_NONE, kReserveFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == as_pointer(hint) && is_multiple(hint, alignment)) return hint;
    if (at != MAP_FAILED) munmap(at, size);
  }
  if (size > SIZE_MAX - alignment) return 0;
  // Take an alignment's worth more and give both ends back.
  const std::size_t taken = size + alignment;
  void* raw = mmap(nullptr, taken, PROT_NONE, kReserveFlags, -1, 0);
  if (raw == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<Address>(raw);
  const Address aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned != start) munmap(raw, aligned - start);
  munmap(as_pointer(aligned + size), start + taken - (aligned + size));
  return aligned;
}

// Turns mapped addresses into reserved ones again, atomically: no other mmap can slip in between.
bool make_inaccessible(Address address, std::size_t size) {
  return mmap(as_pointer(address), size, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace

namespace calls {

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t size, std::size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  return entry([&] {
    if (address == nullptr || flags != 0 || size == 0 || !is_multiple(size, kGranularity)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if ((alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_multiple(hint, static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE)))) return CUDA_ERROR_INVALID_VALUE;
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const Address taken = take_addresses(size, std::max(alignment, kGranularity), hint);
    if (taken == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult status = without_exceptions([&] {
      book.reservations.emplace(taken, size);
      return CUDA_SUCCESS;
    });
    if (status == CUDA_SUCCESS) {
      *address = taken;
    } else {
      munmap(as_pointer(taken), size);
    }
    return status;
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  return entry([&] {
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto reservation = book.reservations.find(address);
    if (reservation == book.reservations.end() || reservation->second != size)
      return CUDA_ERROR_INVALID_VALUE;
    const auto next = book.mappings.lower_bound(address);
    if (next != book.mappings.end() && next->first - address < size) return CUDA_ERROR_INVALID_VALUE;
    if (munmap(as_pointer(address), size) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    book.reservations.erase(reservation);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset, HandleId id,
                  unsigned long long flags) {
  return entry([&] {
    if (const CUresult status = sticky_status(); status != CUDA_SUCCESS) return status;
    if (flags != 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
    if (offset != 0) return CUDA_ERROR_NOT_SUPPORTED;  // what NVIDIA's driver says (580)
    if (!is_multiple(address, kGranularity) || !is_multiple(size, kGranularity))
      return CUDA_ERROR_INVALID_VALUE;
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto found = book.handles.find(id);
    if (found == book.handles.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
    Handle& handle = found->second;
    if (size != handle.physical->size || !book.is_reserved(address, size)) return CUDA_ERROR_INVALID_VALUE;
    const auto next = book.mappings.lower_bound(address);
    if (next != book.mappings.end() && next->first - address < size) return CUDA_ERROR_INVALID_VALUE;
    if (book.mapping_at(address) != book.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    // The entry that can throw comes first; from the system call on nothing can fail.
    const auto entered = book.mappings.emplace(address, Mapping{size, id, {}}).first;
    if (mmap(as_pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle.physical->descriptor(),
             0) == MAP_FAILED) {
      const CUresult status = allocation_error(errno);
      book.mappings.erase(entered);
      make_inaccessible(address, size);  // in case the failed call left a hole; best effort
      return status;
    }
    ++handle.mappings;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  return entry([&] {
    if (const CUresult status = sticky_status(); status != CUDA_SUCCESS) return status;
    std::vector<std::shared_ptr<Physical>> freed;  // die after the lock: freeing pages takes a while
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto first = book.whole_mappings(address, size);
    if (first == book.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    const auto last = book.mappings.lower_bound(address + size);
    freed.reserve(static_cast<std::size_t>(std::distance(first, last)));
    if (!make_inaccessible(address, size)) return CUDA_ERROR_OPERATING_SYSTEM;
    for (auto mapping = first; mapping != last; mapping = book.mappings.erase(mapping)) {
      const auto handle = book.handles.find(mapping->second.handle);
      if (--handle->second.mappings != 0 || handle->second.references != 0) continue;
      freed.push_back(std::move(handle->second.physical));
      book.handles.erase(handle);
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
