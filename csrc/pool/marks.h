// How far a restore has come: events between its copies, found by the memory that they bring back.
#pragma once

#include <memory>
#include <vector>

#include "owners/event.h"
#include "owners/stream.h"

namespace fencepool {

struct Run {
  CUdeviceptr address;
  std::size_t size;  // bytes
};

// The events of one pool's restore. Immutable and thread-safe.
class Marks {
 public:
  // The event behind the last copy to any of the runs; null when nothing was copied there. One is enough,
  // since the copies go one after the other on one stream.
  std::shared_ptr<Event> after(const std::vector<Run>& runs) const;
  // The event behind everything.
  const std::shared_ptr<Event>& last() const { return events_.back(); }

 private:
  friend class Marker;
  struct Stretch {
    CUdeviceptr begin, end;
    std::size_t event;  // index of the first event behind it
  };
  std::vector<Stretch> stretches_;  // by address; they do not overlap
  std::vector<std::shared_ptr<Event>> events_;
};

// Records them while copies are submitted. Needs a Device::Scope.
class Marker {
 public:
  static constexpr std::size_t kEvery = std::size_t{64} << 20;  // bytes of copies, at the most, to an event
  // About how many events a restore has at the most, beside one for every kEvery: where a pool has more
  // segments than that, several share one.
  static constexpr std::size_t kMost = 1024;

  // `bytes` are to be brought back on `stream`. Unless `is_fine`, one event stands for all of them.
  Marker(Stream& stream, std::size_t bytes, bool is_fine);

  // How many bytes may be copied before the next event.
  std::size_t room() const { return is_fine_ ? kEvery - unmarked_ : ~std::size_t{0}; }
  // That run's copy, or what fills it, has just been submitted.
  void add(CUdeviceptr address, std::size_t size);
  void end_segment();
  // Records the event behind everything. Nothing is added afterwards.
  std::shared_ptr<const Marks> finish();

 private:
  void record();

  Stream& stream_;
  const bool is_fine_;
  const std::size_t least_;  // bytes between the ends of segments that are marked
  std::shared_ptr<Marks> marks_;
  std::size_t unmarked_ = 0;  // bytes since the last event
};

}  // namespace fencepool
