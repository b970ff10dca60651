#include "backup/host_buffer.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/problems.h"

namespace fencepool {

HostBuffer::Place HostBuffer::place(std::size_t position, std::size_t size) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), position);
  const std::size_t index = static_cast<std::size_t>(after - starts_.begin()) - 1;
  const std::size_t inside = position - starts_[index];
  const host_memory::Reservation& memory = chunks_[index]->memory;
  return {index, memory.start() + inside, std::min(size, memory.size() - inside)};
}

bool HostBuffer::is_shared() const {
  return std::any_of(chunks_.begin(), chunks_.end(), [](const auto& chunk) { return chunk.use_count() > 1; });
}

void HostBuffer::append(std::shared_ptr<HostChunk> chunk) {
  starts_.reserve(starts_.size() + 1);
  chunks_.push_back(std::move(chunk));  // may throw; nothing has changed then
  starts_.push_back(capacity_);
  capacity_ += chunks_.back()->memory.size();
}

void HostBuffer::clear() noexcept {
  if (process::is_forked_child()) {
    for (const auto& chunk : chunks_) chunk->leak();
    return;
  }
  std::atomic<std::size_t> next{0};
  const auto work = [&]() noexcept {
    for (std::size_t i = next++; i < chunks_.size(); i = next++) drop(chunks_[i]);
  };
  std::vector<std::thread> helpers;
  try {
    const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
    for (std::size_t i = 1; i < std::min({chunks_.size(), cores, std::size_t{8}}); ++i)
      helpers.emplace_back(work);
  } catch (const std::exception&) {
    problems::record({"no thread could be started to give host memory back faster; one does it all"});
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  chunks_.clear();
  starts_.clear();
  capacity_ = 0;
}

void HostBuffer::drop(std::shared_ptr<HostChunk>& chunk) const noexcept {
  if (is_unsettled_) chunk->leak();
  chunk.reset();
}

void HostBuffer::truncate(std::size_t chunks) noexcept {
  while (chunks_.size() > chunks) {
    capacity_ = starts_.back();
    starts_.pop_back();
    drop(chunks_.back());
    chunks_.pop_back();
  }
}

}  // namespace fencepool
