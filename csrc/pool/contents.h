// What a backup holds, by digest: blocks that are there already are not copied again, and equal blocks are
// stored once.
//
// Not thread-safe: it belongs to the transition that has claimed the pool.
#pragma once

#include <optional>
#include <unordered_map>

#include "digest/format.h"
#include "pool/extents.h"

namespace fencepool {

class Contents {
 public:
  // Forgets everything: the next pause copies every block.
  void clear() noexcept;
  bool is_empty() const { return blocks_.empty(); }
  // Bytes that are stored, each block once.
  std::size_t bytes() const { return space_ ? space_->taken_bytes() : 0; }

  // One pause's places for its blocks. Unless it is committed, what it added is forgotten again.
  class Plan;

 private:
  struct Key {
    digest::Digest digest;
    std::size_t size;  // bytes; digests of different sizes are not compared
    bool operator==(const Key& other) const { return digest == other.digest && size == other.size; }
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>(key.digest.first ^ (key.size << 40U));
    }
  };
  struct Block {
    std::size_t position;  // in the host buffer
    std::uint64_t plan;    // the last plan that used it
    bool is_new;           // of a plan that has not been committed: the copy may not have ended
  };

  std::unordered_map<Key, Block, Hash> blocks_;
  std::optional<Extents> space_;  // of the host buffer's positions; none: all free
  std::uint64_t plans_ = 0;
};

class Contents::Plan {
 public:
  explicit Plan(Contents& contents) : contents_(&contents) { ++contents.plans_; }
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Where an equal block is stored; it stays there.
  std::optional<std::size_t> find(const digest::Digest& digest, std::size_t size);
  // What no find() has asked for gives its place up.
  void drop_unused();
  // A place for a block that is not stored, at `preferred` if that is free.
  std::size_t add(const digest::Digest& digest, std::size_t size, std::optional<std::size_t> preferred);
  // Bytes the host buffer has to have.
  std::size_t end() const { return contents_->space_ ? contents_->space_->end() : 0; }
  // The copies have ended: what was added is there.
  void commit() noexcept;

 private:
  void forget_new() noexcept;

  Contents* contents_;
  bool has_added_ = false;
};

}  // namespace fencepool
