// The events between a restore's copies: how many there are, and which one a tensor waits for.
#include <doctest/doctest.h>

#include "pool/marks.h"
#include "support.h"

namespace fencepool::testing {
namespace {

constexpr std::size_t kSmall = std::size_t{1} << 21;

TEST_CASE("a pool of very many segments has a bounded number of events") {
  const Device::Scope scope(device());
  Stream stream(device());
  constexpr std::size_t kSegments = 10'000;
  const std::size_t events = host_driver::counts().events;
  Marker marker(stream, kSegments * kSmall, true);
  for (std::size_t i = 0; i < kSegments; ++i) {
    marker.add(CUdeviceptr{i * 2 * kSmall}, kSmall);  // no two of them adjoin
    marker.end_segment();
  }
  const auto marks = marker.finish();
  const std::size_t made = host_driver::counts().events - events;
  CHECK(made <= Marker::kMost + kSegments * kSmall / Marker::kEvery + 1);
  CHECK(made >= Marker::kMost / 2);
  CHECK((marks->after({{(kSegments - 1) * 2 * kSmall, 1}}) == marks->last()));
  CHECK((marks->after({{0, 1}}) != marks->last()));
  CHECK((marks->after({{kSmall, kSmall}}) == nullptr));  // a gap
  // Of several runs it is the one that comes last, in whatever order they are named.
  CHECK((marks->after({{(kSegments - 1) * 2 * kSmall, 1}, {0, 1}}) == marks->last()));
}

TEST_CASE("addresses that do not rise with the order of copying are found") {
  const Device::Scope scope(device());
  Stream stream(device());
  Marker marker(stream, 3 * kSmall, true);
  for (const CUdeviceptr at : {30 * kSmall, 10 * kSmall, 20 * kSmall}) {
    marker.add(at, kSmall);
    marker.end_segment();
  }
  const auto marks = marker.finish();
  CHECK((marks->after({{20 * kSmall + kSmall - 1, 1}}) == marks->last()));
  CHECK((marks->after({{20 * kSmall + kSmall, kSmall}}) == nullptr));
  CHECK((marks->after({{30 * kSmall, kSmall}}) != marks->after({{10 * kSmall, kSmall}})));
  CHECK((marks->after({{0, 100 * kSmall}}) == marks->last()));
  CHECK((marks->after({}) == nullptr));
}

TEST_CASE("a coarse restore has one event, also behind nothing") {
  const Device::Scope scope(device());
  Stream stream(device());
  for (const bool is_empty : {false, true}) {
    const std::size_t events = host_driver::counts().events;
    Marker marker(stream, 4 * Marker::kEvery, false);
    for (std::size_t i = 0; i < (is_empty ? 0 : 4); ++i) {
      marker.add(CUdeviceptr{kSmall + i * Marker::kEvery}, Marker::kEvery);
      marker.end_segment();
    }
    const auto marks = marker.finish();
    CHECK(host_driver::counts().events - events == 1);
    CHECK((marks->after({{kSmall, 1}}) == marks->last()) != is_empty);
  }
}

}  // namespace
}  // namespace fencepool::testing
