// Host memory that stands at a segment's addresses while its pool is paused.
#pragma once

#include <vector>

#include "base/host_budget.h"
#include "base/interrupt.h"
#include "owners/mapping.h"

namespace fencepool {

// One segment's. It is mapped at a window of its own for as long as it lives, so that copies go to and from
// it whatever is at the segment's addresses, and the processor can read it. Members die in reverse order.
struct StandIn {
  // Throws kHostMemory. CUDA Driver API, cuMemCreate with CU_MEM_LOCATION_TYPE_HOST_NUMA.
  StandIn(Device& device, std::size_t size)
      : charge(size), memory(device, size, Where::kHost), window(device, size), mapping(window, memory) {}
  // What has to be leaked, as by a forked child, counts for ever.
  ~StandIn() {
    if (!mapping.give_back() || !memory.give_back()) charge.leak();
  }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  host_budget::Charge charge;
  Physical memory;
  Range window;
  Mapping mapping;
};

}  // namespace fencepool
