#include "base/clock.h"
#include "base/naps.h"
#include "base/problems.h"
#include "pool/incoming.h"
#include "pool/stand_ins.h"
#include "pool/tripwires.h"

namespace fencepool {
namespace {

constexpr const char* kNotHandedOut =
    "Nothing was handed out, and everything is still paused. resume(verify=False) brings back what there is; "
    "load the contents anew after that";
constexpr const char* kUnread = "Everything is still paused; resume again when the file can be read";
constexpr const char* kStillPaused = "Everything is still paused and its contents are safe; resume again";

// Does `work` for each pool, and adds the pool at work to whatever it fails with.
template <class Work>
void for_each(Restores& restores, Work work) {
  for (const auto& restore : restores) {
    try {
      work(*restore);
    } catch (Error& error) {
      const char* advice = error.kind == Kind::kCorrupted ? kNotHandedOut
                           : error.kind == Kind::kDisk    ? kUnread
                                                          : kStillPaused;
      restore->claim().pool().explain(error, restore->bytes_wanted(), advice);
      throw;
    }
  }
}

std::size_t bytes_wanted_on(const Restores& restores, const Device& device) {
  std::size_t bytes = 0;
  for (const auto& restore : restores) {
    if (&restore->claim().device() == &device) bytes += restore->bytes_wanted();
  }
  return bytes;
}

// Takes the memory of all pools or of none. While memory is short and time is left, everything is
// given back before the next try, so that two processes that resume cannot starve each other.
void take_all_memory(Restores& restores, double wait, const Interrupt& interrupt) {
  for (Naps naps(wait);; naps.take(interrupt)) {
    const Restore* at_work = nullptr;
    try {
      for (const auto& restore : restores) {
        at_work = restore.get();
        restore->take_memory();
      }
      return;
    } catch (Error& error) {
      for (const auto& restore : restores) restore->give_memory_back();
      if (error.kind != Kind::kOutOfMemory || naps.is_over()) {
        const Pool::Claim& claim = at_work->claim();
        const std::string advice =
            wait > 0 ? "Gave up after " + std::to_string(wait) + " seconds. " + kStillPaused +
                           " when memory is free"
                     : std::string(kStillPaused) + " when memory is free, or with wait=seconds";
        claim.pool().explain(error, bytes_wanted_on(restores, claim.device()), advice.c_str());
        throw;
      }
    }
  }
}

// The events behind each restore. What comes from a disk holds the host: everything else is under way by
// then.
std::vector<std::shared_ptr<const Marks>> submit(Restores& restores, bool is_fine, const Interrupt& interrupt,
                                                 TransitionReport& report) {
  std::vector<std::shared_ptr<const Marks>> marks(restores.size());
  for (const bool is_on_disk : {false, true}) {
    auto mark = marks.begin();
    for_each(restores, [&](Restore& restore) {
      if (restore.claim().is_on_disk() == is_on_disk) *mark = restore.submit(is_fine, interrupt);
      ++mark;
    });
  }
  for (const auto& restore : restores) {
    if (restore->claim().is_on_disk()) report.is_host_held = true;
  }
  return marks;
}

// With retain=False the host memory goes back within the call: only after the restore has read it. The
// resume itself has happened, so a failure here keeps the backup and is noted.
void give_backups_back(Restores& restores, TransitionReport& report) noexcept {
  for (const auto& restore : restores) {
    Pool::Claim& claim = restore->claim();
    if (claim.policy().backup == Backup::kNone || claim.policy().is_retained) continue;
    try {
      static_cast<void>(claim.restore()->synchronize(-1, {}));
      claim.settle();
      claim.set_image({});
      claim.clear_backup();
    } catch (const std::exception& error) {
      note(report, {claim.pool().tag(), ": its backup is kept for now: ", error.what()});
    }
  }
}

// Of this resume's restores and of those still under way in pools that were active already.
std::shared_ptr<Fence> whole_fence(const Claims& claims, std::vector<std::shared_ptr<const Marks>> marks) {
  std::vector<Device*> devices = claims.devices();
  for (const auto& fence : claims.restores()) {
    for (const auto& one : fence->marks()) {
      marks.push_back(one);
      add_once(devices, one->last()->device());
    }
  }
  return std::make_shared<Fence>(std::move(devices), std::move(marks));
}

}  // namespace

void order(const Fence& fence, const ResumeOptions& options, TransitionReport& report, const char* doing) {
  if (options.order == Order::kContext) {
    // Looked for at the very last: one that has begun meanwhile would be broken by this.
    require_no_capture(fence.devices_at_work(), options.streams, doing);
    if (fence.order_contexts(options.interrupt)) report.is_host_held = true;
  }
  if (!options.is_host_held) return;
  for (const auto& event : fence.events()) {
    if (!event->device().is_host()) continue;
    const Device::Scope scope(event->device());
    static_cast<void>(wait_for(*event, -1, options.interrupt));
    report.is_host_held = true;
  }
}

RestoreFences fences_of(const Claims& claims, const Restores& restores,
                        const std::vector<std::shared_ptr<const Marks>>& marks) {
  RestoreFences fences;
  std::vector<std::shared_ptr<const Marks>> all;
  for (std::size_t i = 0; i < restores.size(); ++i) {
    std::vector<std::shared_ptr<const Marks>> own;
    if (marks[i] != nullptr) own.push_back(marks[i]);
    all.insert(all.end(), own.begin(), own.end());
    fences.own.push_back(
        std::make_shared<Fence>(std::vector<Device*>{&restores[i]->claim().device()}, std::move(own)));
  }
  fences.whole = whole_fence(claims, std::move(all));
  return fences;
}

void commit(Restores& restores, RestoreFences& fences, bool is_ordered, TransitionReport& report) noexcept {
  for (std::size_t i = 0; i < restores.size(); ++i) {
    restores[i]->claim().set_restore(std::move(fences.own[i]), is_ordered);
    restores[i]->commit();
  }
  give_backups_back(restores, report);
}

void complete(Claims& claims, Restores& restores, std::vector<Phases>& own, double total,
              TransitionReport& report) noexcept {
  report.seconds.back().second = total;
  for (std::size_t i = 0; i < restores.size(); ++i) {
    PoolTransition& transition = claims.report_of(restores[i]->claim());
    transition.bytes = restores[i]->bytes_mapped();
    transition.bytes_copied = restores[i]->bytes_copied();
    own[i].back().second = total;
    restores[i]->claim().set_last_resume(std::move(own[i]));
  }
}

TransitionReport resume(std::vector<std::shared_ptr<Pool>> pools, const ResumeOptions& options) {
  process::require_owner();
  TransitionReport report;
  Stopwatch watch;
  Claims claims(std::move(pools), State::kActive, "resuming", options.interrupt, report);
  if (claims.is_empty()) {
    report.fence = whole_fence(claims, {});
    order(*report.fence, options, report);
    report.seconds = {{"total", watch.total()}};
    return report;
  }
  claims.require_no_capture(options.streams, "resume");
  claims.note_memory_before();
  watch.lap();

  Restores restores;
  for (const auto& claim : claims) restores.push_back(std::make_unique<Restore>(*claim));
  take_all_memory(restores, options.wait, options.interrupt);
  const double created = watch.lap();
  claims.require_no_capture(options.streams, "resume");  // that may have taken a while
  const bool is_quiesced = quiesce_stand_ins(claims, options.interrupt);
  tripwires::look(claims, report, options.interrupt);
  const double quiesced = watch.lap();
  for_each(restores, [](Restore& restore) { restore.map(); });
  const double mapped = watch.lap();
  const bool is_ordered = options.order == Order::kContext;
  std::vector<std::shared_ptr<const Marks>> marks = submit(restores, !is_ordered, options.interrupt, report);
  if (options.is_verified) {
    for_each(restores, [&](Restore& restore) { restore.verify(options.interrupt); });
  }
  const double submitted = watch.lap();
  RestoreFences fences = fences_of(claims, restores, marks);
  report.fence = fences.whole;
  try {
    order(*report.fence, options, report);
  } catch (Error& error) {
    restores.front()->claim().pool().explain(error, 0, kStillPaused);
    throw;
  }
  // Ready beforehand, so that nothing can fail once the first pool is active.
  report.seconds = {
      {"create", created}, {"map", mapped}, {"copy", submitted}, {"fence", watch.lap()}, {"total", 0}};
  if (is_quiesced) report.seconds.insert(report.seconds.begin() + 1, {"quiesce", quiesced});
  std::vector<Phases> own(restores.size(), report.seconds);
  commit(restores, fences, is_ordered, report);
  claims.note_memory_after();
  complete(claims, restores, own, watch.total(), report);
  return report;
}

}  // namespace fencepool
