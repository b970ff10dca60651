#include <algorithm>
#include <array>

#include "base/clock.h"
#include "base/host_budget.h"
#include "pool/claims.h"
#include "pool/copy_out.h"
#include "pool/giving_away.h"
#include "pool/quiesce.h"

namespace fencepool {
namespace {

constexpr const char* kUnchanged = "Nothing was changed; pause again";
constexpr const char* kHostIsFull =
    "Nothing was changed. Free host memory, raise the container's limit, or use a pool with backup=\"none\"";

constexpr const char* kBudgetIsSpent = "Nothing was changed";

using Copies = std::vector<std::unique_ptr<CopyOut>>;

std::size_t bytes_of(const Pool::Claim& claim) {
  std::size_t bytes = 0;
  for (const Segment* segment : claim.segments()) bytes += segment->range.size();
  return bytes;
}

// All pools together against the budget, before the first of them takes anything. What a pool with digests
// needs is known only when they have been taken: it is checked then.
void require_budget(Claims& claims, const PauseOptions& options) {
  if (!host_budget::get()) return;
  std::size_t wanted = 0;
  for (const auto& claim : claims) {
    if (!claim->keeps_contents() || claim->state() == State::kPaused || claim->has_digests()) continue;
    const std::size_t bytes = bytes_of(claim->plan_image(options.dead));
    wanted += bytes - std::min(bytes, claim->buffer().capacity());
    try {
      host_budget::require(wanted);
    } catch (Error& error) {
      claim->pool().explain(error, 0, kBudgetIsSpent);
      throw;
    }
  }
}

// Submits the copies of every pool with a backup. All of them before anything is given away: what can
// fail for want of host memory or in a driver call has not failed then.
Copies start_copies(Claims& claims, const PauseOptions& options) {
  require_budget(claims, options);
  Copies copies;
  for (const auto& claim : claims) {
    // A paused pool gets here only to give up memory it still holds: its contents are backed up.
    if (!claim->keeps_contents() || claim->state() == State::kPaused) continue;
    try {
      const Device::Scope scope(claim->device());
      copies.push_back(std::make_unique<CopyOut>(*claim, options.dead, options.interrupt));
      copies.back()->start(options.interrupt);
    } catch (Error& error) {
      claim->pool().explain(error, bytes_of(*claim),
                            error.kind == Kind::kHostMemory ? kHostIsFull : kUnchanged);
      throw;
    }
  }
  for (const auto& copy : copies) {
    copy->keep(options.interrupt);
    claims.report_of(copy->claim()).bytes_copied = copy->bytes();
  }
  return copies;
}

// How much host memory pools have before the pause that they would not keep after the next resume.
class KeptBackups {
 public:
  explicit KeptBackups(Claims& claims) : claims_(claims) {
    for (const auto& claim : claims) chunks_.push_back(claim->buffer().chunk_count());
  }
  // After a pause that failed: what it added goes back.
  void restore() noexcept {
    std::size_t next = 0;
    for (const auto& claim : claims_) {
      const std::size_t chunks = chunks_[next++];
      if (!claim->policy().is_retained && claim->state() == State::kActive) {
        claim->set_stored(false);
        claim->buffer().truncate(chunks);
      }
    }
  }

 private:
  Claims& claims_;
  std::vector<std::size_t> chunks_;
};

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
  for (const auto& claim : claims) claim->set_freed_aside();
  quiesce(claims.devices(), options.timeout, options.interrupt);
  for (const auto& claim : claims) {
    claim->reap_aside();
    claim->buffer().set_settled();
    if (claim->state() == State::kPaused) continue;  // decided when it was paused
    claim->set_discarded(options.discarded.count(claim->pool().id()) != 0);
    if (!claim->keeps_contents()) claim->set_image({});
  }
  report.seconds = {{"quiesce", watch.lap()}, {"digest", 0}, {"provision", 0}, {"copy", 0}, {"unmap", 0},
                    {"release", 0},           {"total", 0}};
  std::vector<Phases> own(static_cast<std::size_t>(claims.end() - claims.begin()), report.seconds);

  KeptBackups backups(claims);
  GivingAway giving_away(claims, report);
  double digested = 0;
  double provisioned = 0;
  try {
    const Copies copies = start_copies(claims, options);
    for (const auto& copy : copies) {
      provisioned += copy->seconds_waited();
      digested += copy->seconds_digesting();
    }
    giving_away.run(copies, options.interrupt);
    for (const auto& copy : copies) copy->commit();
  } catch (const std::exception&) {
    backups.restore();
    throw;
  }
  // Nothing can fail from here on.
  for (const auto& claim : claims) claim->set_state(State::kPaused);
  const double unmapped = giving_away.seconds_unmapping();
  const double released = giving_away.seconds_releasing();
  const double copied = watch.lap() - digested - provisioned - unmapped - released;
  claims.note_memory_after();
  const std::array<double, 6> rest{digested, provisioned, copied, unmapped, released, watch.total()};
  const auto complete = [&rest](Phases& seconds) {
    for (std::size_t i = 0; i < rest.size(); ++i) seconds[i + 1].second = rest.at(i);
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
