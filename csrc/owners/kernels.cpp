// Loading the kernels of the extension onto a device.
#include <algorithm>

#include "digest/format.h"
#include "digest/image.h"
#include "owners/launch.h"
#include "owners/undo.h"

namespace fencepool {
namespace {

// A module until it is kept for good.
class Loading {
 public:
  Loading(Device& device, const void* image) : device_(device) {
    device.driver().check<Call::cuModuleLoadData>(&module_, image);
  }
  ~Loading() {
    if (module_ != nullptr) static_cast<void>(undo<Call::cuModuleUnload>(device_, module_));
  }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;

  CUfunction function(const char* name) const {
    CUfunction found = nullptr;
    device_.driver().check<Call::cuModuleGetFunction>(&found, module_, name);
    return found;
  }
  // It stays as long as the device's context, which is never released.
  void keep() noexcept { module_ = nullptr; }

 private:
  Device& device_;
  CUmodule module_ = nullptr;
};

}  // namespace

std::string Device::load_kernels() {
  const void* image = is_host() ? digest::kHostImage : digest::kernel_image();
  if (image == nullptr) return "this build of fencepool has no kernels: there was no nvcc";
  const Lock lock(loading_mutex_);
  if (digest_kernel() != nullptr) return {};
  try {
    const Scope scope(*this);
    Loading module(*this, image);
    const CUfunction kernel = module.function(digest::kKernel);
    // The driver loads a kernel's code when it is first launched: now, rather than in the middle of a pause.
    // Not waited for: it runs behind whatever the device's context is ordered behind.
    Stream stream(*this);
    launch_digests(*this, kernel, digest::Launch{}, stream);
    module.keep();
    digest_kernel_ = kernel;
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

void launch_digests(Device& device, CUfunction kernel, const digest::Launch& launch, Stream& stream) {
  void* arguments[] = {const_cast<digest::Launch*>(&launch)};
  device.driver().check<Call::cuLaunchKernel>(kernel, std::max(launch.blocks, 1U), 1U, 1U, digest::kThreads,
                                              1U, 1U, 0U, stream.get(), static_cast<void**>(arguments),
                                              static_cast<void**>(nullptr));
}

}  // namespace fencepool
