#include "pytorch/slots.h"

#include <array>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/problems.h"
#include "base/process.h"

namespace fencepool::torch_slots {
namespace {

// The thread that pauses or prepares a pool may need the GIL, which the thread that allocates may hold:
// after this long the allocation is refused, so that both go on.
constexpr double kPatience = 10;  // seconds

struct Slot {
  Mutex mutex;
  std::shared_ptr<Pool> pool GUARDED_BY(mutex);
  std::unordered_map<void*, std::unique_ptr<Block>> blocks GUARDED_BY(mutex);
  std::shared_ptr<const Error> refusal GUARDED_BY(mutex);
};

// Never destroyed: PyTorch gives its last memory back after static destructors have run.
Slot& slot_at(int index) {
  static auto& slots = *new std::array<Slot, kSlots>;
  return slots.at(static_cast<std::size_t>(index));
}

Interrupt ends_in_time(const Pool& pool) {
  return [&pool, watch = Stopwatch()] {
    if (watch.total() < kPatience) return;
    Error error(Kind::kBusy, pool.describe() + " was being prepared, trimmed or paused all the time");
    error.pool = pool.tag();
    throw error;
  };
}

std::unique_ptr<Block> allocate_from(Pool& pool, std::size_t size, int ordinal) {
  if (pool.device().ordinal() != ordinal) {
    throw Error(Kind::kInvalid, pool.describe() + " was asked for memory of cuda:" + std::to_string(ordinal));
  }
  return pool.allocate(size, ends_in_time(pool));
}

}  // namespace

int slot_of(const std::shared_ptr<Pool>& pool) {
  static Mutex& taking = *new Mutex;
  const Lock one_at_a_time(taking);
  int unused = -1;
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = slot_at(i);
    const Lock lock(slot.mutex);
    if (slot.pool == pool) return i;
    if (unused < 0 && slot.pool == nullptr && slot.blocks.empty()) unused = i;
  }
  if (unused < 0) {
    throw Error(Kind::kBusy, std::to_string(kSlots) + " pools have regions already; close one of them first");
  }
  Slot& slot = slot_at(unused);
  const Lock lock(slot.mutex);
  slot.pool = pool;
  return unused;
}

void give_slot_back(const Pool& pool) {
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = slot_at(i);
    std::shared_ptr<Pool> last;  // dies without the lock
    const Lock lock(slot.mutex);
    if (slot.pool.get() != &pool) continue;
    last = std::exchange(slot.pool, nullptr);
    slot.refusal.reset();
  }
}

std::shared_ptr<const Error> last_refusal(const Pool& pool) {
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = slot_at(i);
    const Lock lock(slot.mutex);
    if (slot.pool.get() == &pool) return slot.refusal;
  }
  return nullptr;
}

void* allocate(int index, std::size_t size, int ordinal) noexcept {
  if (process::is_forked_child()) return nullptr;
  try {
    Slot& slot = slot_at(index);
    std::shared_ptr<Pool> pool;
    {
      const Lock lock(slot.mutex);
      pool = slot.pool;
    }
    if (pool == nullptr) return nullptr;
    try {
      std::unique_ptr<Block> block = allocate_from(*pool, size, ordinal);
      void* address = reinterpret_cast<void*>(block->address());
      const Lock lock(slot.mutex);
      slot.blocks.emplace(address, std::move(block));
      slot.refusal.reset();
      return address;
    } catch (const Error& error) {
      auto refusal = std::make_shared<const Error>(error);
      const Lock lock(slot.mutex);
      slot.refusal = std::move(refusal);
    }
  } catch (const std::exception& error) {
    problems::record({"an allocation for PyTorch failed: ", error.what()});
  }
  return nullptr;
}

void give_back(int index, void* address) noexcept {
  if (process::is_forked_child()) return;
  std::unique_ptr<Block> block;  // dies without the lock
  {
    Slot& slot = slot_at(index);
    const Lock lock(slot.mutex);
    const auto found = slot.blocks.find(address);
    if (found != slot.blocks.end()) {
      block = std::move(found->second);
      slot.blocks.erase(found);
    }
  }
  if (block == nullptr) problems::record({"PyTorch gave back memory that no pool had given it"});
}

}  // namespace fencepool::torch_slots
