// Physical memory and its handles: cuMemCreate, release, retain, export, import.
#include <cerrno>
#include <mutex>

#include "driver/host/contexts.h"
#include "driver/host/devices.h"
#include "driver/host/memory_book.h"

namespace fencepool::host_driver {
namespace {

using Lock = std::unique_lock<SharedMutex>;

// Whether an allocation of these properties exists on the emulated machine, and if not, the error for it.
CUresult check_properties(const CUmemAllocationProp* properties) {
  if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      if (!is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
      break;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      if (properties->location.id != kNumaNode) return CUDA_ERROR_INVALID_VALUE;
      if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
      break;
    case CU_MEM_LOCATION_TYPE_HOST:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  switch (properties->requestedHandleTypes) {
    case CU_MEM_HANDLE_TYPE_NONE:
    case CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  // Compression is a hint, which CUDA itself may not follow; the other two would change what memory is.
  if (properties->allocFlags.gpuDirectRDMACapable != 0 || properties->allocFlags.usage != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// Enters the memory as a new handle, which a second owner of memory already here shares with the first.
// Called without the lock.
HandleId enter(std::shared_ptr<Physical> physical) {
  MemoryBook& book = memory_book();
  const Lock lock(book.mutex);
  for (const auto& [id, handle] : book.handles) {
    if (!handle.physical->is_same(*physical)) continue;
    physical = handle.physical;  // its account stays charged until the last handle is gone
    break;
  }
  Handle handle;
  handle.physical = std::move(physical);
  const HandleId id = book.next_handle;
  book.handles.emplace(id, std::move(handle));
  ++book.next_handle;
  return id;
}

}  // namespace

namespace calls {

CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  return entry([&] {
    if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult status = check_properties(properties); status != CUDA_SUCCESS) return status;
    *granularity = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemCreate(HandleId* handle, std::size_t size, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  return entry([&] {
    if (const CUresult status = sticky_status(); status != CUDA_SUCCESS) return status;
    if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (size == 0 || size % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult status = check_properties(properties);
    if (status != CUDA_SUCCESS) return status;
    std::shared_ptr<Physical> physical;
    const bool is_host = properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    status = Physical::create(is_host ? kOnHost : properties->location.id, size,
                              properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE, physical);
    if (status == CUDA_SUCCESS) *handle = enter(std::move(physical));
    return status;
  });
}

CUresult cuMemRelease(HandleId id) {
  return entry([&] {
    if (const CUresult status = sticky_status(); status != CUDA_SUCCESS) return status;
    std::shared_ptr<Physical> last;  // dies after the lock: freeing gigabytes of pages takes a while
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto found = book.handles.find(id);
    if (found == book.handles.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
    Handle& handle = found->second;
    if (--handle.references == 0 && handle.mappings == 0) {
      last = std::move(handle.physical);
      book.handles.erase(found);
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemRetainAllocationHandle(HandleId* handle, void* address) {
  return entry([&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto mapping = book.mapping_at(reinterpret_cast<Address>(address));
    if (mapping == book.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    *handle = mapping->second.handle;
    ++book.handles.at(*handle).references;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemExportToShareableHandle(void* shareable, HandleId id, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  return entry([&] {
    if (shareable == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    MemoryBook& book = memory_book();
    const Lock lock(book.mutex);
    const auto found = book.handles.find(id);
    if (found == book.handles.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
    const Physical& physical = *found->second.physical;
    if (!physical.is_exportable) return CUDA_ERROR_INVALID_VALUE;
    const int descriptor = physical.duplicate();
    if (descriptor < 0) return allocation_error(errno);
    *static_cast<int*>(shareable) = descriptor;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemImportFromShareableHandle(HandleId* handle, void* shareable, CUmemAllocationHandleType type) {
  return entry([&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    // CUDA passes the descriptor's number as the pointer itself.
    const auto descriptor = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
    std::shared_ptr<Physical> physical;
    const CUresult status = Physical::import(descriptor, physical);
    if (status == CUDA_SUCCESS) *handle = enter(std::move(physical));
    return status;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
