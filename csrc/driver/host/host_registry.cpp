#include "driver/host/host_registry.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "driver/host/captures.h"

namespace fencepool::host_driver {
namespace {

std::uintptr_t page_size() {
  static const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGE_SIZE));
  return size;
}

// Whether all pages of the range exist; pinning would fail otherwise.
bool exists(std::uintptr_t address, std::size_t size) {
  constexpr std::size_t kPagesAtOnce = 1 << 16;
  std::vector<unsigned char> states(kPagesAtOnce);
  const std::uintptr_t end = address + size;
  for (std::uintptr_t page = address / page_size() * page_size(); page < end;) {
    const std::size_t bytes = std::min<std::size_t>(end - page, kPagesAtOnce * page_size());
    if (mincore(reinterpret_cast<void*>(page), bytes, states.data()) != 0) return false;
    page += bytes;
  }
  return true;
}

}  // namespace

HostRegistry& host_registry() {
  static auto* const registry = new HostRegistry();
  return *registry;
}

HostMemory HostRegistry::kind_of(std::uintptr_t address, std::size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uintptr_t end = address + size;
  std::size_t registered = 0;
  auto range = ranges_.upper_bound(address);
  if (range != ranges_.begin()) --range;
  for (; range != ranges_.end() && range->first < end; ++range) {
    const std::uintptr_t from = std::max(address, range->first);
    const std::uintptr_t to = std::min(end, range->first + range->second);
    if (from < to) registered += to - from;
  }
  if (registered == 0) return HostMemory::kPageable;
  return registered == size ? HostMemory::kRegistered : HostMemory::kMixed;
}

bool HostRegistry::add(std::uintptr_t address, std::size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto page_of = [](std::uintptr_t at) { return at / page_size(); };
  const std::uintptr_t first = page_of(address);
  const std::uintptr_t last = page_of(address + size - 1);
  const auto next = ranges_.lower_bound(address);
  if (next != ranges_.end() && page_of(next->first) <= last) return false;
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (page_of(before->first + before->second - 1) >= first) return false;
  }
  ranges_.emplace_hint(next, address, size);
  return true;
}

bool HostRegistry::remove(std::uintptr_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.erase(address) != 0;
}

std::size_t HostRegistry::count() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.size();
}

namespace calls {

CUresult cuMemHostRegister(void* pointer, std::size_t size, unsigned int flags) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    if (address == 0 || size == 0 || size > UINTPTR_MAX - address) return CUDA_ERROR_INVALID_VALUE;
    constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    constexpr unsigned kUnsupported = CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
    if ((flags & ~(kKnown | kUnsupported)) != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & kUnsupported) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (!exists(address, size)) return CUDA_ERROR_INVALID_VALUE;
    const bool is_new = host_registry().add(address, size);
    return is_new ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return entry([&] {
    Context* context = nullptr;
    if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    if (host_registry().remove(address)) return CUDA_SUCCESS;
    const bool is_inside = host_registry().kind_of(address, 1) == HostMemory::kRegistered;
    return is_inside ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
