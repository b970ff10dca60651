#include "backup/staging.h"

#include <algorithm>
#include <map>

#include "base/problems.h"

namespace fencepool {
namespace {

struct All {
  Mutex mutex;
  std::map<Device*, std::weak_ptr<Staging>> by_device GUARDED_BY(mutex);
};

// Never destroyed: pools may outlive static destructors.
All& all() {
  static All& one = *new All;
  return one;
}

enum class Use { kNone, kPending, kUnknown };

// What the device does with it. Unknown where it cannot be asked, as after an error that sticks: nobody may
// have it, and waiting for it would have no end.
Use use_of(const StagingBuffer& buffer) noexcept {
  try {
    return buffer.is_free() ? Use::kNone : Use::kPending;
  } catch (const std::exception&) {
    return Use::kUnknown;
  }
}

bool is_unused(const StagingBuffer& buffer) noexcept { return use_of(buffer) == Use::kNone; }

}  // namespace

std::shared_ptr<Staging> Staging::of(Device& device) {
  All& known = all();
  const Lock lock(known.mutex);
  std::weak_ptr<Staging>& slot = known.by_device[&device];
  std::shared_ptr<Staging> found = slot.lock();
  if (found == nullptr) {
    found = std::make_shared<Staging>(device);
    slot = found;
  }
  return found;
}

Staging::~Staging() {
  for (StagingBuffer& buffer : idle_) {
    if (process::is_forked_child() || !is_unused(buffer)) buffer.memory->leak();
  }
}

bool Staging::take_idle(StagingBuffers& taken) {
  const Lock lock(mutex_);
  const auto found = std::find_if(idle_.begin(), idle_.end(), is_unused);
  if (found == idle_.end()) return false;
  found->is_recorded = false;
  taken.splice(taken.end(), idle_, found);
  ++lent_;
  return true;
}

StagingBuffers Staging::make() const {
  host_budget::Charge charge(kBuffer);
  host_memory::Promise promise(kBuffer);
  host_memory::Reservation whole(kBuffer, device_.numa_node());
  StagingBuffers made;
  made.push_back({std::make_unique<HostChunk>(whole, charge, kBuffer), std::make_unique<Event>(device_)});
  HostChunk& chunk = *made.back().memory;
  chunk.memory.populate();
  promise.fulfil(kBuffer);
  chunk.registration = std::make_unique<Registration>(device_, chunk.memory.start(), kBuffer);
  return made;
}

bool Staging::is_worth_waiting() const {
  const auto is_pending = [](const StagingBuffer& buffer) { return use_of(buffer) == Use::kPending; };
  return lent_ > 0 || std::any_of(idle_.begin(), idle_.end(), is_pending);
}

bool Staging::has_any() const {
  const Lock lock(mutex_);
  return lent_ > 0 || !idle_.empty();
}

void Staging::take(StagingBuffers& taken, bool is_awaited, const Interrupt& interrupt) {
  while (!take_idle(taken)) {
    try {
      {
        const Lock lock(mutex_);
        if (!is_awaited && idle_.size() + lent_ >= kMostOfAll) {
          throw Error(Kind::kHostMemory, "the pinned buffers to disks are all in use");
        }
      }
      StagingBuffers made = make();
      const Lock lock(mutex_);
      taken.splice(taken.end(), made);
      ++lent_;
      return;
    } catch (const Error& error) {
      if (error.kind != Kind::kHostMemory || !is_awaited) throw;
      const Lock lock(mutex_);
      if (!is_worth_waiting()) throw;
    }
    {
      const Lock lock(mutex_);
      returned_.wait_for(mutex_, std::chrono::milliseconds(5));
    }
    if (interrupt) interrupt();
  }
}

StagingBuffers Staging::take_surplus(std::size_t left) {
  StagingBuffers surplus;
  for (auto next = idle_.begin(); next != idle_.end() && idle_.size() > left;) {
    const auto one = next++;
    if (is_unused(*one)) surplus.splice(surplus.end(), idle_, one);
  }
  return surplus;
}

void Staging::give_back(StagingBuffers& taken) noexcept {
  StagingBuffers surplus;
  {
    const Lock lock(mutex_);
    lent_ -= taken.size();
    idle_.splice(idle_.end(), taken);
    surplus = take_surplus(kMost);
    returned_.notify_all();
  }
}

void Staging::leak(StagingBuffers& taken) noexcept {
  for (StagingBuffer& buffer : taken) buffer.memory->leak();
  const Lock lock(mutex_);
  lent_ -= taken.size();
  taken.clear();
}

void Staging::prepare(std::size_t count) {
  StagingBuffers taken;
  try {
    while (taken.size() < std::min(count, kMost)) take(taken, /*is_awaited=*/false, {});
  } catch (const Error& error) {
    give_back(taken);
    const bool is_enough = error.kind == Kind::kHostMemory && has_any();  // a transition would wait for one
    if (!is_enough) throw;
    return;
  } catch (...) {
    give_back(taken);
    throw;
  }
  give_back(taken);
}

void Staging::trim(std::size_t left) noexcept {
  StagingBuffers surplus;
  try {
    const Device::Scope scope(device_);
    const Lock lock(mutex_);
    surplus = take_surplus(left);
  } catch (const std::exception& error) {
    problems::record({"pinned buffers to disks are kept: ", error.what()});
  }
}

}  // namespace fencepool
