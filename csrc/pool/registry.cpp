#include "pool/registry.h"

#include <algorithm>

#include "base/process.h"

namespace fencepool::registry {
namespace {

struct State {
  Mutex mutex;
  std::vector<std::shared_ptr<Pool>> pools GUARDED_BY(mutex);
  std::uint64_t next_id GUARDED_BY(mutex) = 1;
};

// Never destroyed: tensors may outlive static destructors.
State& the_state() {
  static State& state = *new State;
  return state;
}

bool is_same(const Policy& a, const Policy& b) {
  return a.backup == b.backup && a.is_retained == b.is_retained && a.fill == b.fill &&
         a.digests == b.digests && a.directory == b.directory;
}

// Null for a backup that is none or elsewhere.
std::unique_ptr<DiskStore> make_disk(Device& device, const std::string& tag, const Policy& policy) {
  if (policy.backup != Backup::kDisk) return nullptr;
  try {
    return std::make_unique<DiskStore>(device, policy.directory);
  } catch (Error& error) {
    error.pool = tag;
    error.message = "pool '" + tag + "' on " + device.name() + " was not made: " + error.message;
    throw;
  }
}

}  // namespace

std::shared_ptr<Pool> get_pool(Device& device, const std::string& tag, const Policy& policy) {
  process::require_owner();
  if (tag.empty()) throw Error(Kind::kInvalid, "a tag must not be empty");
  if (tag.find('\0') != std::string::npos) throw Error(Kind::kInvalid, "a tag must not hold a NUL character");
  // While memory is at hand. Without kernels every byte is copied, as the pool's status says.
  if (Pool::wants_digests(policy)) static_cast<void>(device.load_kernels());
  State& state = the_state();
  const auto find = [&]() REQUIRES(state.mutex) {
    for (const auto& pool : state.pools) {
      const bool is_it = &pool->device() == &device && pool->tag() == tag && is_same(pool->policy(), policy);
      if (is_it && !pool->is_closed()) return pool;
    }
    return std::shared_ptr<Pool>();
  };
  {
    const Lock lock(state.mutex);
    if (auto found = find()) return found;
  }
  auto disk = make_disk(device, tag, policy);  // without the lock: a disk may take its time
  const Lock lock(state.mutex);
  if (auto found = find()) return found;
  state.pools.push_back(std::make_shared<Pool>(state.next_id, tag, device, policy, std::move(disk)));
  ++state.next_id;
  return state.pools.back();
}

std::vector<std::shared_ptr<Pool>> pools() {
  process::require_owner();
  State& state = the_state();
  const Lock lock(state.mutex);
  return state.pools;
}

void close(const std::shared_ptr<Pool>& pool, const Interrupt& interrupt) {
  pool->close(interrupt);
  State& state = the_state();
  const Lock lock(state.mutex);
  state.pools.erase(std::remove(state.pools.begin(), state.pools.end(), pool), state.pools.end());
}

}  // namespace fencepool::registry
