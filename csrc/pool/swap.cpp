// Two sets of pools changing places: one is paused while the other one is resumed.
#include <algorithm>

#include "base/clock.h"
#include "base/naps.h"
#include "base/problems.h"
#include "pool/giving_away.h"
#include "pool/incoming.h"
#include "pool/outgoing.h"
#include "pool/stand_ins.h"
#include "pool/tripwires.h"

namespace fencepool {
namespace {

constexpr const char* kUnchanged = "Both sides are as they were; swap again";
// For which the driver's scrubbing of released memory holds up copies into the device: 4 ms a GiB of it.
constexpr double kScrubbing = 4e-3 / (std::size_t{1} << 30);  // seconds a byte

using Pools = std::vector<std::shared_ptr<Pool>>;

// Claims both sides in the order of ids over all of them.
void claim(Claims& out, Claims& in, const Pools& out_pools, const Pools& in_pools,
           const Interrupt& interrupt) {
  std::map<std::uint64_t, std::pair<std::shared_ptr<Pool>, bool>> all;  // by id; whether it is to be paused
  for (const auto& pool : out_pools) all.emplace(pool->id(), std::pair(pool, true));
  for (const auto& pool : in_pools) {
    const auto [entry, is_new] = all.emplace(pool->id(), std::pair(pool, false));
    if (!is_new && entry->second.second) {
      Error error(Kind::kInvalid, pool->describe() + " is to be paused and resumed at once");
      error.pool = pool->tag();
      throw error;
    }
  }
  for (const auto& [id, entry] : all) {
    if (entry.second) {
      out.add(entry.first, State::kPaused, "pausing", interrupt);
    } else {
      in.add(entry.first, State::kActive, "resuming", interrupt);
    }
  }
}

std::vector<Device*> devices_of(const Claims& out, const Claims& in) {
  std::vector<Device*> devices = out.devices();
  for (Device* device : in.devices()) add_once(devices, *device);
  return devices;
}

// The side that takes memory.
class Arrivals {
 public:
  Arrivals(Claims& claims, bool is_fine) : claims_(claims), is_fine_(is_fine) {
    for (const auto& claim : claims) restores_.push_back(std::make_unique<Restore>(*claim));
  }

  // Throws kOutOfMemory when the memory free on some device, and what `coming` says will be, is too little.
  template <class Coming>
  void require_memory(Coming coming) const {
    for (Device* device : claims_.devices()) {
      std::size_t wanted = 0;
      const Restore* first = nullptr;
      for (const auto& restore : restores_) {
        if (&restore->claim().device() != device || restore->bytes_missing() == 0) continue;
        wanted += restore->bytes_missing();
        if (first == nullptr) first = restore.get();
      }
      if (first == nullptr) continue;
      const Device::Scope scope(*device);
      const std::size_t there = device->memory().free + coming(*device);
      if (wanted <= there) continue;
      Error error(Kind::kOutOfMemory, "the other side gives " + format_bytes(coming(*device)) +
                                          " back, which together with what is free is too little");
      error.wanted = wanted;
      first->claim().pool().explain(error, wanted, kUnchanged);
      throw error;
    }
  }

  void start(const Interrupt& interrupt) {
    for_each([&](Restore& restore) { restore.start(is_fine_, interrupt); });
  }

  // As far as there is memory now, spare memory before the device's. Whether everything has been submitted.
  bool advance(const Restore::Spare& spare = {}) {
    bool is_complete = true;
    for_each([&](Restore& restore) {
      Restore::Step step = Restore::Step::kMoved;
      while (step == Restore::Step::kMoved) step = restore.advance(spare);
      is_complete = is_complete && step == Restore::Step::kDone;
    });
    return is_complete;
  }

  // The same, and throws kOutOfMemory where that is not far enough.
  void advance_to_the_end() {
    if (advance()) return;
    for_each([](Restore& restore) { restore.take_memory(); });
    static_cast<void>(advance());
  }

  // Waits so many seconds for the copies in to end.
  void settle(double seconds, const Interrupt& interrupt) {
    const double deadline = now_seconds() + seconds;
    std::size_t at = 0;
    for_each([&](Restore&) {
      static_cast<void>(fences_.own[at++]->synchronize(std::max(0.0, deadline - now_seconds()), interrupt));
    });
  }

