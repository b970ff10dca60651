// The end of a restore, and the ways to wait for it.
#pragma once

#include <memory>
#include <vector>

#include "base/interrupt.h"
#include "pool/marks.h"

namespace fencepool {

// Immutable and thread-safe. Without events it stands for "nothing to wait for".
class Fence {
 public:
  Fence(std::vector<Device*> devices, std::vector<std::shared_ptr<Event>> events)
      : devices_(std::move(devices)), events_(std::move(events)) {}
  // Of whole restores, which it can tell the parts of.
  Fence(std::vector<Device*> devices, std::vector<std::shared_ptr<const Marks>> marks);

  // What of it concerns these runs of bytes: done where nothing is brought back to them.
  std::shared_ptr<Fence> part(const std::vector<Run>& runs) const;
  const std::vector<std::shared_ptr<const Marks>>& marks() const { return marks_; }

  // Work submitted to `stream` later runs after the restore; the host is not held.
  // The stream is one of `provider`; `ordinal` is its device, -1 when unknown. Where the fence concerns
  // devices of another provider too, the host waits for those, as no stream can.
  // Throws kInvalid for a stream of a device the fence does not concern, kCapture when the stream is
  // being captured (the wait would break it). CUDA Driver API, cuStreamWaitEvent.
  void wait(CUstream stream, Provider provider, int ordinal, const Interrupt& interrupt = {}) const;
  // Holds the host until the restore has ended. False when `timeout` seconds (negative: no limit)
  // pass first. Throws what the restore failed with.
  bool synchronize(double timeout, const Interrupt& interrupt) const;
  bool is_done() const;
  // Everything submitted later to the devices' contexts runs after the restore. Where the driver has
  // no cuCtxWaitEvent (before CUDA 12.5) the host waits instead; returns whether it did.
  bool order_contexts(const Interrupt& interrupt) const;
  // Those whose contexts order_contexts() puts behind something.
  std::vector<Device*> devices_at_work() const;

  const std::vector<std::shared_ptr<Event>>& events() const { return events_; }
  bool concerns(Provider provider) const;

 private:
  Device* device_of(CUstream stream, Provider provider, int ordinal) const;

  std::vector<Device*> devices_;
  std::vector<std::shared_ptr<Event>> events_;
  std::vector<std::shared_ptr<const Marks>> marks_;
};

// Waits for `event` without holding a core for long. False after `deadline` (now_seconds(); negative:
// none). Needs a Device::Scope.
bool wait_for(const Event& event, double deadline, const Interrupt& interrupt);

}  // namespace fencepool
