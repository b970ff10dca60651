// Modules and kernels, call by call.
#include <cstring>

#include "bindings/raw_driver.h"
#include "digest/digest.h"
#include "digest/image.h"

namespace fencepool {
namespace {

std::uint64_t integer(const void* handle) { return reinterpret_cast<std::uintptr_t>(handle); }

}  // namespace

RawDriver::WithInteger RawDriver::module_load(const std::string& image) {
  const bool is_host = driver_.provider() == Provider::kHost;
  const void* own = is_host ? digest::kHostImage : digest::kernel_image();
  CUmodule module = nullptr;
  const void* wanted = image.empty() ? own : image.c_str();
  const CUresult status = driver_.call<Call::cuModuleLoadData>(&module, wanted);
  return {status, integer(module)};
}

int RawDriver::module_unload(Integer module) {
  return driver_.call<Call::cuModuleUnload>(reinterpret_cast<CUmodule>(module));
}

RawDriver::WithInteger RawDriver::module_function(Integer module, const std::string& name) {
  CUfunction function = nullptr;
  const CUresult status = driver_.call<Call::cuModuleGetFunction>(
      &function, reinterpret_cast<CUmodule>(module), name.empty() ? digest::kKernel : name.c_str());
  return {status, integer(function)};
}

int RawDriver::launch_digest(Integer function, Integer output, Integer address, Integer size,
                             Integer stream) {
  digest::Launch launch{};
  launch.output = output;
  launch.blocks = static_cast<std::uint32_t>(digest::blocks_in(size, digest::kBlock));
  launch.runs = 1;
  launch.key = digest::process_key();
  launch.run[0] = {address, size, digest::kBlock, 0};
  void* arguments[] = {&launch};
  const CUresult status = driver_.call<Call::cuLaunchKernel>(
      reinterpret_cast<CUfunction>(function), launch.blocks, 1U, 1U, digest::kThreads, 1U, 1U, 0U,
      reinterpret_cast<CUstream>(stream), static_cast<void**>(arguments), static_cast<void**>(nullptr));
  std::memset(&launch, 0, sizeof launch);  // the driver has copied it
  return status;
}

RawDriver::WithInteger RawDriver::host_device_pointer(Integer address) {
  CUdeviceptr pointer = 0;
  const CUresult status =
      driver_.call<Call::cuMemHostGetDevicePointer>(&pointer, reinterpret_cast<void*>(address), 0U);
  return {status, pointer};
}

}  // namespace fencepool
