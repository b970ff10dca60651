// A private file for what a pool holds while it is paused: it has no name, so nothing of it is left when the
// process ends, however it ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include "base/error.h"
#include "base/system_calls.h"

namespace fencepool {

// Positions and sizes are multiples of step(), the memory's addresses too. Reading and writing are
// thread-safe, the rest belongs to whoever has claimed the pool.
class DiskFile {
 public:
  // Makes it in `directory`: read and written past the page cache where the file system allows that. Throws
  // kDisk, as everything here does.
  explicit DiskFile(std::string directory);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  // Throws unless the directory is one, can be written to, and lies on a disk.
  static void check(const std::string& directory);
  const std::string& directory() const { return directory_; }

  // Takes space on the disk until the file has `size` bytes. Throws when there is too little, and has
  // changed nothing then. False where the file system takes none ahead: then a write may still find none.
  bool grow(std::size_t size);
  // For such a file system: throws unless `bytes` are free now.
  void require_free(std::size_t bytes) const;
  // Gives back what lies beyond `size`. Where that is refused twice, a problem is recorded.
  void shrink(std::size_t size) noexcept;
  std::size_t size() const { return size_; }  // bytes that it holds of the disk

  void write(std::size_t position, const char* data, std::size_t size);
  // Reads all of it. Throws also where the file ends before that, with the place in Ended.
  void read(std::size_t position, char* data, std::size_t size);
  struct Ended : Error {
    Ended(Error error, std::size_t at) : Error(std::move(error)), position(at) {}
    std::size_t position;  // of the first byte that is not there
  };
  // What has been written is on the disk. Needed where the page cache may still find that it cannot be.
  void sync();

  bool is_direct() const noexcept { return is_direct_; }  // past the page cache
  std::size_t step() const { return step_; }              // bytes

 private:
  void open();
  void look_at_alignment();
  void turn_to_buffered();
  Error failed(sys::Call call, int code) const;
  Error too_little(sys::Call call, int code, std::size_t wanted) const;

  const std::string directory_;
  int file_ = -1;
  std::size_t step_ = 4096;
  std::size_t size_ = 0;
  std::atomic<bool> is_direct_{true};
};

}  // namespace fencepool
