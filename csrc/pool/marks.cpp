#include "pool/marks.h"

#include <algorithm>

namespace fencepool {

std::shared_ptr<Event> Marks::after(const std::vector<Run>& runs) const {
  std::size_t latest = 0;
  bool is_any = false;
  for (const Run& run : runs) {
    auto stretch =
        std::upper_bound(stretches_.begin(), stretches_.end(), run.address,
                         [](CUdeviceptr address, const Stretch& one) { return address < one.end; });
    for (; stretch != stretches_.end() && stretch->begin < run.address + run.size; ++stretch) {
      latest = std::max(latest, stretch->event);
      is_any = true;
    }
  }
  return is_any ? events_[latest] : nullptr;
}

Marker::Marker(Stream& stream, std::size_t bytes, bool is_fine)
    : stream_(stream), is_fine_(is_fine), least_(bytes / kMost), marks_(std::make_shared<Marks>()) {}

void Marker::add(CUdeviceptr address, std::size_t size) {
  std::vector<Marks::Stretch>& stretches = marks_->stretches_;
  const std::size_t event = marks_->events_.size();
  if (!stretches.empty() && stretches.back().end == address && stretches.back().event == event) {
    stretches.back().end += size;
  } else {
    stretches.push_back({address, address + size, event});
  }
  unmarked_ += size;
  if (is_fine_ && unmarked_ >= kEvery) record();
}

void Marker::end_segment() {
  if (is_fine_ && unmarked_ > 0 && unmarked_ >= least_) record();
}

std::shared_ptr<const Marks> Marker::finish() {
  // Also behind nothing: whoever waits for the last event waits for the stream.
  if (unmarked_ > 0 || marks_->events_.empty()) record();
  std::sort(marks_->stretches_.begin(), marks_->stretches_.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return marks_;
}

void Marker::record() {
  auto event = std::make_shared<Event>(stream_.device());
  stream_.record(*event);
  marks_->events_.push_back(std::move(event));
  unmarked_ = 0;
}

}  // namespace fencepool
