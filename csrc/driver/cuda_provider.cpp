// Fills the table from NVIDIA's driver library, opened at run time.
//
// Nothing links to libcuda, so that one build runs with every CUDA version and on machines without a GPU.
#include <dlfcn.h>

#include <string>

#include "driver/table.h"

namespace fencepool::driver {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// "cuInit failed with CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected".
std::string init_failure(const Table& table, CUresult status) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (table.cuGetErrorName(status, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
  if (table.cuGetErrorString(status, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  return std::string("cuInit of ") + kLibrary + " failed with " + name + " (" +
         std::to_string(static_cast<int>(status)) + "): " + text;
}

// The required calls the library lacks, separated by commas; fills `table` with all it has.
std::string load_symbols(void* library, Table& table) {
  std::string missing;
  // dlsym's own documentation gives this conversion through void** for functions (POSIX requires that
  // function and object pointers have one representation).
#define FENCEPOOL_LOAD(call, since)                                       \
  {                                                                       \
    const CallInfo& info = call_info(Call::call);                         \
    *reinterpret_cast<void**>(&table.call) = dlsym(library, info.symbol); \
    if (table.call == nullptr && info.is_required()) {                    \
      missing += missing.empty() ? "" : ", ";                             \
      missing += info.name;                                               \
    }                                                                     \
  }
  FENCEPOOL_DRIVER_CALLS(FENCEPOOL_LOAD)
#undef FENCEPOOL_LOAD
  return missing;
}

}  // namespace

std::string fill_from_cuda(Table& table) {
  // Never closed: streams and events of the driver may outlive every object of ours.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return std::string("the NVIDIA driver library could not be opened: ") +
           (reason != nullptr ? reason : kLibrary);
  }
  Table found;
  const std::string missing = load_symbols(library, found);
  if (!missing.empty()) {
    return std::string(kLibrary) + " is too old: it lacks " + missing + " (CUDA " +
           std::to_string(kBaseline / 1000) + "." + std::to_string(kBaseline % 1000 / 10) +
           " or newer is needed)";
  }
  const CUresult status = found.cuInit(0);
  if (status != CUDA_SUCCESS) return init_failure(found, status);
  table = found;
  return {};
}

}  // namespace fencepool::driver
