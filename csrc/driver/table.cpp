// The list of driver calls as data: names, exported symbols, versions.
#include "driver/table.h"

#include <array>

namespace fencepool::driver {
namespace {

// cuda.h renames many calls with macros (cuMemGetInfo means cuMemGetInfo_v2). `#name` stringifies the
// argument as it is written, which is the documented name; one more level of macro lets the argument be
// expanded first, which gives the symbol that the driver library exports.
#define FENCEPOOL_STRING(text) #text
#define FENCEPOOL_INFO(name, since) CallInfo{#name, FENCEPOOL_STRING(name), since},

const std::array<CallInfo, kCallCount> kCalls = {{FENCEPOOL_DRIVER_CALLS(FENCEPOOL_INFO)}};

#undef FENCEPOOL_INFO
#undef FENCEPOOL_STRING

}  // namespace

const CallInfo& call_info(Call call) { return kCalls.at(static_cast<std::size_t>(call)); }

Call find_call(std::string_view name) {
  for (std::size_t index = 0; index < kCallCount; ++index) {
    if (name == kCalls[index].name) return static_cast<Call>(index);
  }
  return Call::kCount;
}

}  // namespace fencepool::driver
