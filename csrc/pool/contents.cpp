#include "pool/contents.h"

#include <exception>

namespace fencepool {
namespace {

constexpr std::size_t kMost = std::size_t{1} << 47;  // bytes; more than any machine's memory

}  // namespace

void Contents::clear() noexcept {
  blocks_.clear();
  space_.reset();
}

Contents::Plan::~Plan() {
  if (has_added_) forget_new();
}

std::optional<std::size_t> Contents::Plan::find(const digest::Digest& digest, std::size_t size) {
  const auto found = contents_->blocks_.find({digest, size});
  if (found == contents_->blocks_.end()) return std::nullopt;
  found->second.plan = contents_->plans_;
  return found->second.position;
}

void Contents::Plan::drop_unused() {
  for (auto block = contents_->blocks_.begin(); block != contents_->blocks_.end();) {
    if (block->second.plan == contents_->plans_) {
      ++block;
    } else {
      contents_->space_->give_back(block->second.position, block->first.size);  // may throw; nothing has changed
      block = contents_->blocks_.erase(block);
    }
  }
}

std::size_t Contents::Plan::add(const digest::Digest& digest, std::size_t size,
                                std::optional<std::size_t> preferred) {
  if (!contents_->space_) contents_->space_.emplace(kMost);
  Extents& space = *contents_->space_;
  const auto block = contents_->blocks_.try_emplace({digest, size}, Block{0, contents_->plans_, true}).first;
  has_added_ = true;
  try {
    if (preferred && space.take_at(*preferred, size)) {
      block->second.position = *preferred;
    } else {
      block->second.position = space.take(size).value();
    }
  } catch (...) {
    contents_->blocks_.erase(block);
    throw;
  }
  return block->second.position;
}

void Contents::Plan::commit() noexcept {
  for (auto& [key, block] : contents_->blocks_) block.is_new = false;
  has_added_ = false;
}

void Contents::Plan::forget_new() noexcept {
  try {
    for (auto block = contents_->blocks_.begin(); block != contents_->blocks_.end();) {
      if (block->second.is_new) {
        contents_->space_->give_back(block->second.position, block->first.size);
        block = contents_->blocks_.erase(block);
      } else {
        ++block;
      }
    }
  } catch (const std::exception&) {
    contents_->clear();  // no memory for the books: then everything is copied next time
  }
}

}  // namespace fencepool
