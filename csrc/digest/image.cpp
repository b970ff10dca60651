#include "digest/image.h"

#ifdef FENCEPOOL_KERNEL_IMAGE
// The file that nvcc made, as it is. Fat binaries are read in words of eight bytes.
asm(".pushsection .rodata\n"
    ".balign 16\n"
    "fencepool_kernel_image:\n"
    ".incbin \"" FENCEPOOL_KERNEL_IMAGE
    "\"\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden")))
const char fencepool_kernel_image[];  // NOLINT(readability-identifier-naming)
#endif

namespace fencepool::digest {

const void* kernel_image() noexcept {
#ifdef FENCEPOOL_KERNEL_IMAGE
  return fencepool_kernel_image;
#else
  return nullptr;
#endif
}

}  // namespace fencepool::digest
