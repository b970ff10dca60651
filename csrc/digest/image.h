// The compiled kernels, as the driver loads them.
#pragma once

namespace fencepool::digest {

// A fat binary with machine code for several GPUs and PTX for the rest; null when the build had no nvcc.
const void* kernel_image() noexcept;

// What stands for it on the embedded driver: it starts with this text.
inline constexpr char kHostImage[] = "the kernels of fencepool's embedded driver";

}  // namespace fencepool::digest
