// Pinned buffers between a device and a disk, shared by the pools of a device: made when they are needed,
// kept for the next transition while a pool may need them, counted in the host budget for as long as they are
// there.
#pragma once

#include <cstddef>
#include <list>
#include <memory>

#include "backup/host_buffer.h"
#include "base/interrupt.h"
#include "base/mutex.h"
#include "owners/stream.h"

namespace fencepool {

// One buffer, and an event for the device's last work on it. Unpinned and given back when it dies.
struct StagingBuffer {
  std::unique_ptr<HostChunk> memory;
  std::unique_ptr<Event> event;
  bool is_recorded = false;  // else the device does nothing with it

  char* start() const { return memory->memory.start(); }
  // Behind what was submitted to the stream.
  void record(Stream& stream) {
    stream.record(*event);
    is_recorded = true;
  }
  bool is_free() const { return !is_recorded || event->is_done(); }
};
// A list: its nodes move without a need for memory, so that giving back cannot fail.
using StagingBuffers = std::list<StagingBuffer>;

// Thread-safe.
class Staging {
 public:
  static constexpr std::size_t kBuffer = std::size_t{4} << 20;  // bytes: long enough for a disk's full speed
  // Of one transition of one pool. The disk has enough to do, and so many are kept when nobody has them.
  static constexpr std::size_t kMost = 16;
  // Of all transitions of a device together: beyond these, a transition that has one goes on with what it
  // has.
  static constexpr std::size_t kMostOfAll = 2 * kMost;

  // The one of that device: it lives while somebody has it.
  static std::shared_ptr<Staging> of(Device& device);
  explicit Staging(Device& device) : device_(device) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Puts one that nobody uses at the end of `taken`. Throws kHostMemory when there is none and none can or
  // may be made; where `is_awaited`, it waits instead while others have some. Needs a Device::Scope.
  void take(StagingBuffers& taken, bool is_awaited, const Interrupt& interrupt) EXCLUDES(mutex_);
  void give_back(StagingBuffers& taken) noexcept EXCLUDES(mutex_);
  // The device may do something with them for ever: they are never used again, and count in the budget.
  void leak(StagingBuffers& taken) noexcept EXCLUDES(mutex_);
  // Has so many ready, ahead of a transition, or as many as there is memory for. Needs a Device::Scope.
  // Throws kHostMemory when there is none at all, others' included.
  void prepare(std::size_t count) EXCLUDES(mutex_);
  // Gives back what nobody uses, but for `left` of them.
  void trim(std::size_t left) noexcept EXCLUDES(mutex_);
  // Whether a transition can begin without making one.
  bool has_any() const EXCLUDES(mutex_);

 private:
  bool take_idle(StagingBuffers& taken) EXCLUDES(mutex_);
  bool is_worth_waiting() const REQUIRES(mutex_);
  // What nobody uses, but for `left` of the idle ones. To die without the lock: unpinning takes a while.
  StagingBuffers take_surplus(std::size_t left) REQUIRES(mutex_);
  StagingBuffers make() const;

  Device& device_;
  mutable Mutex mutex_;
  Condition returned_;
  StagingBuffers idle_ GUARDED_BY(mutex_);  // the device may still be reading from the last ones
  std::size_t lent_ GUARDED_BY(mutex_) = 0;
};

}  // namespace fencepool
