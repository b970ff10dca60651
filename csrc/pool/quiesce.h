// Waiting until the work already given to devices is done.
#pragma once

#include <vector>

#include "base/interrupt.h"
#include "owners/device.h"

namespace fencepool {

// Returns when everything submitted so far to each device's context, on any stream, has ended.
// Throws kQuiesceTimeout when that takes longer than `timeout` seconds (negative: no limit), and
// what the work failed with. No stream of the devices may be capturing.
// CUDA Driver API, cuCtxRecordEvent; before CUDA 12.5 cuCtxSynchronize, which knows no time-out.
void quiesce(const std::vector<Device*>& devices, double timeout, const Interrupt& interrupt);

}  // namespace fencepool
