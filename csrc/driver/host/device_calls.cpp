// cuDevice*: what the emulated devices say about themselves, and their primary contexts.
#include <cstdio>
#include <cstring>

#include "driver/host/contexts.h"
#include "driver/host/devices.h"
#include "driver/host/entry.h"

namespace fencepool::host_driver::calls {
namespace {

// Copies `text` into a buffer of `length` bytes, cut to fit and always ended by a zero.
CUresult copy_text(const char* text, char* buffer, int length) {
  if (buffer == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(buffer, static_cast<std::size_t>(length), "%s", text);
  return CUDA_SUCCESS;
}

// An attribute of every emulated device. Those not listed are 0: "not supported".
int attribute(CUdevice_attribute which, int ordinal) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
      return 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 2;  // the link carries both directions at once
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
      return ordinal;
    default:
      return 0;
  }
}

}  // namespace

CUresult cuDeviceGetCount(int* count) {
  return entry([&] {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = kDeviceCount;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return entry([&] {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return entry([&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    char text[16];
    std::snprintf(text, sizeof(text), "host %d", device);
    return copy_text(text, name, length);
  });
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  return entry([&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    char text[24];  // domain ffff belongs to no real bus
    std::snprintf(text, sizeof(text), "FFFF:00:%02X.0", static_cast<unsigned>(device));
    if (length < static_cast<int>(std::strlen(text)) + 1) return CUDA_ERROR_INVALID_VALUE;
    return copy_text(text, id, length);
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  return entry([&] {
    if (value == nullptr || which <= 0 || which >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute(which, device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  return entry([&] {
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = device_at(device).total();
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Device& device = device_at(context->device);
    const std::size_t held = device.held();
    *total = device.total();
    *free = held < *total ? *total - held : 0;  // the limit may have been lowered below what is held
    return CUDA_SUCCESS;
  });
}

}  // namespace fencepool::host_driver::calls
