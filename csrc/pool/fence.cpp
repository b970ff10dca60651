#include "pool/fence.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"

namespace fencepool {

bool wait_for(const Event& event, double deadline, const Interrupt& interrupt) {
  // Short waits are common and must not cost a scheduler's round trip; long ones must not cost a core.
  constexpr double kSpin = 100e-6;
  constexpr double kInterruptEvery = 50e-3;
  const double start = now_seconds();
  double asked = start;
  while (!event.is_done()) {
    const double now = now_seconds();
    if (deadline >= 0 && now >= deadline) return false;
    if (now - start < kSpin) {
      std::this_thread::yield();
      continue;
    }
    if (interrupt && now - asked > kInterruptEvery) {
      interrupt();
      asked = now;
    }
    // One hundredth of the wait so far, between 20 and 500 microseconds.
    const double nap = std::clamp((now - start) / 100, 20e-6, 500e-6);
    std::this_thread::sleep_for(std::chrono::duration<double>(nap));
  }
  return true;
}

Fence::Fence(std::vector<Device*> devices, std::vector<std::shared_ptr<const Marks>> marks)
    : devices_(std::move(devices)), marks_(std::move(marks)) {
  for (const auto& one : marks_) events_.push_back(one->last());
}

std::shared_ptr<Fence> Fence::part(const std::vector<Run>& runs) const {
  process::require_owner();
  std::vector<std::shared_ptr<Event>> events;
  for (const auto& one : marks_) {
    if (auto event = one->after(runs)) events.push_back(std::move(event));
  }
  return std::make_shared<Fence>(devices_, std::move(events));
}

bool Fence::concerns(Provider provider) const {
  return std::any_of(devices_.begin(), devices_.end(),
                     [&](const Device* device) { return device->driver().provider() == provider; });
}

// The device that the stream belongs to; null when the fence does not concern it.
Device* Fence::device_of(CUstream stream, Provider provider, int ordinal) const {
  // The default stream has no context of its own: its device is what the caller says, or the first.
  const auto first = std::find_if(devices_.begin(), devices_.end(), [&](const Device* device) {
    return device->driver().provider() == provider && (ordinal < 0 || device->ordinal() == ordinal);
  });
  if (first == devices_.end()) return nullptr;
  const Device::Scope scope(**first);
  CUcontext context = nullptr;
  (*first)->driver().check<Call::cuStreamGetCtx>(stream, &context);
  const auto found = std::find_if(devices_.begin(), devices_.end(), [&](const Device* device) {
    return device->driver().provider() == provider && device->context() == context;
  });
  return found == devices_.end() ? nullptr : *found;
}

void Fence::wait(CUstream stream, Provider provider, int ordinal, const Interrupt& interrupt) const {
  process::require_owner();
  if (devices_.empty()) return;
  Device* device = device_of(stream, provider, ordinal);
  if (device == nullptr) {
    std::string names;
    for (const Device* one : devices_) names += (names.empty() ? "" : ", ") + one->name();
    throw Error(Kind::kInvalid, "the stream belongs to another device than the fence, which concerns " +
                                    names + "; wait on a stream of such a device, or call synchronize()");
  }
  const Device::Scope scope(*device);
  Driver& driver = device->driver();
  if (is_capturing(driver, stream)) {
    throw Error(
        Kind::kCapture,
        "the stream is being captured into a CUDA graph, and a wait for work outside the capture would "
        "break it; wait on the fence before the capture begins");
  }
  for (const auto& event : events_) {
    if (event->device().driver().provider() == provider) {
      driver.check<Call::cuStreamWaitEvent>(stream, event->get(), 0U);
    } else {
      const Device::Scope other(event->device());
      static_cast<void>(wait_for(*event, -1, interrupt));
    }
  }
}

bool Fence::synchronize(double timeout, const Interrupt& interrupt) const {
  process::require_owner();
  const double deadline = timeout < 0 ? -1 : now_seconds() + timeout;
  return std::all_of(events_.begin(), events_.end(), [&](const auto& event) {
    const Device::Scope scope(event->device());
    return wait_for(*event, deadline, interrupt);
  });
}

bool Fence::is_done() const {
  process::require_owner();
  return std::all_of(events_.begin(), events_.end(), [](const auto& event) {
    const Device::Scope scope(event->device());
    return event->is_done();
  });
}

std::vector<Device*> Fence::devices_at_work() const {
  std::vector<Device*> devices;
  for (const auto& event : events_) {
    if (event->device().driver().has<Call::cuCtxWaitEvent>()) add_once(devices, event->device());
  }
  return devices;
}

bool Fence::order_contexts(const Interrupt& interrupt) const {
  for (const auto& event : events_) {
    const Device::Scope scope(event->device());
    Driver& driver = event->device().driver();
    if (!driver.has<Call::cuCtxWaitEvent>()) {
      static_cast<void>(synchronize(-1, interrupt));
      return true;
    }
    driver.check<Call::cuCtxWaitEvent>(event->device().context(), event->get());
  }
  return false;
}

}  // namespace fencepool
