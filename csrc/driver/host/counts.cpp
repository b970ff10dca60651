// What is alive, over all devices of the process.
#include <shared_mutex>

#include "driver/host/devices.h"
#include "driver/host/host_registry.h"
#include "driver/host/memory_book.h"
#include "driver/host/streams.h"

namespace fencepool::host_driver {

Counts counts() {
  Counts counts{};
  {
    MemoryBook& book = memory_book();
    const std::shared_lock<SharedMutex> lock(book.mutex);
    counts.ranges = book.reservations.size();
    counts.mappings = book.mappings.size();
    for (const auto& [id, handle] : book.handles) counts.handles += handle.references != 0 ? 1 : 0;
  }
  {
    const EngineLock lock(engine().mutex);
    counts.streams = engine().streams.size();
    counts.events = engine().events.size();
    counts.graphs = engine().graphs.size() + engine().executables.size();
  }
  counts.registrations = host_registry().count();
  for (int device = 0; device < kDeviceCount; ++device) counts.physical_bytes += device_at(device).held();
  return counts;
}

}  // namespace fencepool::host_driver
