#include "driver/host/contexts.h"

#include <array>

#include "driver/host/devices.h"
#include "driver/host/streams.h"

namespace fencepool::host_driver {
namespace {

// Plain data, so that it needs no destructor: a thread may still make calls while its others run.
constexpr int kStackDepth = 128;
thread_local Context* stack[kStackDepth];
thread_local int depth = 0;

Context* current() { return depth > 0 ? stack[depth - 1] : nullptr; }

CUresult check(const Context& context) {
  return context.is_alive() ? context.status() : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

Context* named(CUcontext handle) {
  for (int device = 0; device < kDeviceCount; ++device) {
    if (handle_of(context_at(device)) == handle) return &context_at(device);
  }
  return nullptr;
}

}  // namespace

Context& context_at(int device) {
  static auto* const contexts =
      new std::array<Context, kDeviceCount>{Context(0), Context(1), Context(2), Context(3)};
  static_assert(kDeviceCount == 4, "one initialiser a device");
  return (*contexts)[static_cast<std::size_t>(device)];
}

CUresult find_context(CUcontext handle, Context*& found) {
  found = named(handle);
  return found != nullptr ? check(*found) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult require_current(Context*& found) {
  found = current();
  return found != nullptr ? check(*found) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult sticky_status() {
  const Context* context = current();
  return context != nullptr ? context->status() : CUDA_SUCCESS;
}

void clear_sticky_error(int device) {
  if (!is_device(device)) return;
  Context& context = context_at(device);
  EngineLock lock(engine().mutex);
  // What was given to the broken context is passed over first: run now, it would break the context again.
  const Marks left = marks_of(context);
  engine().progress.wait(lock, [&] { return !context.is_broken() || are_complete(left); });
  context.sticky.store(CUDA_SUCCESS, std::memory_order_release);
}

namespace calls {

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return entry([&] {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Context& found = context_at(device);
    if (found.is_broken()) return found.status();
    found.retains.fetch_add(1, std::memory_order_acq_rel);
    *context = handle_of(found);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return entry([&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Context& context = context_at(device);
    int retains = context.retains.load(std::memory_order_acquire);
    do {
      if (retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
    } while (!context.retains.compare_exchange_weak(retains, retains - 1, std::memory_order_acq_rel));
    if (retains == 1) destroy_streams_and_events(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent(CUcontext handle) {
  return entry([&] {
    Context* context = named(handle);
    if (context == nullptr || !context->is_alive()) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == kStackDepth) return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = context;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent(CUcontext* handle) {
  return entry([&] {
    if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    Context* popped = stack[--depth];
    if (handle != nullptr) *handle = handle_of(*popped);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* handle) {
  return entry([&] {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = current();
    *handle = context != nullptr ? handle_of(*context) : nullptr;
    return CUDA_SUCCESS;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
