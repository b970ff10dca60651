#include "base/system_calls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace fencepool::sys {
namespace {

constexpr std::size_t kCalls = static_cast<std::size_t>(Call::kCount);

#define FENCEPOOL_SYSTEM_NAME(name) #name,
constexpr std::array<const char*, kCalls> kNames{{FENCEPOOL_SYSTEM_CALLS(FENCEPOOL_SYSTEM_NAME)}};
#undef FENCEPOOL_SYSTEM_NAME

// Makes the call until no signal comes in between, unless a test has it fail.
template <class Made>
auto make(Call call, Made made) noexcept -> decltype(made()) {
  int injected = 0;
  if (faults().take(call, &injected)) {
    errno = injected;
    return -1;
  }
  for (;;) {
    const auto result = made();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// struct statx of Linux 6.1, from its start to what is asked for here; the kernel fills 256 bytes.
struct Statx {
  std::uint32_t mask;
  std::array<std::uint32_t, 37> others;
  std::uint32_t memory_align;  // stx_dio_mem_align, at byte 152
  std::uint32_t offset_align;
  std::array<std::uint64_t, 12> spare;
};
static_assert(sizeof(Statx) == 256 && offsetof(Statx, memory_align) == 152, "the kernel's layout");
constexpr unsigned kDirectAlignment = 0x2000;  // STATX_DIOALIGN

}  // namespace

const char* name_of(Call call) { return kNames.at(static_cast<std::size_t>(call)); }

Call find_call(std::string_view name) {
  for (std::size_t index = 0; index < kCalls; ++index) {
    if (name == kNames.at(index)) return static_cast<Call>(index);
  }
  return Call::kCount;
}

Faults<Call, int>& faults() {
  static Faults<Call, int> all;
  return all;
}

int open_folder(const char* path) {
  return make(Call::k_openat, [=] { return ::openat(AT_FDCWD, path, O_PATH | O_DIRECTORY | O_CLOEXEC); });
}

int openat(int folder, const char* path, int flags, mode_t mode) {
  return make(Call::k_openat, [=] { return ::openat(folder, path, flags, mode); });
}

int fstatfs(int file, struct statfs* found) {
  return make(Call::k_fstatfs, [=] { return ::fstatfs(file, found); });
}

int faccessat(int folder, const char* path, int mode) {
  return make(Call::k_faccessat, [=] { return ::faccessat(folder, path, mode, AT_EACCESS); });
}

int unlinkat(int folder, const char* path) {
  return make(Call::k_unlinkat, [=] { return ::unlinkat(folder, path, 0); });
}

int direct_alignment(int file, DirectAlignment* found) {
  return make(Call::k_statx, [=] {
    Statx status{};
    const long result = syscall(SYS_statx, file, "", AT_EMPTY_PATH, kDirectAlignment, &status);
    if (result == 0) {
      *found = {(status.mask & kDirectAlignment) != 0, status.memory_align, status.offset_align};
    }
    return static_cast<int>(result);
  });
}

int set_flags(int file, int flags) {
  return make(Call::k_fcntl, [=] { return ::fcntl(file, F_SETFL, flags); });
}

int fallocate(int file, off_t position, off_t size) {
  return make(Call::k_fallocate, [=] { return ::fallocate(file, 0, position, size); });
}

int ftruncate(int file, off_t size) {
  return make(Call::k_ftruncate, [=] { return ::ftruncate(file, size); });
}

ssize_t pwrite(int file, const void* data, std::size_t size, off_t position) {
  return make(Call::k_pwrite, [=] { return ::pwrite(file, data, size, position); });
}

ssize_t pread(int file, void* data, std::size_t size, off_t position) {
  return make(Call::k_pread, [=] { return ::pread(file, data, size, position); });
}

int fdatasync(int file) {
  return make(Call::k_fdatasync, [=] { return ::fdatasync(file); });
}

int sync_range(int file, off_t position, off_t size) {
  return make(Call::k_sync_file_range, [=] {
    return ::sync_file_range(
        file, position, size,
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  });
}

int forget(int file, off_t position, off_t size) {
  return make(Call::k_posix_fadvise, [=] {
    const int code = ::posix_fadvise(file, position, size, POSIX_FADV_DONTNEED);
    if (code == 0) return 0;
    errno = code;  // it returns what others put into errno
    return -1;
  });
}

int close(int file) {
  int injected = 0;
  const bool is_injected = faults().take(Call::k_close, &injected);
  const int result = ::close(file);
  if (!is_injected) return result;
  errno = injected;
  return -1;
}

void* map_memory(std::size_t size) {
  void* start = nullptr;
  const int result = make(Call::k_mmap, [&] {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    start = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    return start == MAP_FAILED ? -1 : 0;
  });
  return result == 0 ? start : nullptr;
}

int unmap_memory(void* start, std::size_t size) {
  return make(Call::k_munmap, [=] { return ::munmap(start, size); });
}

}  // namespace fencepool::sys
