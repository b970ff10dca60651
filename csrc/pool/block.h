// A run of bytes handed out by a pool: one tensor's storage.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <utility>

#include "pool/segment.h"

namespace fencepool {

class Pool;

// Where a block lies. Until it is a Block, and after it was one, its bytes are taken and counted as live.
struct Place {
  Segment* segment = nullptr;  // owned by the pool, alive as long as the place is taken
  std::size_t offset = 0;
  std::size_t size = 0;  // bytes
};
// A list: its nodes move from one to the other without memory, so giving back cannot fail for want of it.
using Places = std::list<Place>;

// Keeps its segment alive, and gives its bytes back when it dies, on whatever thread: never takes the
// GIL, never throws, waits for no device work.
class Block {
 public:
  explicit Block(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Takes the first of the places over.
  void take(Places& places) noexcept { place_.splice(place_.end(), places, places.begin()); }

  CUdeviceptr address() const { return place_.front().segment->range.address() + place_.front().offset; }
  std::size_t size() const { return place_.front().size; }  // bytes
  const std::shared_ptr<Pool>& pool() const { return pool_; }

 private:
  std::shared_ptr<Pool> pool_;
  Places place_;  // one, once it was taken
};

}  // namespace fencepool
