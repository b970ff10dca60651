// Modules and kernels: the embedded driver has fencepool's own kernels, carried out by the CPU.
#include <cstring>
#include <memory>
#include <shared_mutex>

#include "digest/digest.h"
#include "digest/image.h"
#include "driver/host/devices.h"
#include "driver/host/host_registry.h"
#include "driver/host/memory_book.h"
#include "driver/host/streams.h"

namespace fencepool::host_driver {
namespace {

// Handles are numbers, as those of streams are; each module has one function.
struct Modules {
  std::mutex mutex;
  std::uintptr_t next = 0x1000;
  std::unordered_map<std::uintptr_t, Context*> alive;  // guarded by mutex
};

Modules& modules() {
  static auto* const all = new Modules();
  return *all;
}

bool is_alive(const void* handle, const Context* context) {
  const std::lock_guard<std::mutex> lock(modules().mutex);
  const auto found = modules().alive.find(reinterpret_cast<std::uintptr_t>(handle));
  return found != modules().alive.end() && found->second == context;
}

// One block, while nobody can unmap it.
CUresult digest_block(const Context& context, const digest::Launch& launch, std::uint32_t block) {
  const digest::BlockPlace place = digest::place_of(launch, block);
  MemoryBook& book = memory_book();
  digest::Digest result{};
  {
    const std::shared_lock<SharedMutex> lock(book.mutex);
    if (!book.is_accessible_by(context.device, place.address, place.size, /*is_write=*/false)) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    result = digest::of(launch.key, reinterpret_cast<const void*>(place.address), place.size);
  }
  const std::uintptr_t output = launch.output + block * sizeof result;
  if (host_registry().kind_of(output, sizeof result) != HostMemory::kRegistered)
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::memcpy(reinterpret_cast<void*>(output), &result, sizeof result);
  return CUDA_SUCCESS;
}

CUresult digest_all(const Context& context, const digest::Launch& launch) {
  for (std::uint32_t block = 0; block < launch.blocks; ++block) {
    if (context.is_broken()) return context.status();
    if (const CUresult status = digest_block(context, launch, block); status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

}  // namespace

namespace calls {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (std::memcmp(image, digest::kHostImage, sizeof digest::kHostImage) != 0)
      return CUDA_ERROR_INVALID_IMAGE;
    const std::lock_guard<std::mutex> lock(modules().mutex);
    modules().alive.emplace(modules().next, context);
    *module = reinterpret_cast<CUmodule>(modules().next++);
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleUnload(CUmodule module) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (!is_alive(module, context)) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard<std::mutex> lock(modules().mutex);
    modules().alive.erase(reinterpret_cast<std::uintptr_t>(module));
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_alive(module, context)) return CUDA_ERROR_INVALID_HANDLE;
    if (std::strcmp(name, digest::kKernel) != 0) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(module);
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned /*shared_bytes*/,
                        CUstream stream, void** parameters, void** extra) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    if (!is_alive(function, context)) return CUDA_ERROR_INVALID_HANDLE;
    const bool is_grid = grid_x > 0 && grid_y == 1 && grid_z == 1;
    const bool is_block = block_x == digest::kThreads && block_y == 1 && block_z == 1;
    if (!is_grid || !is_block || extra != nullptr || parameters == nullptr || parameters[0] == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const auto launch =
        std::make_shared<const digest::Launch>(*static_cast<const digest::Launch*>(parameters[0]));
    return submit_or_capture(stream, [context, launch] { return digest_all(*context, *launch); });
  });
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* device, void* host, unsigned flags) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    const auto address = reinterpret_cast<std::uintptr_t>(host);
    const bool is_registered = host_registry().kind_of(address, 1) == HostMemory::kRegistered;
    if (device == nullptr || flags != 0 || !is_registered) return CUDA_ERROR_INVALID_VALUE;
    *device = address;
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
