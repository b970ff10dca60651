#include "pool/quiesce.h"

#include <memory>

#include "base/clock.h"
#include "pool/fence.h"

namespace fencepool {

void quiesce(const std::vector<Device*>& devices, double timeout, const Interrupt& interrupt) {
  const double deadline = timeout < 0 ? -1 : now_seconds() + timeout;
  std::vector<std::unique_ptr<Event>> marks;
  for (Device* device : devices) {
    const Device::Scope scope(*device);
    if (device->driver().has<Call::cuCtxRecordEvent>()) {
      marks.push_back(std::make_unique<Event>(*device));
      device->driver().check<Call::cuCtxRecordEvent>(device->context(), marks.back()->get());
    } else {
      device->driver().check<Call::cuCtxSynchronize>();
    }
  }
  for (const auto& mark : marks) {
    const Device::Scope scope(mark->device());
    if (!wait_for(*mark, deadline, interrupt)) {
      throw Error(
          Kind::kQuiesceTimeout,
          "work in flight on " + mark->device().name() + " did not end within " + std::to_string(timeout) +
              " seconds. Nothing was changed; wait for it and pause again, or allow a longer timeout");
    }
  }
}

}  // namespace fencepool
