#include "backup/disk_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/problems.h"
#include "base/process.h"
#include "base/retry.h"
#include "base/system_calls.h"

namespace fencepool {
namespace {

using sys::Call;
using sys::name_of;

constexpr const char* kAdvice = "name a directory of a local disk that this process may write to";
constexpr mode_t kPrivate = 0600;
constexpr int kTries = 100;  // of random names

std::string words_of(int code) {
  char buffer[128] = {};
  return strerror_r(code, buffer, sizeof buffer);  // GNU's: thread-safe, and returns the words
}

Error error_of(Call call, int code, const std::string& directory, const std::string& what) {
  Error error(Kind::kDisk, std::string(name_of(call)) + " for " + what + " in " + directory +
                               " failed: " + words_of(code));
  error.call = name_of(call);
  error.code = code;
  error.status = words_of(code);
  error.path = directory;
  return error;
}

// Memory of the host under the name of a file system: a backup there would be no backup on a disk.
bool is_memory(const struct statfs& system) {
  constexpr std::uint32_t kTmpfs = 0x01021994;
  constexpr std::uint32_t kRamfs = 0x858458f6;
  constexpr std::uint32_t kHugetlbfs = 0x958458f6;
  const auto type = static_cast<std::uint32_t>(system.f_type);
  return type == kTmpfs || type == kRamfs || type == kHugetlbfs;
}

// The directory, found to be fit for files.
class Folder {
 public:
  explicit Folder(const std::string& path) : file_(sys::open_folder(path.c_str())) {
    if (file_ < 0) throw refused(Call::k_openat, errno, path);
    try {
      struct statfs system{};
      if (sys::fstatfs(file_, &system) != 0) throw refused(Call::k_fstatfs, errno, path);
      if (is_memory(system)) {
        Error error(Kind::kDisk,
                    path +
                        " lies in the host's memory (tmpfs or ramfs), which would be no backup on a "
                        "disk; backup=\"host\" keeps contents there and is faster, or " +
                        kAdvice);
        error.path = path;
        throw error;
      }
      if (sys::faccessat(file_, ".", W_OK | X_OK) != 0) throw refused(Call::k_faccessat, errno, path);
    } catch (...) {
      close();
      throw;
    }
  }
  ~Folder() { close(); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  int get() const { return file_; }

 private:
  static Error refused(Call call, int code, const std::string& path) {
    Error error = error_of(call, code, path, "a backup");
    error.message += std::string("; ") + kAdvice;
    return error;
  }
  void close() const noexcept {
    if (sys::close(file_) != 0) problems::record({"closing a directory failed"});
  }

  int file_;
};

// Where the file system cannot make a file without a name, one is made that no other process can guess, and
// its name is taken away at once.
int open_and_unlink(int folder, int flags) {
  for (int tried = 0; tried < kTries; ++tried) {
    std::uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) return -1;
    const std::string name = ".fencepool-" + std::to_string(number);
    const int file = sys::openat(folder, name.c_str(), flags | O_CREAT | O_EXCL | O_NOFOLLOW, kPrivate);
    if (file < 0 && errno == EEXIST) continue;
    const int refused = file < 0 ? errno : 0;
    // Where O_DIRECT is refused, the kernel has made the file by then.
    if (refused != 0 && refused != EINVAL) return -1;
    const auto is_unlinked = [&] {
      return sys::unlinkat(folder, name.c_str()) == 0 || (refused != 0 && errno == ENOENT);
    };
    const bool has_name = !succeeds_in_two(is_unlinked);
    if (!has_name && refused == 0) return file;
    const int code = refused != 0 ? refused : errno;
    if (has_name) problems::record({"a file keeps its name, since unlinking it was refused twice: ", name});
    if (file >= 0 && sys::close(file) != 0) problems::record({"closing a file that keeps its name failed"});
    errno = code;
    return -1;
  }
  errno = EEXIST;
  return -1;
}

int open_private(int folder, int flags) {
  // O_EXCL: nobody can give it a name later on (linkat(2)).
  const int file = sys::openat(folder, ".", flags | O_TMPFILE | O_EXCL, kPrivate);
  if (file >= 0) return file;
  // Kernels and file systems without O_TMPFILE (open(2)).
  const bool is_unknown = errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT;
  return is_unknown ? open_and_unlink(folder, flags) : -1;
}

bool is_full(int code) { return code == ENOSPC || code == EDQUOT || code == EFBIG; }

std::size_t free_on(int file) {
  struct statfs system{};
  if (sys::fstatfs(file, &system) != 0) return 0;
  return static_cast<std::size_t>(system.f_bavail) * static_cast<std::size_t>(system.f_bsize);
}

}  // namespace

DiskFile::DiskFile(std::string directory) : directory_(std::move(directory)) {
  open();
  try {
    look_at_alignment();
  } catch (...) {
    if (sys::close(file_) != 0) problems::record({"closing the file of a backup failed"});
    throw;
  }
}

DiskFile::~DiskFile() {
  if (process::is_forked_child()) return;
  if (size_ > 0) shrink(0);  // a forked child has the file open too, and would keep its space
  if (sys::close(file_) != 0) problems::record({"closing the file of a backup failed; its space is free"});
}

void DiskFile::check(const std::string& directory) { static_cast<void>(Folder(directory)); }

void DiskFile::open() {
  const Folder folder(directory_);
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  file_ = open_private(folder.get(), kFlags | O_DIRECT);
  if (file_ < 0 && errno == EINVAL) {
    is_direct_ = false;
    file_ = open_private(folder.get(), kFlags);
  }
  if (file_ < 0) throw failed(Call::k_openat, errno);
}

// statx(2), STATX_DIOALIGN, since Linux 6.1. Before that 4 KiB does on what there is.
void DiskFile::look_at_alignment() {
  sys::DirectAlignment found;
  if (sys::direct_alignment(file_, &found) != 0) {
    if (errno == ENOSYS || errno == EINVAL) return;
    throw failed(Call::k_statx, errno);
  }
  if (!found.is_known || !is_direct_) return;
  if (found.offset == 0) {
    turn_to_buffered();
  } else {
    step_ = std::max({step_, found.offset, found.memory});
  }
}

bool DiskFile::grow(std::size_t size) {
  if (size <= size_) return true;
  const std::size_t more = size - size_;
  if (sys::fallocate(file_, static_cast<off_t>(size_), static_cast<off_t>(more)) == 0) {
    size_ = size;
    return true;
  }
  const int code = errno;
  if (code != EOPNOTSUPP && code != ENOSYS) {
    const std::size_t before = size_;
    size_ = size;  // a part of it may have been taken
    shrink(before);
    size_ = before;  // what could not be given back does not count: the next try has to take all of it
    throw too_little(Call::k_fallocate, code, more);
  }
  if (sys::ftruncate(file_, static_cast<off_t>(size)) != 0) {
    throw too_little(Call::k_ftruncate, errno, more);
  }
  size_ = size;
  return false;
}

void DiskFile::require_free(std::size_t bytes) const {
  const std::size_t free = free_on(file_);
  if (bytes <= free) return;
  Error error(Kind::kDisk, directory_ + " has too little space for a backup: " + format_bytes(bytes) +
                               " wanted, " + format_bytes(free) + " free");
  error.path = directory_;
  error.code = ENOSPC;
  error.status = words_of(ENOSPC);
  error.wanted = bytes;
  error.free = free;
  throw error;
}

void DiskFile::shrink(std::size_t size) noexcept {
  if (size >= size_) return;
  if (succeeds_in_two([&] { return sys::ftruncate(file_, static_cast<off_t>(size)) == 0; })) {
    size_ = size;
  } else {
    problems::record({"the file of a backup stays larger than it need be: ftruncate was refused twice"});
  }
}

void DiskFile::write(std::size_t position, const char* data, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const bool was_direct = is_direct_;
    const ssize_t written = sys::pwrite(file_, data + done, size - done, static_cast<off_t>(position + done));
    if (written > 0) {
      done += static_cast<std::size_t>(written);
    } else if (written == 0) {
      throw failed(Call::k_pwrite, EIO);
    } else if (errno != EINVAL || !was_direct) {
      throw too_little(Call::k_pwrite, errno, size);
    } else {
      turn_to_buffered();
    }
  }
  if (is_direct_) return;
  // Pages of the cache are host memory, which a backup on a disk is not to take.
  const auto at = static_cast<off_t>(position);
  if (sys::sync_range(file_, at, static_cast<off_t>(size)) != 0 && errno != ENOSYS && errno != ESPIPE) {
    throw failed(Call::k_sync_file_range, errno);
  }
  if (sys::forget(file_, at, static_cast<off_t>(size)) != 0) {
    throw failed(Call::k_posix_fadvise, errno);
  }
}

