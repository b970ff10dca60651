#include "backup/provision.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace fencepool {
namespace {

std::size_t thread_count(std::size_t chunks) {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  return std::min({chunks, cores, Provision::kTouchingThreads + 1});
}

}  // namespace

Provision::Provision(HostBuffer& buffer, std::size_t bytes)
    : buffer_(buffer), first_new_(buffer.chunks_.size()), next_touched_(buffer.chunks_.size()) {
  if (bytes <= buffer.capacity()) return;
  bytes_added_ = bytes - buffer.capacity();
  host_budget::Charge charge(bytes_added_);
  promise_ = std::make_unique<host_memory::Promise>(bytes_added_);
  try {
    // The chunks lie one after the other, so that a tensor's backup is mostly in one piece.
    host_memory::Reservation whole(bytes_added_, buffer_.device().numa_node());
    while (whole.size() > 0) {
      buffer_.append(std::make_shared<HostChunk>(whole, charge, std::min(whole.size(), kChunk)));
    }
    steps_.assign(buffer_.chunks_.size() - first_new_, Step::kEmpty);
    start_threads();
  } catch (const std::exception& error) {
    join();
    buffer_.truncate(first_new_);
    if (dynamic_cast<const Error*>(&error) != nullptr) throw;
    throw Error(Kind::kHostMemory, std::string("preparing host memory for a backup failed: ") + error.what());
  }
}

Provision::~Provision() {
  join();
  if (!is_kept_) buffer_.truncate(first_new_);
}

void Provision::start_threads() {
  const std::size_t count = thread_count(buffer_.chunks_.size() - first_new_);
  if (count == 1) {  // one thread does both, in turn
    threads_.emplace_back([this] {
      guarded([this] { touch(); });
      guarded([this] { pin(); });
    });
    return;
  }
  threads_.emplace_back([this] { guarded([this] { pin(); }); });
  for (std::size_t i = 1; i < count; ++i) threads_.emplace_back([this] { guarded([this] { touch(); }); });
}

template <class Work>
void Provision::guarded(Work work) noexcept {
  try {
    work();
  } catch (...) {
    is_stopped_ = true;
    const Lock lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    changed_.notify_all();
  }
}

void Provision::touch() {
  for (;;) {
    const std::size_t index = next_touched_.fetch_add(1);
    if (is_stopped_ || index >= buffer_.chunks_.size()) return;
    host_memory::Reservation& memory = buffer_.chunks_[index]->memory;
    memory.populate();
    promise_->fulfil(memory.size());
    const Lock lock(mutex_);
    steps_[index - first_new_] = Step::kTouched;
    changed_.notify_all();
  }
}

void Provision::pin() {
  const Device::Scope scope(buffer_.device());
  for (std::size_t index = first_new_; index < buffer_.chunks_.size(); ++index) {
    {
      const Lock lock(mutex_);
      while (!is_stopped_ && !failure_ && (is_submitting_ || steps_[index - first_new_] == Step::kEmpty)) {
        changed_.wait(mutex_);
      }
      if (is_stopped_ || failure_) return;
    }
    HostChunk& chunk = *buffer_.chunks_[index];
    chunk.registration =
        std::make_unique<Registration>(buffer_.device(), chunk.memory.start(), chunk.memory.size());
    const Lock lock(mutex_);
    steps_[index - first_new_] = Step::kPinned;
    changed_.notify_all();
  }
}

void Provision::wait(std::size_t chunk, const Interrupt& interrupt) {
  if (chunk < first_new_) return;
  const Lock lock(mutex_);
  while (!failure_ && steps_[chunk - first_new_] != Step::kPinned) {
    if (std::exchange(is_submitting_, false)) changed_.notify_all();
    changed_.wait_for(mutex_, std::chrono::milliseconds(50));
    call_unlocked(mutex_, interrupt);
  }
  if (failure_) std::rethrow_exception(failure_);
  is_submitting_ = true;
}

void Provision::keep(const Interrupt& interrupt) {
  for (std::size_t chunk = first_new_; chunk < buffer_.chunks_.size(); ++chunk) wait(chunk, interrupt);
  is_kept_ = true;
}

void Provision::join() noexcept {
  {
    const Lock lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  threads_.clear();
  promise_.reset();
}

}  // namespace fencepool
