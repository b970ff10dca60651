#include "base/host_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/problems.h"
#include "base/system_calls.h"

namespace fencepool::host_memory {
namespace {

constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kPreferred = 1;  // MPOL_PREFERRED of mbind(2)

std::size_t read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : kUnknown;  // "max" is no number
}

// The value of a line "key value" or "key: value kB", in bytes.
std::size_t read_field(const std::string& path, const std::string& key, std::size_t unit) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    if (words >> name >> value && name == key) return value * unit;
  }
  return kUnknown;
}

// What a control group leaves: limit - used + file pages that the kernel can drop.
std::size_t group_leaves(const std::string& folder, const char* limit_file, const char* used_file,
                         const char* reclaimable) {
  const std::size_t limit = read_number(folder + "/" + limit_file);
  const std::size_t used = read_number(folder + "/" + used_file);
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  const std::size_t cached = read_field(folder + "/memory.stat", reclaimable, 1);
  const std::size_t held = used - std::min(used, cached == kUnknown ? 0 : cached);
  return limit > held ? limit - held : 0;
}

// The control group's path of this process for the controller ("" for the unified hierarchy).
std::string group_path(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) == controller) return line.substr(second + 1);
  }
  return "/";
}

// The least that this process's group or any group above it leaves: a limit often sits on a parent.
// Inside a container the path may not be mounted; the root then is the container's own group.
template <class Leaves>
std::size_t least_of_ancestors(const std::string& root, std::string path, Leaves leaves) {
  std::size_t least = leaves(root);
  while (path.size() > 1) {
    least = std::min(least, leaves(root + path));
    path.resize(path.find_last_of('/'));
  }
  return least;
}

std::size_t every_group_leaves() {
  const std::size_t unified =
      least_of_ancestors("/sys/fs/cgroup", group_path(""), [](const std::string& folder) {
        return group_leaves(folder, "memory.max", "memory.current", "inactive_file");
      });
  const std::size_t legacy =
      least_of_ancestors("/sys/fs/cgroup/memory", group_path("memory"), [](const std::string& folder) {
        return group_leaves(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file");
      });
  return std::min(unified, legacy);
}

std::atomic<std::size_t> promised{0};  // bytes about to be taken by this process

// Whether the kernel gives huge pages to memory that asks for them.
bool has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string setting;
  std::getline(file, setting);
  return setting.find("[never]") == std::string::npos && !setting.empty();
}

Error no_memory(std::size_t bytes, const std::string& doing, int code) {
  Error error(Kind::kHostMemory, doing + " " + format_bytes(bytes) +
                                     " of host memory for a backup failed: " + std::strerror(code));
  error.wanted = bytes;
  return error;
}

}  // namespace

std::size_t available() {
  return std::min(read_field("/proc/meminfo", "MemAvailable:", 1024), every_group_leaves());
}

Promise::Promise(std::size_t bytes) : left_(bytes) {
  const char* setting = std::getenv("FENCEPOOL_HOST_MEMORY_CHECK");  // NOLINT(concurrency-mt-unsafe)
  const bool is_checked = setting == nullptr || std::string_view(setting) != "0";
  const std::size_t left = is_checked ? available() : kUnknown;  // may throw: before anything is promised
  const std::size_t before = promised.fetch_add(bytes);
  if (before <= left && bytes <= left - before) return;
  promised -= bytes;
  Error error(Kind::kHostMemory, "a backup needs " + format_bytes(bytes) + " of host memory and " +
                                     format_bytes(left - std::min(left, before)) + " are available");
  error.wanted = bytes;
  error.free = left - std::min(left, before);
  throw error;
}

Promise::~Promise() { promised -= left_; }

void Promise::fulfil(std::size_t bytes) noexcept {
  left_ -= bytes;
  promised -= bytes;
}

Reservation::Reservation(std::size_t size, int numa_node) : size_(size) {
  // Over-reserve, then give back what lies outside the aligned part.
  const std::size_t padded = size + kHugePage;
  void* raw = sys::map_memory(padded);
  if (raw == nullptr) throw no_memory(size, "reserving", errno);
  const auto base = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (base + kHugePage - 1) / kHugePage * kHugePage;
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t end = (aligned + size + page - 1) / page * page;
  // Addresses without pages: where the kernel keeps them, nothing is lost.
  if (aligned > base) static_cast<void>(sys::unmap_memory(raw, aligned - base));
  if (base + padded > end) {
    static_cast<void>(sys::unmap_memory(reinterpret_cast<void*>(end), base + padded - end));
  }
  start_ = reinterpret_cast<char*>(aligned);

  // All three are wishes: without them the backup is slower or crosses sockets, but right.
  static_cast<void>(madvise(start_, size_, MADV_HUGEPAGE));
  static_cast<void>(madvise(start_, size_, MADV_DONTFORK));  // a child must not copy pinned pages
  if (numa_node >= 0 && numa_node < 1024) {
    std::array<unsigned long, 1024 / (8 * sizeof(unsigned long))> nodes{};
    nodes.at(static_cast<std::size_t>(numa_node) / 64) = 1UL << (static_cast<unsigned>(numa_node) % 64);
    static_cast<void>(syscall(SYS_mbind, start_, size_, kPreferred, nodes.data(), 1024UL, 0U));
  }
}

Reservation::Reservation(Reservation& whole, std::size_t size) noexcept : start_(whole.start_), size_(size) {
  whole.start_ += size;
  whole.size_ -= size;
}

Reservation::~Reservation() {
  if (start_ == nullptr || size_ == 0 || sys::unmap_memory(start_, size_) == 0) return;
  // The kernel refuses to split mappings beyond vm.max_map_count. The pages at least can go.
  static_cast<void>(madvise(start_, size_, MADV_DONTNEED));
  problems::record({"munmap failed: addresses of a backup's host memory are not given back, its pages are"});
}

void Reservation::populate() {
  // One write a page. Where huge pages are on, a write brings two mebibytes; where the kernel had none
  // at hand, pinning brings the rest, only more slowly.
  static const std::size_t step =
      has_huge_pages() ? kHugePage : static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < size_; at += step) *static_cast<volatile char*>(start_ + at) = 0;
}

}  // namespace fencepool::host_memory
