// Fills the driver table with the embedded emulation.
#include "driver/host/entry.h"
#include "driver/table.h"

namespace fencepool::driver {

void fill_from_host(Table& table) {
#define FENCEPOOL_FILL(name, since) table.name = &host_driver::calls::name;
  FENCEPOOL_DRIVER_CALLS(FENCEPOOL_FILL)
#undef FENCEPOOL_FILL
  // As the cuda provider does. It can fail only in a child after fork, where every call says so.
  static_cast<void>(table.cuInit(0));
}

}  // namespace fencepool::driver
