#include "base/clock.h"
#include "base/problems.h"
#include "pool/claims.h"
#include "pool/copy_out.h"
#include "pool/quiesce.h"

namespace fencepool {
namespace {

constexpr const char* kUnchanged = "Nothing was changed; pause again";
constexpr const char* kHostIsFull =
    "Nothing was changed. Free host memory, raise the container's limit, or use a pool with backup=\"none\"";

// Adds the pool at work to whatever `work` fails with.
template <class Work>
auto explained(const Pool::Claim& claim, std::size_t bytes, Work work) {
  try {
    return work();
  } catch (Error& error) {
    claim.pool().explain(error, bytes, error.kind == Kind::kHostMemory ? kHostIsFull : kUnchanged);
    throw;
  }
}

std::size_t bytes_of(const Pool::Claim& claim) {
  std::size_t bytes = 0;
  for (const Segment* segment : claim.segments()) bytes += segment->range.size();
  return bytes;
}

struct CopySeconds {
  double provision = 0;
  double copy = 0;
};

// Brings the contents of every pool with a backup there. When that fails, host memory that such a pool
// would not have kept between cycles is given back too.
CopySeconds copy_out(Claims& claims) {
  Stopwatch watch;
  CopySeconds seconds;
  try {
    std::vector<std::unique_ptr<CopyOut>> copies;
    for (const auto& claim : claims) {
      // A paused pool gets here only to give up memory it still holds: its contents are backed up.
      if (claim->policy().backup != Backup::kHost || claim->state() == State::kPaused) continue;
      explained(*claim, bytes_of(*claim), [&] {
        const Device::Scope scope(claim->device());
        copies.push_back(std::make_unique<CopyOut>(*claim));
        copies.back()->start();
      });
    }
    for (const auto& copy : copies) {
      explained(copy->claim(), copy->bytes(), [&] {
        const Device::Scope scope(copy->claim().device());
        copy->finish();
      });
      seconds.provision += copy->seconds_waited();
      claims.report_of(copy->claim()).bytes_copied = copy->bytes();
    }
  } catch (const std::exception&) {
    for (const auto& claim : claims) {
      if (!claim->policy().is_retained && claim->state() == State::kActive) claim->buffer().clear();
    }
    throw;
  }
  seconds.copy = watch.lap() - seconds.provision;
  return seconds;
}

// Maps again what was unmapped; the physical memory was kept, contents and all. A pool for which that
// fails counts as paused, its contents in the memory it keeps: resume() carries on there.
void map_again(Claims& claims, Error& error) noexcept {
  for (const auto& claim : claims) {
    if (claim->state() == State::kPaused) continue;  // it was paused before
    try {
      for (Segment* segment : claim->segments()) {
        if (segment->mapping != nullptr) continue;
        segment->mapping = std::make_unique<Mapping>(segment->range, *segment->physical);
      }
    } catch (const std::exception& second) {
      claim->set_state(State::kPaused);
      problems::record({claim->pool().tag(), ": is paused after a failed pause: ", second.what()});
      try {
        for (Segment* segment : claim->segments()) segment->has_contents_kept = segment->physical != nullptr;
        error.add_note("while undoing: " + std::string(second.what()) + "; " + claim->pool().describe() +
                       " is paused now, its contents still in device memory; resume() brings it back");
      } catch (const std::exception&) {
        problems::record({claim->pool().tag(), ": no memory to say so in the error"});
      }
    }
  }
}

void unmap_all(Claims& claims) {
  for (const auto& claim : claims) {
    for (Segment* segment : claim->segments()) {
      if (segment->mapping == nullptr) continue;
      if (const CUresult status = segment->mapping->unmap(); status != CUDA_SUCCESS) {
        Error error = claim->device().driver().failure(Call::cuMemUnmap, status);
        claim->pool().explain(error, segment->range.size(), kUnchanged);
        map_again(claims, error);
        throw error;
      }
      segment->mapping.reset();
    }
  }
}

// Gives all physical memory back. What the driver refuses twice stays with its segment, for the next
// pause or resume. When it refuses the very first, everything is mapped again and the error thrown;
// after the first success nothing is thrown any more.
void release_all(Claims& claims, TransitionReport& report) {
  bool is_any_released = false;
  for (const auto& claim : claims) {
    PoolTransition& transition = claims.report_of(*claim);
    for (Segment* segment : claim->segments()) {
      if (segment->physical == nullptr) continue;
      const std::size_t size = segment->physical->size();
      CUresult status = segment->physical->release();
      if (status != CUDA_SUCCESS) status = segment->physical->release();
      if (status == CUDA_SUCCESS) {
        segment->physical.reset();
        segment->has_contents_kept = false;
        is_any_released = true;
        transition.bytes += size;
        continue;
      }
      if (!is_any_released) {
        Error error = claim->device().driver().failure(Call::cuMemRelease, status);
        claim->pool().explain(error, size, kUnchanged);
        map_again(claims, error);
        throw error;
      }
      segment->has_contents_kept = true;
      report.unreleased_bytes += size;
      problems::record({claim->pool().tag(), ": cuMemRelease was refused twice; the memory stays held for now"});
    }
  }
}

}  // namespace

TransitionReport pause(std::vector<std::shared_ptr<Pool>> pools, const PauseOptions& options) {
  process::require_owner();
  TransitionReport report;
  Stopwatch watch;
  Claims claims(std::move(pools), State::kPaused, "pausing", options.interrupt, report);
  if (claims.is_empty()) {
    report.seconds = {{"total", watch.total()}};
    return report;
  }
  claims.require_no_capture(options.streams, "pause");
  claims.note_memory_before();
  watch.lap();
  quiesce(claims.devices(), options.timeout, options.interrupt);
  for (const auto& claim : claims) claim->reap_idle();
  const double quiesced = watch.lap();
  const CopySeconds copied = copy_out(claims);
  watch.lap();

  // From here on everything that can fail otherwise than by a driver call is ready beforehand.
  const Scopes scopes(claims.devices());
  report.seconds = {{"quiesce", quiesced}, {"provision", copied.provision}, {"copy", copied.copy},
                    {"unmap", 0.0},        {"release", 0.0},                {"total", 0.0}};
  std::vector<Phases> own(static_cast<std::size_t>(claims.end() - claims.begin()), report.seconds);

  unmap_all(claims);
  const double unmapped = watch.lap();
  release_all(claims, report);
  const double released = watch.lap();
  for (const auto& claim : claims) claim->set_state(State::kPaused);

  claims.note_memory_after();
  const double total = watch.total();
  const auto complete = [&](Phases& seconds) {
    seconds[3].second = unmapped;
    seconds[4].second = released;
    seconds[5].second = total;
  };
  complete(report.seconds);
  std::size_t next = 0;
  for (const auto& claim : claims) {
    complete(own[next]);
    claim->set_last_pause(std::move(own[next++]));
  }
  return report;
}

}  // namespace fencepool
