#include "backup/job_threads.h"

#include <string>
#include <system_error>

#include "base/error.h"

namespace fencepool {

JobThreads::JobThreads(std::size_t count) {
  threads_.reserve(count);
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { run(); });
  } catch (const std::exception& error) {
    if (!threads_.empty()) return;  // fewer do the same, only slower
    if (dynamic_cast<const std::system_error*>(&error) == nullptr) throw;
    throw Error(Kind::kHostMemory, std::string("no thread could be started for a disk: ") + error.what());
  }
}

JobThreads::~JobThreads() {
  {
    const Lock lock(mutex_);
    is_stopped_ = true;
    waiting_.clear();
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void JobThreads::submit(Job& job, std::function<void()> work) {
  job.work_ = std::move(work);
  const Lock lock(mutex_);
  waiting_.push_back(&job);
  changed_.notify_all();
}

bool JobThreads::has_idle() const {
  const Lock lock(mutex_);
  return waiting_.size() + at_work_ < threads_.size();
}

std::size_t JobThreads::ended() const {
  const Lock lock(mutex_);
  return ended_;
}

void JobThreads::wait(std::size_t before) {
  const Lock lock(mutex_);
  if (ended_ == before) changed_.wait_for(mutex_, std::chrono::milliseconds(50));
}

void JobThreads::run() {
  for (;;) {
    Job* job = nullptr;
    {
      const Lock lock(mutex_);
      while (!is_stopped_ && waiting_.empty()) changed_.wait(mutex_);
      if (is_stopped_) return;
      job = waiting_.front();
      waiting_.pop_front();
      ++at_work_;
    }
    try {
      job->work_();
    } catch (...) {
      job->failure_ = std::current_exception();
    }
    const Lock lock(mutex_);
    job->is_done_ = true;
    --at_work_;
    ++ended_;
    changed_.notify_all();
  }
}

}  // namespace fencepool
