// Launching the kernels of the extension.
#pragma once

#include "digest/format.h"
#include "owners/stream.h"

namespace fencepool {

// Submits the digests of `launch` to the stream: one for each block, written to launch.output, which the
// device can write to. Needs a Device::Scope. CUDA Driver API, cuLaunchKernel.
void launch_digests(Device& device, CUfunction kernel, const digest::Launch& launch, Stream& stream);

}  // namespace fencepool
