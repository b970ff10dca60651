#include "backup/provision.h"
#include "base/clock.h"
#include "base/problems.h"
#include "pool/claims.h"
#include "pool/quiesce.h"

namespace fencepool {
namespace {

// One pool's copy to its backup. Until it is kept, its death ends the copies and takes the new host
// memory away again.
class CopyOut {
 public:
  explicit CopyOut(Pool::Claim& claim)
      : claim_(claim), image_(claim.plan_image()), provision_(claim.buffer(), Pool::Claim::image_bytes(image_)) {}
  ~CopyOut() {
    if (is_running_ && !drain(claim_)) {
      problems::record(claim_.pool().describe() + ": a copy could not be awaited; its host memory is leaked");
      provision_.leak();
    }
  }
  CopyOut(const CopyOut&) = delete;
  CopyOut& operator=(const CopyOut&) = delete;

  // Submits the copies, each as soon as the host memory it goes to is ready. Needs a Device::Scope.
  void start() {
    const CUstream stream = claim_.stream().get();
    is_running_ = true;
    for (const Segment* segment : claim_.segments()) {
      for (const Pool::Claim::Piece& piece : image_.at(segment->serial)) copy(segment->range.address(), piece, stream);
    }
  }

  void finish() {
    claim_.stream().synchronize();
    is_running_ = false;
    provision_.keep();
    claim_.set_image(std::move(image_));
  }

  double seconds_waited() const { return seconds_waited_; }  // for host memory
  std::size_t bytes() const { return bytes_; }
  Pool::Claim& claim() const { return claim_; }

 private:
  void copy(CUdeviceptr from, const Pool::Claim::Piece& piece, CUstream stream) {
    for (std::size_t done = 0; done < piece.size;) {
      const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
      Stopwatch watch;
      provision_.wait(place.chunk);
      seconds_waited_ += watch.lap();
      claim_.device().driver().check<Call::cuMemcpyDtoHAsync>(static_cast<void*>(place.address),
                                                              from + piece.offset + done, place.size, stream);
      done += place.size;
      bytes_ += place.size;
    }
  }

  Pool::Claim& claim_;
  Pool::Claim::Image image_;
  Provision provision_;
  bool is_running_ = false;
  double seconds_waited_ = 0;
  std::size_t bytes_ = 0;
};

// Maps again what was unmapped; the physical memory was kept, contents and all.
void map_again(Claims& claims, Error& error) noexcept {
  for (const auto& claim : claims) {
    for (Segment* segment : claim->segments()) {
      if (segment->mapping != nullptr) continue;
      try {
        segment->mapping = std::make_unique<Mapping>(segment->range, *segment->physical);
      } catch (const Error& second) {
        // Its memory is kept: the pool counts as paused, and resume() maps it again.
        claim->set_state(State::kPaused);
        error.add_note("while undoing: " + second.message + "; " + claim->pool().describe() +
                       " is paused now, its contents still in device memory; resume() brings it back");
      }
    }
  }
}

void unmap_all(Claims& claims) {
  for (const auto& claim : claims) {
    const Device::Scope scope(claim->device());
    for (Segment* segment : claim->segments()) {
      if (segment->mapping == nullptr) continue;
      if (const CUresult status = segment->mapping->unmap(); status != CUDA_SUCCESS) {
        Error error = claim->device().driver().failure(Call::cuMemUnmap, status);
        claim->pool().explain(error, segment->range.size(), "Nothing was changed; pause again");
        map_again(claims, error);
        throw error;
      }
      segment->mapping.reset();
    }
  }
}

// Gives all physical memory back. What the driver refuses twice stays with its segment, for the next
// resume; when it refuses the very first, everything is mapped again and the error thrown.
void release_all(Claims& claims, TransitionReport& report) {
  bool is_any_released = false;
  for (const auto& claim : claims) {
    const Device::Scope scope(claim->device());
    PoolTransition& transition = claims.report_of(*claim);
    for (Segment* segment : claim->segments()) {
      if (segment->physical == nullptr) continue;
      const std::size_t size = segment->physical->size();
      CUresult status = segment->physical->release();
      if (status != CUDA_SUCCESS) status = segment->physical->release();
      if (status == CUDA_SUCCESS) {
        segment->physical.reset();
        is_any_released = true;
        transition.bytes += size;
        continue;
      }
      Error error = claim->device().driver().failure(Call::cuMemRelease, status);
      if (!is_any_released) {
        claim->pool().explain(error, size, "Nothing was changed; pause again");
        map_again(claims, error);
        throw error;
      }
      report.unreleased_bytes += size;
      report.notes.push_back(claim->pool().describe() + ": " + error.message + "; " + format_bytes(size) +
                             " stay held until the next resume");
    }
  }
}

}  // namespace

TransitionReport pause(std::vector<std::shared_ptr<Pool>> pools, const PauseOptions& options) {
  process::require_owner();
  TransitionReport report;
  Stopwatch watch;
  Claims claims(std::move(pools), State::kPaused, "pausing", report);
  if (claims.is_empty()) {
    report.seconds = {{"total", watch.total()}};
    return report;
  }
  claims.require_no_capture(options.streams, "pause");
  claims.note_memory_before();
  watch.lap();
  quiesce(claims.devices(), options.timeout, options.interrupt);
  for (const auto& claim : claims) {
    const Device::Scope scope(claim->device());
    claim->reap_idle();
  }
  const double quiesced = watch.lap();

  double provisioned = 0;
  {
    std::vector<std::unique_ptr<CopyOut>> copies;
    try {
      for (const auto& claim : claims) {
        if (claim->policy().backup != Backup::kHost) continue;
        const Device::Scope scope(claim->device());
        copies.push_back(std::make_unique<CopyOut>(*claim));
        copies.back()->start();
      }
      for (const auto& copy : copies) {
        const Device::Scope scope(copy->claim().device());
        copy->finish();
        provisioned += copy->seconds_waited();
        claims.report_of(copy->claim()).bytes_copied = copy->bytes();
      }
    } catch (Error& error) {
      if (error.kind == Kind::kDriver) error.message += ". Nothing was changed; pause again";
      throw;
    }
  }
  const double copied = watch.lap();
  unmap_all(claims);
  const double unmapped = watch.lap();
  release_all(claims, report);
  const double released = watch.lap();
  claims.note_memory_after();

  report.seconds = {{"quiesce", quiesced},   {"provision", provisioned}, {"copy", copied - provisioned},
                    {"unmap", unmapped},     {"release", released},      {"total", watch.total()}};
  for (const auto& claim : claims) {
    claim->set_state(State::kPaused);
    claim->set_last_pause(report.seconds);
  }
  return report;
}

}  // namespace fencepool