  // The fences, and everything later behind them.
  void order(const ResumeOptions& options, TransitionReport& report) {
    std::vector<std::shared_ptr<const Marks>> marks;
    for_each([&marks](Restore& restore) { marks.push_back(restore.finish()); });
    Stopwatch watch;
    fences_ = fences_of(claims_, restores_, marks);
    report.fence = fences_.whole;
    fencepool::order(*report.fence, options, report, "a swap");
    fencing_ = watch.lap();
    for (const auto& restore : restores_) {
      if (restore->claim().is_on_disk()) report.is_host_held = true;
    }
    // Ready beforehand, so that nothing can fail once the first pool is active.
    double taking = 0;
    double mapping = 0;
    double submitting = 0;
    for (const auto& restore : restores_) {
      taking += restore->seconds_taking();
      mapping += restore->seconds_mapping();
      submitting += restore->seconds_submitting();
    }
    report.seconds = {
        {"create", taking}, {"map", mapping}, {"copy", submitting}, {"fence", fencing_}, {"total", 0}};
    own_.assign(restores_.size(), report.seconds);
  }

  void commit(TransitionReport& report) noexcept { fencepool::commit(restores_, fences_, !is_fine_, report); }
  void complete(double total, TransitionReport& report) noexcept {
    fencepool::complete(claims_, restores_, own_, total, report);
  }
  // Everything that was taken goes back.
  void undo() noexcept { restores_.clear(); }

 private:
  template <class Work>
  void for_each(Work work) {
    for (const auto& restore : restores_) {
      try {
        work(*restore);
      } catch (Error& error) {
        restore->claim().pool().explain(error, restore->bytes_wanted(), kUnchanged);
        throw;
      }
    }
  }

  Claims& claims_;
  const bool is_fine_;
  Restores restores_;
  RestoreFences fences_;
  double fencing_ = 0;
  std::vector<Phases> own_;
};

// Device memory that pausing these pools will release there.
std::size_t bytes_held_on(Claims& claims, const Device& device) {
  std::size_t bytes = 0;
  for (const auto& claim : claims) {
    if (&claim->device() != &device) continue;
    bytes += memory_behind(claim->segments(), [&claim](const Segment& segment) {
      return claim->state() != State::kPaused || !GivingAway::is_only_copy(*claim, segment);
    });
  }
  return bytes;
}

// After a pause that could not be undone a pool is paused and holds memory that no pause gives up.
void say_what_stays(Claims& out, Error& error) {
  for (const auto& claim : out) {
    if (claim->state() != State::kPaused) continue;
    const std::size_t bytes = memory_behind(claim->segments(), [&claim](const Segment& segment) {
      return GivingAway::is_only_copy(*claim, segment);
    });
    if (bytes == 0) continue;
    error.add_note(claim->pool().describe() + " is paused and holds " + format_bytes(bytes) +
                   " with contents that are nowhere else; resume it, then swap again");
  }
}

// Before anything changes. While memory is short and time is left, another process may give some back.
void await_memory(Claims& out, const Arrivals& arrivals, double wait, const Interrupt& interrupt) {
  for (Naps naps(wait);; naps.take(interrupt)) {
    try {
      arrivals.require_memory([&out](const Device& device) { return bytes_held_on(out, device); });
      return;
    } catch (Error& error) {
      if (error.kind == Kind::kOutOfMemory && !naps.is_over()) continue;
      say_what_stays(out, error);
      throw;
    }
  }
}

// After a failure the pools are as they were, some without what they held: it was nowhere else.
void say_what_is_lost(Claims& out, const GivingAway& giving_away, Error* error) noexcept {
  try {
    for (const auto& claim : out) {
      if (!giving_away.is_dropped(*claim)) continue;
      const bool is_active = claim->state() == State::kActive;
      if (!is_active && !giving_away.was_paused(*claim))
        continue;  // the note on what could not be undone says it
      const std::string note =
          claim->pool().describe() + " was dropped before this failed: its memory " +
          (is_active ? "is back, without its contents, and holds" : "comes back without its contents, with") +
          " what its fill says";
      if (error != nullptr) {
        error->add_note(note);
      } else {
        problems::record({note});
      }
    }
  } catch (const std::exception& second) {
    problems::record({"contents were dropped in a swap that failed, and no note says so: ", second.what()});
  }
}

// Both sides between the work in flight and the point of no return.
class Exchange {
 public:
  Exchange(Claims& out, Arrivals& arrivals, const PauseOptions& options, TransitionReport& paused)
      : out_(out), arrivals_(arrivals), options_(options), backups_(out), giving_away_(out, paused) {}

  void run(const std::vector<Device*>& devices, const ResumeOptions& resume_options,
           const Interrupt& interrupt, TransitionReport& resumed) {
    const Scopes scopes(devices);  // all of them before anything is unmapped
    try {
      move(devices, resume_options, interrupt, resumed);
    } catch (Error& error) {
      undo(&error);
      throw;
    } catch (const std::exception&) {
      undo(nullptr);
      throw;
    }
    for (const auto& copy : copies_) copy->commit();
    copies_.clear();
  }

