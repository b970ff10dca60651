// RawDriver's memory calls and copies.
#include "bindings/raw_driver.h"

namespace fencepool {
namespace {

using Integer = RawDriver::Integer;
using WithInteger = RawDriver::WithInteger;

CUmemAllocationProp properties_of(int device, int location, int type, int handle_types) {
  CUmemAllocationProp properties{};
  properties.type = static_cast<CUmemAllocationType>(type);
  properties.location.type = static_cast<CUmemLocationType>(location);
  properties.location.id = device;
  properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  return properties;
}

CUstream stream_of(Integer handle) { return reinterpret_cast<CUstream>(handle); }

}  // namespace

std::tuple<int, Integer, Integer> RawDriver::mem_get_info() {
  std::size_t free = 0;
  std::size_t total = 0;
  const CUresult status = driver_.call<Call::cuMemGetInfo>(&free, &total);
  return {status, free, total};
}

WithInteger RawDriver::granularity(int device, int option, int location) {
  const CUmemAllocationProp properties =
      properties_of(device, location, CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE);
  std::size_t bytes = 0;
  const CUresult status = driver_.call<Call::cuMemGetAllocationGranularity>(
      &bytes, &properties, static_cast<CUmemAllocationGranularity_flags>(option));
  return {status, bytes};
}

WithInteger RawDriver::address_reserve(Integer size, Integer alignment, Integer hint) {
  CUdeviceptr address = 0;
  const CUresult status = driver_.call<Call::cuMemAddressReserve>(&address, size, alignment, hint, 0);
  return {status, address};
}

WithInteger RawDriver::mem_create(int device, Integer size, bool is_exportable, int location, int type,
                                  int handle_types) {
  if (is_exportable) handle_types |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  const CUmemAllocationProp properties = properties_of(device, location, type, handle_types);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = driver_.call<Call::cuMemCreate>(&handle, size, &properties, 0);
  return {status, handle};
}

int RawDriver::mem_set_access(Integer address, Integer size, int device, int flags, int location) {
  CUmemAccessDesc description{};
  description.location.type = static_cast<CUmemLocationType>(location);
  description.location.id = device;
  description.flags = static_cast<CUmemAccess_flags>(flags);
  return driver_.call<Call::cuMemSetAccess>(address, size, &description, 1);
}

WithInteger RawDriver::mem_get_access(Integer address, int device, int where) {
  CUmemLocation location{};
  location.type = static_cast<CUmemLocationType>(where);
  location.id = device;
  unsigned long long flags = 0;
  const CUresult status = driver_.call<Call::cuMemGetAccess>(&flags, &location, address);
  return {status, flags};
}

WithInteger RawDriver::mem_retain(Integer address) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status =
      driver_.call<Call::cuMemRetainAllocationHandle>(&handle, reinterpret_cast<void*>(address));
  return {status, handle};
}

std::tuple<int, int> RawDriver::mem_export(Integer handle) {
  int descriptor = -1;
  const CUresult status = driver_.call<Call::cuMemExportToShareableHandle>(
      &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return {status, descriptor};
}

WithInteger RawDriver::mem_import(int descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = driver_.call<Call::cuMemImportFromShareableHandle>(
      &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return {status, handle};
}

int RawDriver::host_register(Integer address, Integer size, unsigned flags) {
  return driver_.call<Call::cuMemHostRegister>(reinterpret_cast<void*>(address), size, flags);
}

int RawDriver::host_unregister(Integer address) {
  return driver_.call<Call::cuMemHostUnregister>(reinterpret_cast<void*>(address));
}

int RawDriver::memcpy_htod(Integer to, Integer from, Integer size, Integer stream) {
  return driver_.call<Call::cuMemcpyHtoDAsync>(to, reinterpret_cast<const void*>(from), size,
                                               stream_of(stream));
}

int RawDriver::memcpy_dtoh(Integer to, Integer from, Integer size, Integer stream) {
  return driver_.call<Call::cuMemcpyDtoHAsync>(reinterpret_cast<void*>(to), from, size, stream_of(stream));
}

int RawDriver::memcpy_dtod(Integer to, Integer from, Integer size, Integer stream) {
  return driver_.call<Call::cuMemcpyDtoDAsync>(to, from, size, stream_of(stream));
}

int RawDriver::memset_d8(Integer to, unsigned char value, Integer size, Integer stream) {
  return driver_.call<Call::cuMemsetD8Async>(to, value, size, stream_of(stream));
}

}  // namespace fencepool
