// Host memory that was registered (page-locked, on a GPU): cuMemHostRegister.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace fencepool::host_driver {

enum class HostMemory { kPageable, kRegistered, kMixed };

// Thread-safe. Its lock is held alone.
class HostRegistry {
 public:
  // Whether none, all or part of the range is registered. An empty range is pageable.
  HostMemory kind_of(std::uintptr_t address, std::size_t size);
  // False, and nothing changes, when any page of the range is registered.
  bool add(std::uintptr_t address, std::size_t size);
  // Whether a registration began at `address`, and was removed.
  bool remove(std::uintptr_t address);
  std::size_t count();

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> ranges_;  // start to size; guarded by mutex_
};

// Never destroyed.
HostRegistry& host_registry();

}  // namespace fencepool::host_driver
