// What both ways between a device and a disk are made of: buffers, threads, and waiting for either side.
//
// The calling thread makes every driver call; the threads only read and write the file. So copies, reads and
// writes overlap as far as there are buffers.
#pragma once

#include <list>
#include <memory>

#include "backup/disk_store.h"
#include "backup/job_threads.h"
#include "pool/claim.h"
#include "pool/disk_plan.h"

namespace fencepool {

class DiskJobs {
 public:
  static constexpr std::size_t kThreads = 4;  // so many calls at once keep a disk busy

  // A load on its way, in a buffer of its own; none where all of it is zeros.
  struct Slot {
    const DiskLoad& load;
    StagingBuffers buffer;
    JobThreads::Job job;
    bool is_marked = false;  // the buffer's event is behind its copies

    explicit Slot(const DiskLoad& carried) : load(carried) {}
    // The device has nothing to do with it any more.
    bool is_copied() const { return buffer.empty() || (is_marked && buffer.front().is_free()); }
    void mark(Stream& stream) {
      if (!buffer.empty()) buffer.front().record(stream);
      is_marked = true;
    }
    char* start() const { return buffer.empty() ? nullptr : buffer.front().start(); }
  };
  using Slots = std::list<Slot>;

  DiskJobs(Pool::Claim& claim, std::vector<DiskLoad> loads, const Interrupt& interrupt);
  // The buffers go back; the caller has seen to it that nobody uses them without an event that says so.
  ~DiskJobs();
  DiskJobs(const DiskJobs&) = delete;
  DiskJobs& operator=(const DiskJobs&) = delete;

  Pool::Claim& claim() const { return claim_; }
  bool has_next() const { return next_ < loads_.size(); }
  // A slot for the next load at the end of `slots`. False while every buffer is in use.
  bool begin_next(Slots& slots);
  void write(Slot& slot);
  void read(Slot& slot);
  // The slot's buffer is free for another load.
  void recycle(Slots& slots, Slots::iterator slot) noexcept;
  // At the end, or when something fails: the slot's buffer is not this transfer's any more.
  void give_back(Slot& slot) noexcept;
  void leak(Slot& slot) noexcept;

  // A look around: before asking what has ended. Throws what interrupts the transfer.
  void look();
  // When nothing has: waits for a job that ends after the look, or for the device where the threads wait for
  // it too.
  void rest(bool is_device_awaited);
  // No job is under way any more.
  void stop() noexcept { threads_.reset(); }

 private:
  bool has_buffer();

  Pool::Claim& claim_;
  const Interrupt& interrupt_;
  const std::vector<DiskLoad> loads_;
  std::size_t next_ = 0;
  std::size_t most_;      // buffers
  std::size_t held_ = 0;  // the same
  StagingBuffers free_;
  double asked_;                         // when a signal was last looked for
  std::size_t ended_ = 0;                // jobs, at the last look
  std::unique_ptr<JobThreads> threads_;  // null where nothing is read or written; ends before the rest
};

}  // namespace fencepool