  void add_seconds(PauseSeconds& seconds) const noexcept {
    seconds.provision += provisioned_;
    seconds.digest += digested_;
    seconds.copy += submitting_ - digested_ - provisioned_ + giving_away_.seconds_waiting();
    seconds.unmap += giving_away_.seconds_unmapping();
    seconds.release += giving_away_.seconds_releasing();
  }

 private:
  void move(const std::vector<Device*>& devices, const ResumeOptions& options, const Interrupt& interrupt,
            TransitionReport& resumed) {
    Stopwatch watch;
    copies_ = start_copies(out_, options_);
    submitting_ = watch.lap();
    for (const auto& copy : copies_) {
      provisioned_ += copy->seconds_waited();
      digested_ += copy->seconds_digesting();
    }
    arrivals_.start(interrupt);
    // The side that takes memory is finished as soon as it can be: what it may fail with comes before what is
    // harder to undo, and before what cannot be undone above all.
    bool is_complete = arrivals_.advance();
    if (is_complete) arrivals_.order(options, resumed);
    // What one side lets go of is handed to the other where the sizes of segments agree. The driver scrubs
    // what is released, which holds up copies into the device: so the rest is released when the copies out
    // have ended, unless the other side needs it before.
    const auto spare = [this](const Device& device, std::size_t size) {
      return giving_away_.hand_over(device, size);
    };
    for (const auto& copy : copies_) {
      for (const CopyOut::Batch& batch : copy->batches()) {
        giving_away_.set_aside(*copy, batch, interrupt);
        if (is_complete) continue;
        is_complete = arrivals_.advance(spare);
        if (!is_complete) {
          giving_away_.release_the_rest();
          is_complete = arrivals_.advance();
        }
        if (is_complete) arrivals_.order(options, resumed);
      }
    }
    if (is_complete) {
      giving_away_.set_aside_without_backup();
      // Copies in that are about to end go first. Nothing is lost where they are not: they would have been
      // held up for as long.
      watch.lap();
      arrivals_.settle(static_cast<double>(giving_away_.bytes_aside()) * kScrubbing, interrupt);
      submitting_ += watch.lap();
      giving_away_.release_the_rest();
      return;
    }
    // What follows cannot be undone: a capture that has begun meanwhile is found before it, not behind it.
    require_no_capture(devices, options.streams, "a swap");
    arrivals_.require_memory(
        [this](const Device& device) { return giving_away_.bytes_without_backup(device); });
    giving_away_.set_aside_without_backup();
    static_cast<void>(arrivals_.advance(spare));
    giving_away_.release_the_rest();
    arrivals_.advance_to_the_end();
    arrivals_.order(options, resumed);
  }

  // Memory that the one side has taken goes back first: the other one needs it.
  void undo(Error* error) noexcept {
    arrivals_.undo();
    giving_away_.take_back(error);
    say_what_is_lost(out_, giving_away_, error);
    copies_.clear();
    backups_.restore();
  }

  Claims& out_;
  Arrivals& arrivals_;
  const PauseOptions& options_;
  KeptBackups backups_;
  GivingAway giving_away_;
  Copies copies_;
  double submitting_ = 0, digested_ = 0, provisioned_ = 0;
};

}  // namespace

SwapReport swap(const Pools& out_pools, const Pools& in_pools, const PauseOptions& pause_options,
                const ResumeOptions& resume_options) {
  process::require_owner();
  SwapReport report;
  Stopwatch watch;
  const Interrupt& interrupt = pause_options.interrupt;
  Claims out(report.paused);
  Claims in(report.resumed);
  claim(out, in, out_pools, in_pools, interrupt);
  const std::vector<Device*> devices = devices_of(out, in);
  require_no_capture(devices, pause_options.streams, "a swap");
  out.note_memory_before();
  in.note_memory_before();
  const bool is_ordered = resume_options.order == Order::kContext;
  Arrivals arrivals(in, !is_ordered);
  await_memory(out, arrivals, resume_options.wait, interrupt);
  require_no_capture(devices, pause_options.streams, "a swap");  // that may have taken a while
  watch.lap();
  PauseSeconds seconds;
  settle_work(out, pause_options);
  static_cast<void>(quiesce_stand_ins(in, interrupt));
  tripwires::look(in, report.resumed, interrupt);
  seconds.quiesce = watch.lap();
  PauseRecords records(out);
  Exchange exchange(out, arrivals, pause_options, report.paused);
  exchange.run(devices, resume_options, interrupt, report.resumed);
  // Nothing can fail from here on.
  for (const auto& claim : out) claim->set_state(State::kPaused);
  arrivals.commit(report.resumed);
  tripwires::lay(out);
  out.note_memory_after();
  in.note_memory_after();
  exchange.add_seconds(seconds);
  seconds.total = watch.total();
  records.complete(seconds, report.paused);
  arrivals.complete(seconds.total, report.resumed);
  return report;
}

}  // namespace fencepool
