// The table of driver entry points, and the two ways it is filled.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "driver/calls.h"

namespace fencepool::driver {

// One value a driver call, in the order of calls.h.
enum class Call : int {
#define FENCEPOOL_ENUM(name, since) name,
  FENCEPOOL_DRIVER_CALLS(FENCEPOOL_ENUM)
#undef FENCEPOOL_ENUM
      kCount
};
inline constexpr std::size_t kCallCount = static_cast<std::size_t>(Call::kCount);

// Entry points with CUDA's own signatures. A null entry is a call this driver lacks.
struct Table {
#define FENCEPOOL_ENTRY(name, since) decltype(&::name) name = nullptr;
  FENCEPOOL_DRIVER_CALLS(FENCEPOOL_ENTRY)
#undef FENCEPOOL_ENTRY
};

// What is known of a call besides its pointer.
struct CallInfo {
  const char* name;    // as documented, without a version suffix: "cuMemCreate"
  const char* symbol;  // as exported by the driver library: "cuMemGetInfo_v2"
  int since;           // major * 1000 + minor * 10
  bool is_required() const { return since <= kBaseline; }
};
const CallInfo& call_info(Call call);
// The call of that documented name, or Call::kCount.
Call find_call(std::string_view name);

// Fills `table` from libcuda.so.1. Returns what stands in the way, empty when nothing does.
// The library stays loaded for the life of the process.
std::string fill_from_cuda(Table& table);

// Fills `table` with the embedded emulation (driver/host/). Always succeeds.
void fill_from_host(Table& table);

}  // namespace fencepool::driver
