// Pinned host memory that grows by chunks and keeps what it has: where a pool's contents lie while
// it is paused.
//
// Positions are bytes from 0 to capacity(), over all chunks as if they were one. Not thread-safe: a
// pool's buffer belongs to the transition that has claimed the pool.
#pragma once

#include <memory>
#include <vector>

#include "base/host_budget.h"
#include "base/host_memory.h"
#include "owners/registration.h"

namespace fencepool {

// One piece of pinned memory: unpinned first, then given back. What cannot be unpinned is leaked, since
// the driver would go on using its pages under addresses that mean something else.
struct HostChunk {
  HostChunk(host_memory::Reservation& whole, host_budget::Charge& whole_charge, std::size_t size)
      : memory(whole, size), charge(whole_charge, size) {}
  ~HostChunk() {
    if (registration != nullptr && !registration->unpin()) leak_memory();
  }
  // Copies may still write to it.
  void leak() noexcept {
    static_cast<void>(registration.release());
    leak_memory();
  }
  HostChunk(const HostChunk&) = delete;
  HostChunk& operator=(const HostChunk&) = delete;

  host_memory::Reservation memory;
  host_budget::Charge charge;
  std::unique_ptr<Registration> registration;  // null until it is provisioned

 private:
  void leak_memory() noexcept {
    memory.leak();
    charge.leak();
  }
};

class HostBuffer {
 public:
  explicit HostBuffer(Device& device) : device_(device) {}
  ~HostBuffer() { clear(); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // Where a run of bytes lies: the longest part of [position, position + size) inside one chunk.
  struct Place {
    std::size_t chunk;
    char* address;
    std::size_t size;
  };
  Place place(std::size_t position, std::size_t size) const;
  // Whoever shares a chunk keeps its memory from going away; the contents are the pool's.
  std::shared_ptr<const HostChunk> share(std::size_t chunk) const { return chunks_[chunk]; }

  // Unpins and gives back everything, on several threads. Nothing may be copying to or from it.
  void clear() noexcept;
  // Copies that could not be awaited may still write to it: until that is settled, what would be given
  // back is leaked instead.
  void set_unsettled() noexcept { is_unsettled_ = true; }
  void set_settled() noexcept { is_unsettled_ = false; }
  bool is_unsettled() const { return is_unsettled_; }
  // Whether somebody holds a view of it.
  bool is_shared() const;
  // Gives back all but the first `chunks`. Nothing may be copying to or from the rest.
  void truncate(std::size_t chunks) noexcept;
  std::size_t chunk_count() const { return chunks_.size(); }

  std::size_t capacity() const { return capacity_; }  // bytes
  Device& device() const { return device_; }

 private:
  void drop(std::shared_ptr<HostChunk>& chunk) const noexcept;

  friend class Provision;
  void append(std::shared_ptr<HostChunk> chunk);

  Device& device_;
  std::vector<std::shared_ptr<HostChunk>> chunks_;
  std::vector<std::size_t> starts_;  // position of each chunk's first byte
  std::size_t capacity_ = 0;
  bool is_unsettled_ = false;
};

}  // namespace fencepool
