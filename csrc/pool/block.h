// A run of bytes handed out by a pool: one tensor's storage.
#pragma once

#include <cstddef>
#include <memory>

#include "pool/segment.h"

namespace fencepool {

class Pool;

// Keeps its segment alive, and gives its bytes back when it dies, on whatever thread: never takes the
// GIL, never throws, waits for no device work.
class Block {
 public:
  Block(std::shared_ptr<Pool> pool, Segment& segment, std::size_t offset, std::size_t size)
      : pool_(std::move(pool)), segment_(&segment), offset_(offset), size_(size) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  CUdeviceptr address() const { return segment_->range.address() + offset_; }
  std::size_t size() const { return size_; }  // bytes
  const std::shared_ptr<Pool>& pool() const { return pool_; }

 private:
  std::shared_ptr<Pool> pool_;
  Segment* segment_;  // owned by the pool, alive as long as this block
  std::size_t offset_;
  std::size_t size_;
};

}  // namespace fencepool
