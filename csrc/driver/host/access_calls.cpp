// Who may touch mapped memory: cuMemSetAccess, cuMemGetAccess.
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "driver/host/contexts.h"
#include "driver/host/devices.h"
#include "driver/host/memory_book.h"

namespace fencepool::host_driver {
namespace {

CUresult check_location(const CUmemLocation& location) {
  switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return is_device(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return CUDA_SUCCESS;  // whatever its id
    case CU_MEM_LOCATION_TYPE_HOST:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

bool is_host(const CUmemLocation& location) { return location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA; }

std::size_t index_of(const CUmemLocation& location) {
  return static_cast<std::size_t>(is_host(location) ? kDeviceCount : location.id);
}

CUresult check_descriptions(const CUmemAccessDesc* descriptions, std::size_t count) {
  if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t index = 0; index < count; ++index) {
    const CUmemAccessDesc& description = descriptions[index];
    if (const CUresult status = check_location(description.location); status != CUDA_SUCCESS) return status;
    switch (description.flags) {
      case CU_MEM_ACCESS_FLAGS_PROT_NONE:
      case CU_MEM_ACCESS_FLAGS_PROT_READ:
      case CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

// The processor gets the widest access that the host or any device has.
int protection(const Mapping& mapping) {
  const CUmemAccess_flags widest = *std::max_element(mapping.access.begin(), mapping.access.end());
  if (widest == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return PROT_READ | PROT_WRITE;
  return widest == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_NONE;
}

}  // namespace

namespace calls {

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* descriptions,
                        std::size_t count) {
  return entry([&] {
    if (const CUresult status = sticky_status(); status != CUDA_SUCCESS) return status;
    if (const CUresult status = check_descriptions(descriptions, count); status != CUDA_SUCCESS)
      return status;
    MemoryBook& book = memory_book();
    const std::unique_lock<SharedMutex> lock(book.mutex);
    const auto first = book.whole_mappings(address, size);
    if (first == book.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    const bool is_for_host = std::any_of(descriptions, descriptions + count,
                                         [](const auto& one) { return is_host(one.location); });
    for (auto found = first; is_for_host && found != book.mappings.end() && found->first < address + size;
         ++found) {
      // The host's access is to memory of the host alone.
      if (!book.handles.at(found->second.handle).physical->is_on_host()) return CUDA_ERROR_INVALID_VALUE;
    }
    for (auto found = first; found != book.mappings.end() && found->first < address + size; ++found) {
      Mapping changed = found->second;
      for (std::size_t index = 0; index < count; ++index) {
        changed.access[index_of(descriptions[index].location)] = descriptions[index].flags;
      }
      // The books follow each success, so that they are right even when a later one fails.
      if (mprotect(reinterpret_cast<void*>(found->first), changed.size, protection(changed)) != 0) {
        return CUDA_ERROR_OPERATING_SYSTEM;
      }
      found->second = changed;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  return entry([&] {
    if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult status = check_location(*location); status != CUDA_SUCCESS) return status;
    MemoryBook& book = memory_book();
    const std::shared_lock<SharedMutex> lock(book.mutex);
    const auto found = book.mapping_at(address);
    if (found == book.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    *flags = found->second.access[index_of(*location)];
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
