#include "driver/host/physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

namespace fencepool::host_driver {
namespace {

// With its size sealed, no other process can shrink the file under a mapping (which would raise SIGBUS).
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// The kernel shows a memfd's name in /proc/self/fd; it tells our memory, and its device, from others'.
constexpr const char* kNameFormat = "fencepool-host-%d";
constexpr const char* kLinkFormat = "/memfd:fencepool-host-%d";

// Fills the file through write(), which reports a lack of memory where a store would raise a signal.
bool poison(int descriptor, std::size_t size) {
  const std::vector<unsigned char> block(std::min(size, std::size_t{1} << 20), kPoison);
  for (std::size_t done = 0; done < size;) {
    const std::size_t wanted = std::min(block.size(), size - done);
    const ssize_t written = pwrite(descriptor, block.data(), wanted, static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<std::size_t>(written);
  }
  return true;
}

// The device in the name of our memfd, or -1 when the descriptor is something else.
int device_of(int descriptor) {
  char path[32];
  char target[64] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
  if (readlink(path, target, sizeof(target) - 1) <= 0) return -1;
  int device = -1;
  return std::sscanf(target, kLinkFormat, &device) == 1 && is_device(device) ? device : -1;
}

}  // namespace

CUresult allocation_error(int error_number) {
  switch (error_number) {
    case ENOMEM:
    case ENOSPC:
    case EMFILE:  // one descriptor an allocation: the process is out of them
    case ENFILE:
      return CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return CUDA_ERROR_OPERATING_SYSTEM;
  }
}

Descriptor::~Descriptor() {
  if (is_open()) close(number_);
}

Physical::Physical(int device_, bool is_exportable_, HeldMemory held, Descriptor descriptor,
                   const struct stat& status)
    : device(device_),
      size(static_cast<std::size_t>(status.st_size)),
      is_exportable(is_exportable_),
      file_system_(status.st_dev),
      file_(status.st_ino),
      held_(std::move(held)),
      descriptor_(std::move(descriptor)) {}

CUresult Physical::create(int device, std::size_t size, bool is_exportable, std::shared_ptr<Physical>& made) {
  const bool is_on_host = device == kOnHost;
  Device& owner = device_at(is_on_host ? 0 : device);
  if (!is_on_host && !owner.try_hold(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  HeldMemory held = is_on_host ? HeldMemory() : HeldMemory(device, size);
  char name[32];
  std::snprintf(name, sizeof(name), kNameFormat, device);
  Descriptor descriptor(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.is_open()) return allocation_error(errno);
  if (ftruncate(descriptor.number(), static_cast<off_t>(size)) != 0) return allocation_error(errno);
  if (owner.settings().is_poisoned && !poison(descriptor.number(), size)) return allocation_error(errno);
  struct stat status{};
  if (fcntl(descriptor.number(), F_ADD_SEALS, kSeals) != 0 || fstat(descriptor.number(), &status) != 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  made = std::make_shared<Physical>(device, is_exportable, std::move(held), std::move(descriptor), status);
  return CUDA_SUCCESS;
}

CUresult Physical::import(int foreign, std::shared_ptr<Physical>& made) {
  const int device = device_of(foreign);
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  const int seals = fcntl(foreign, F_GET_SEALS);
  struct stat status{};
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(foreign, &status) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0 || size % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  Descriptor descriptor(fcntl(foreign, F_DUPFD_CLOEXEC, 0));
  if (!descriptor.is_open()) return allocation_error(errno);
  made = std::make_shared<Physical>(device, true, HeldMemory(), std::move(descriptor), status);
  return CUDA_SUCCESS;
}

int Physical::duplicate() const { return fcntl(descriptor(), F_DUPFD_CLOEXEC, 0); }

}  // namespace fencepool::host_driver
