#include <algorithm>
#include <array>

#include "base/clock.h"
#include "base/host_budget.h"
#include "pool/giving_away.h"
#include "pool/outgoing.h"
#include "pool/quiesce.h"
#include "pool/tripwires.h"

namespace fencepool {
namespace {

constexpr const char* kUnchanged = "Nothing was changed; pause again";
constexpr const char* kHostIsFull =
    "Nothing was changed. Free host memory, raise the container's limit, or use a pool with backup=\"none\"";

constexpr const char* kBudgetIsSpent = "Nothing was changed";
constexpr const char* kDiskIsFull =
    "Nothing was changed. Free space there, or use a pool with another directory, then pause again";
constexpr const char* kDiskFailed =
    "Nothing was changed. See to the disk, or use a pool with another directory, then pause again";

const char* advice_for(const Error& error) {
  if (error.kind == Kind::kHostMemory) return kHostIsFull;
  if (error.kind != Kind::kDisk) return kUnchanged;
  return error.wanted > 0 ? kDiskIsFull : kDiskFailed;
}

std::size_t bytes_of(const Pool::Claim& claim) {
  std::size_t bytes = 0;
  for (const Segment* segment : claim.segments()) bytes += segment->range.size();
  return bytes;
}

// Does `work` for each pool's copies, and adds the pool at work to whatever it fails with.
template <class Work>
void for_each(const Copies& copies, Work work) {
  for (const auto& copy : copies) {
    Pool::Claim& claim = copy->claim();
    try {
      const Device::Scope scope(claim.device());
      work(*copy);
    } catch (Error& error) {
      claim.pool().explain(error, bytes_of(claim), advice_for(error));
      throw;
    }
  }
}

// All pools together against the budget, before the first of them takes anything.
void require_budget(const Copies& copies) {
  if (!host_budget::get()) return;
  std::size_t wanted = 0;
  for (const auto& copy : copies) {
    wanted += copy->bytes_missing();
    try {
      host_budget::require(wanted);
    } catch (Error& error) {
      copy->claim().pool().explain(error, 0, kBudgetIsSpent);
      throw;
    }
  }
}

// All pools take what they need of disks before the first of them writes anything. Where a file system sets
// nothing aside, they have to fit into what is free together.
void reserve_disks(const Copies& copies) {
  std::map<std::string, std::size_t> unreserved;  // bytes, by directory
  for_each(copies, [&unreserved](CopyOut& copy) {
    const std::size_t bytes = copy.reserve();
    if (bytes == 0) return;
    std::size_t& all = unreserved[copy.claim().policy().directory];
    copy.require_disk(all += bytes);
  });
}

}  // namespace

Copies start_copies(Claims& claims, const PauseOptions& options) {
  Copies copies;
  for (const auto& claim : claims) {
    // A paused pool gets here only to give up memory it still holds: its contents are backed up.
    if (!claim->keeps_contents() || claim->state() == State::kPaused) continue;
    try {
      const Device::Scope scope(claim->device());
      copies.push_back(std::make_unique<CopyOut>(*claim, options.dead, options.interrupt));
    } catch (Error& error) {
      claim->pool().explain(error, bytes_of(*claim), advice_for(error));
      throw;
    }
  }
  require_budget(copies);
  reserve_disks(copies);
  // Copies to a disk hold the host: the others run meanwhile.
  for (const bool is_on_disk : {false, true}) {
    for_each(copies, [&](CopyOut& copy) {
      if (copy.claim().is_on_disk() == is_on_disk) copy.start(options.interrupt);
    });
  }
  for (const auto& copy : copies) {
    copy->keep(options.interrupt);
    claims.report_of(copy->claim()).bytes_copied = copy->bytes();
  }
  return copies;
}

KeptBackups::KeptBackups(Claims& claims) : claims_(claims) {
  for (const auto& claim : claims) chunks_.push_back(claim->buffer().chunk_count());
}

void KeptBackups::restore() noexcept {
  std::size_t next = 0;
  for (const auto& claim : claims_) {
    const std::size_t chunks = chunks_[next++];
    if (!claim->policy().is_retained && claim->state() == State::kActive) {
      claim->set_stored(false);
      claim->buffer().truncate(chunks);
    }
  }
}

Phases PauseSeconds::phases() const {
  return {{"quiesce", quiesce}, {"digest", digest},   {"provision", provision}, {"copy", copy},
          {"unmap", unmap},     {"release", release}, {"total", total}};
}

PauseRecords::PauseRecords(Claims& claims)
    : claims_(claims),
      whole_(PauseSeconds{}.phases()),
      own_(static_cast<std::size_t>(claims.end() - claims.begin()), whole_) {}

void PauseRecords::complete(const PauseSeconds& seconds, TransitionReport& report) noexcept {
  const std::array<double, 7> values{seconds.quiesce, seconds.digest,  seconds.provision, seconds.copy,
                                     seconds.unmap,   seconds.release, seconds.total};
  const auto fill = [&values](Phases& phases) {
    for (std::size_t i = 0; i < values.size(); ++i) phases[i].second = values.at(i);
  };
  std::size_t next = 0;
  for (const auto& claim : claims_) {
    fill(own_[next]);
    claim->set_last_pause(std::move(own_[next++]));
  }
  fill(whole_);
  report.seconds = std::move(whole_);
}

void settle_work(Claims& claims, const PauseOptions& options) {
  for (const auto& claim : claims) claim->set_freed_aside();
  quiesce(claims.devices(), options.timeout, options.interrupt);
  for (const auto& claim : claims) {
    claim->reap_aside();
    claim->buffer().set_settled();
    if (claim->state() == State::kPaused) continue;  // decided when it was paused
    claim->set_discarded(options.discarded.count(claim->pool().id()) != 0);
    if (!claim->keeps_contents()) claim->set_image({});
  }
}

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
  PauseSeconds seconds;
  settle_work(claims, options);
  seconds.quiesce = watch.lap();
  PauseRecords records(claims);

  KeptBackups backups(claims);
  GivingAway giving_away(claims, report);
  try {
    const Copies copies = start_copies(claims, options);
    for (const auto& copy : copies) {
      seconds.digest += copy->seconds_digesting();
      seconds.provision += copy->seconds_waited();
    }
    giving_away.run(copies, options.interrupt);
    for (const auto& copy : copies) copy->commit();
  } catch (const std::exception&) {
    backups.restore();
    throw;
  }
  // Nothing can fail from here on.
  for (const auto& claim : claims) claim->set_state(State::kPaused);
  seconds.unmap = giving_away.seconds_unmapping();
  seconds.release = giving_away.seconds_releasing();
  seconds.copy = watch.lap() - seconds.digest - seconds.provision - seconds.unmap - seconds.release;
  tripwires::lay(claims);
  claims.note_memory_after();
  seconds.total = watch.total();
  records.complete(seconds, report);
  return report;
}

}  // namespace fencepool
