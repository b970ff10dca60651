// The system calls that backups rest on, on files and on the host's memory: the one way to them, so that each
// can be made to fail.
//
// They have the system's own signatures, and set errno. Where a call can be interrupted by a signal it is
// made again here. Thread-safe.
#pragma once

#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/types.h>

#include <cstddef>
#include <string_view>

#include "base/faults.h"

namespace fencepool::sys {

#define FENCEPOOL_SYSTEM_CALLS(X) \
  X(openat)                       \
  X(fstatfs)                      \
  X(faccessat)                    \
  X(unlinkat)                     \
  X(statx)                        \
  X(fcntl)                        \
  X(fallocate)                    \
  X(ftruncate)                    \
  X(pwrite)                       \
  X(pread)                        \
  X(fdatasync)                    \
  X(sync_file_range)              \
  X(posix_fadvise)                \
  X(close)                        \
  X(mmap)                         \
  X(munmap)

enum class Call : int {
#define FENCEPOOL_SYSTEM_ENUM(name) k_##name,
  FENCEPOOL_SYSTEM_CALLS(FENCEPOOL_SYSTEM_ENUM)
#undef FENCEPOOL_SYSTEM_ENUM
      kCount
};
const char* name_of(Call call);  // "pwrite"
// The call of that name, or Call::kCount.
Call find_call(std::string_view name);

// Injected by tests; the result is an errno.
Faults<Call, int>& faults();

// The folder itself, to be asked about and to make files in.
int open_folder(const char* path);
int openat(int folder, const char* path, int flags, mode_t mode);
int fstatfs(int file, struct statfs* found);
int faccessat(int folder, const char* path, int mode);
int unlinkat(int folder, const char* path);
// What direct I/O on the file has to be aligned to. Not known: true, and zeros.
struct DirectAlignment {
  bool is_known = false;
  std::size_t memory = 0, offset = 0;  // bytes; 0 while known: the file has no direct I/O
};
int direct_alignment(int file, DirectAlignment* found);
int set_flags(int file, int flags);
int fallocate(int file, off_t position, off_t size);
int ftruncate(int file, off_t size);
ssize_t pwrite(int file, const void* data, std::size_t size, off_t position);
ssize_t pread(int file, void* data, std::size_t size, off_t position);
int fdatasync(int file);
// Writes back what is dirty in the range, and waits for it.
int sync_range(int file, off_t position, off_t size);
// The kernel need not keep the range in memory.
int forget(int file, off_t position, off_t size);
// The descriptor is gone whatever it returns (close(2)), also when a fault is injected.
int close(int file);

// Private anonymous memory without pages behind it, and without a promise of any; null on failure.
void* map_memory(std::size_t size);
int unmap_memory(void* start, std::size_t size);

}  // namespace fencepool::sys
