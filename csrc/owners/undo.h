// The undo call of an owner, made from a destructor: a failure is recorded and the resource leaks.
#pragma once

#include <string>

#include "base/problems.h"
#include "base/process.h"
#include "owners/device.h"

namespace fencepool {

// Whether the undo call succeeded. Tries twice: a passing failure should not cost the resource. In a
// forked child it does nothing, since the parent still uses what it would undo.
template <Call C, class... Arguments>
bool undo(Device& device, Arguments... arguments) noexcept {
  if (process::is_forked_child()) return false;
  for (const bool is_last : {false, true}) {
    try {
      const Device::Scope scope(device);
      const CUresult status = device.driver().call<C>(arguments...);
      if (status == CUDA_SUCCESS || status == CUDA_ERROR_DEINITIALIZED) return true;
      if (is_last) problems::record({device.driver().describe(C, status), " while giving back; leaked"});
    } catch (const std::exception& error) {
      if (is_last) problems::record({error.what(), " while giving back; leaked"});
    }
  }
  return false;
}

}  // namespace fencepool
