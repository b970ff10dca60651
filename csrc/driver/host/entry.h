// What every entry point of the embedded driver has in common.
#pragma once

#include <new>
#include <system_error>
#include <type_traits>

#include "driver/calls.h"

namespace fencepool::host_driver {

// Declares each call of the table in namespace `calls`, with CUDA's own signature: a definition whose
// signature differs would not link.
namespace calls {
#define FENCEPOOL_DECLARE(name, since) decltype(::name) name;
FENCEPOOL_DRIVER_CALLS(FENCEPOOL_DECLARE)
#undef FENCEPOOL_DECLARE
}  // namespace calls

// Whether this process and thread may make driver calls now: CUDA_SUCCESS, or
// NOT_INITIALIZED before cuInit and in a child after fork, NOT_PERMITTED inside a host function.
CUresult process_status();

// Marks this thread as running a host function, which must not make driver calls (cuLaunchHostFunc).
class HostFunctionScope {
 public:
  HostFunctionScope();
  ~HostFunctionScope();
  HostFunctionScope(const HostFunctionScope&) = delete;
  HostFunctionScope& operator=(const HostFunctionScope&) = delete;
};

// Runs the body of an entry point. No exception crosses the driver table: it becomes a CUDA error.
template <typename Body>
CUresult without_exceptions(Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::system_error&) {  // no more threads, a broken lock
    return CUDA_ERROR_OPERATING_SYSTEM;
  } catch (...) {
    return CUDA_ERROR_UNKNOWN;
  }
}

template <typename Body>
CUresult entry(Body&& body) noexcept {
  const CUresult status = process_status();
  return status != CUDA_SUCCESS ? status : without_exceptions(body);
}

}  // namespace fencepool::host_driver
