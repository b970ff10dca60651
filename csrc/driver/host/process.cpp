// cuInit, the driver's version, and what makes a process or a thread unfit for driver calls.
#include <pthread.h>

#include <atomic>

#include "driver/host/entry.h"

namespace fencepool::host_driver {
namespace {

// Atomics without destructors: they are read by threads that outlive the end of main().
std::atomic<bool> is_initialized{false};
std::atomic<bool> is_forked_child{false};
thread_local int host_function_depth = 0;

// Runs in the child. Its copies of the locks and streams belong to threads that do not exist there.
void mark_forked_child() { is_forked_child.store(true, std::memory_order_relaxed); }

}  // namespace

CUresult process_status() {
  if (is_forked_child.load(std::memory_order_relaxed)) return CUDA_ERROR_NOT_INITIALIZED;
  if (!is_initialized.load(std::memory_order_acquire)) return CUDA_ERROR_NOT_INITIALIZED;
  if (host_function_depth > 0) return CUDA_ERROR_NOT_PERMITTED;
  return CUDA_SUCCESS;
}

HostFunctionScope::HostFunctionScope() { ++host_function_depth; }
HostFunctionScope::~HostFunctionScope() { --host_function_depth; }

namespace calls {

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (is_forked_child.load(std::memory_order_relaxed)) return CUDA_ERROR_NOT_INITIALIZED;
  if (is_initialized.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  static const int fork_status = pthread_atfork(nullptr, nullptr, mark_forked_child);
  if (fork_status != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  is_initialized.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

}  // namespace calls
}  // namespace fencepool::host_driver