void DiskFile::read(std::size_t position, char* data, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const bool was_direct = is_direct_;
    const ssize_t got = sys::pread(file_, data + done, size - done, static_cast<off_t>(position + done));
    if (got > 0) done += static_cast<std::size_t>(got);
    // Everything stored has whole steps: what ends between them ends too early.
    if (got > 0 && (done == size || done % step_ == 0)) continue;
    if (got >= 0) {
      Error error(Kind::kDisk, "the file of a backup in " + directory_ + " ended before what was stored");
      error.call = name_of(Call::k_pread);
      error.path = directory_;
      throw Ended(std::move(error), position + done);
    } else if (errno != EINVAL || !was_direct) {
      throw failed(Call::k_pread, errno);
    } else {
      turn_to_buffered();
    }
  }
  // Advice: what has been read is there without it.
  if (!is_direct_)
    static_cast<void>(sys::forget(file_, static_cast<off_t>(position), static_cast<off_t>(size)));
}

void DiskFile::sync() {
  if (sys::fdatasync(file_) != 0) throw failed(Call::k_fdatasync, errno);
}

// Some file systems take O_DIRECT at open and refuse it at the first use. More than one thread may find that.
void DiskFile::turn_to_buffered() {
  if (sys::set_flags(file_, O_RDWR) != 0) throw failed(Call::k_fcntl, errno);
  is_direct_ = false;
}

Error DiskFile::failed(Call call, int code) const {
  return error_of(call, code, directory_, "the file of a backup");
}

Error DiskFile::too_little(Call call, int code, std::size_t wanted) const {
  Error error = failed(call, code);
  if (!is_full(code)) return error;
  error.wanted = wanted;
  error.free = free_on(file_);
  error.message += "; " + format_bytes(wanted) + " wanted, " + format_bytes(error.free) + " free";
  return error;
}

}  // namespace fencepool
