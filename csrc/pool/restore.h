// One pool's way back, during a resume.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "pool/claim.h"
#include "pool/disk_plan.h"

namespace fencepool {

// Everything it takes lies in it until it is committed; before that, its death ends the copies and
// undoes the rest.
class Restore {
 public:
  explicit Restore(Pool::Claim& claim);
  ~Restore();
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  std::size_t bytes_wanted() const;   // of device memory, to be taken
  std::size_t bytes_missing() const;  // of those, what has not been taken yet
  // Takes the device memory that is still missing. Throws kOutOfMemory.
  void take_memory();
  void give_memory_back();
  // Maps it where it was.
  void map();
  // Submits what brings the contents back, in allocation order, and returns the events behind it; null
  // when there is nothing to bring back. With `is_fine`, parts of it can be waited for. Contents on a disk
  // are read meanwhile, which holds the caller. Throws kDisk.
  std::shared_ptr<const Marks> submit(bool is_fine, const Interrupt& interrupt);
  // Compares what has been brought back with its digests, and waits for that. Throws kCorrupted.
  void verify(const Interrupt& interrupt);

  // The same in steps, for a swap: start(), then advance() until there is nothing left, then finish().
  void start(bool is_fine, const Interrupt& interrupt);
  enum class Step { kDone, kNoMemory, kMoved };
  // Memory of that size that somebody has no use for any more; null when there is none.
  using Spare = std::function<std::unique_ptr<Physical>(const Device&, std::size_t)>;
  // The next segment in allocation order: takes its memory, spare one before the device's, maps it and
  // submits its copies. kNoMemory: the device has too little for it now, and nothing was taken.
  Step advance(const Spare& spare);
  std::shared_ptr<const Marks> finish();
  double seconds_taking() const { return taking_; }
  double seconds_mapping() const { return mapping_; }
  double seconds_submitting() const { return submitting_; }

  // The pool is active.
  void commit() noexcept;

  Pool::Claim& claim() const { return claim_; }
  std::size_t bytes_copied() const { return bytes_copied_; }
  std::size_t bytes_mapped() const { return bytes_mapped_; }

 private:
  struct Staged;
  static bool is_lacking(const Staged& staged);
  void take(Staged& staged);
  static void map(Staged& staged);
  bool begin(bool is_fine);
  void bring_back(const Staged& staged);
  void read_back(std::size_t first, std::size_t last);
  void bring_part(const DiskLoad::Part& part, const char* from);
  std::size_t bytes_to_bring_back() const;
  void copy_back(const Segment& segment, CUstream stream);
  void copy_run(const Segment& segment, const Piece& run, CUstream stream);

  Pool::Claim& claim_;
  std::vector<std::unique_ptr<Staged>> staged_;
  std::size_t next_ = 0;  // of staged_, for advance()
  double taking_ = 0, mapping_ = 0, submitting_ = 0;
  bool is_zeroed_ = false;
  bool is_running_ = false;
  Interrupt interrupt_;
  std::unique_ptr<Marker> marker_;  // while there is something to bring back
  std::size_t bytes_copied_ = 0;
  std::size_t bytes_mapped_ = 0;
};

}  // namespace fencepool
