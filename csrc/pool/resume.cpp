#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/problems.h"
#include "pool/claims.h"

namespace fencepool {
namespace {

// What one segment is about to get. Dies in reverse order: unmapped, then given back.
struct Staged {
  explicit Staged(Segment& target) : segment(target) {}
  const Physical& memory() const { return physical != nullptr ? *physical : *segment.physical; }

  Segment& segment;
  std::unique_ptr<Physical> physical;  // null: the segment kept its own
  std::unique_ptr<Mapping> mapping;    // null: the segment kept its own
};

// One pool's way back. Until it is committed, its death ends the copies and undoes the rest.
class Restore {
 public:
  explicit Restore(Pool::Claim& claim) : claim_(claim) {
    for (Segment* segment : claim.segments()) staged_.push_back(std::make_unique<Staged>(*segment));
  }
  ~Restore() { abandon(); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  std::size_t bytes_wanted() const {
    std::size_t bytes = 0;
    for (const auto& staged : staged_) {
      if (staged->segment.physical == nullptr) bytes += staged->segment.range.size();
    }
    return bytes;
  }

  void take_memory() {
    const Device::Scope scope(claim_.device());
    for (const auto& staged : staged_) {
      if (staged->segment.physical == nullptr && staged->physical == nullptr) {
        staged->physical = std::make_unique<Physical>(claim_.device(), staged->segment.range.size());
      }
    }
  }
  void give_memory_back() {
    for (const auto& staged : staged_) staged->physical.reset();
  }

  void map() {
    const Device::Scope scope(claim_.device());
    for (const auto& staged : staged_) {
      if (staged->segment.mapping == nullptr) {
        staged->mapping = std::make_unique<Mapping>(staged->segment.range, staged->memory());
      }
    }
  }

  // Submits what brings the contents back, in allocation order, and returns the event behind it; null
  // when there is nothing to bring back.
  std::shared_ptr<Event> submit() {
    const Device::Scope scope(claim_.device());
    const bool is_copied = claim_.policy().backup == Backup::kHost;
    const bool is_zeroed = !is_copied && claim_.policy().fill == Fill::kZero;
    if (staged_.empty() || (!is_copied && !is_zeroed)) return nullptr;
    Driver& driver = claim_.device().driver();
    Stream& stream = claim_.stream();
    auto event = std::make_shared<Event>(claim_.device());
    is_running_ = true;
    for (const auto& staged : staged_) {
      const Range& range = staged->segment.range;
      if (is_zeroed) {
        driver.check<Call::cuMemsetD8Async>(range.address(), static_cast<unsigned char>(0), range.size(), stream.get());
      } else if (staged->physical != nullptr) {
        copy_back(staged->segment, stream.get());
      }  // else the segment kept its own memory, and its contents with it
    }
    stream.record(*event);
    return event;
  }

  void commit() noexcept {
    for (const auto& staged : staged_) {
      if (staged->physical != nullptr) staged->segment.physical = std::move(staged->physical);
      if (staged->mapping != nullptr) staged->segment.mapping = std::move(staged->mapping);
      bytes_mapped_ += staged->segment.range.size();
    }
    is_running_ = false;
    claim_.set_state(State::kActive);
  }

  Pool::Claim& claim() const { return claim_; }
  std::size_t bytes_copied() const { return bytes_copied_; }
  std::size_t bytes_mapped() const { return bytes_mapped_; }

 private:
  void copy_back(const Segment& segment, CUstream stream) {
    const auto pieces = claim_.image().find(segment.serial);
    if (pieces == claim_.image().end()) return;
    for (const Pool::Claim::Piece& piece : pieces->second) {
      for (std::size_t done = 0; done < piece.size;) {
        const HostBuffer::Place place = claim_.buffer().place(piece.position + done, piece.size - done);
        claim_.device().driver().check<Call::cuMemcpyHtoDAsync>(segment.range.address() + piece.offset + done,
                                                                static_cast<const void*>(place.address), place.size,
                                                                stream);
        done += place.size;
        bytes_copied_ += place.size;
      }
    }
  }

  void abandon() noexcept {
    if (is_running_ && !drain(claim_)) {
      // Copies that cannot be awaited may still write: leak what they write to.
      problems::record(claim_.pool().describe() + ": a copy could not be awaited; its device memory is leaked");
      for (auto& staged : staged_) static_cast<void>(staged.release());
    }
    try {
      const Device::Scope scope(claim_.device());
      staged_.clear();
    } catch (const std::exception& error) {
      problems::record(claim_.pool().describe() + ": undoing a resume: " + error.what());
    }
  }

  Pool::Claim& claim_;
  std::vector<std::unique_ptr<Staged>> staged_;
  bool is_running_ = false;
  std::size_t bytes_copied_ = 0;
  std::size_t bytes_mapped_ = 0;
};

using Restores = std::vector<std::unique_ptr<Restore>>;

// Takes the memory of all pools or of none. While memory is short and time is left, everything is
// given back before the next try, so that two processes that resume cannot starve each other.
void take_all_memory(Restores& restores, double wait, const Interrupt& interrupt) {
  const double deadline = now_seconds() + wait;
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(pause * 2, std::chrono::milliseconds(50))) {
    Restore* failing = nullptr;
    try {
      for (const auto& restore : restores) {
        failing = restore.get();
        restore->take_memory();
      }
      return;
    } catch (Error& error) {
      const Device& device = failing->claim().device();
      for (const auto& restore : restores) {
        const Device::Scope scope(restore->claim().device());
        restore->give_memory_back();
      }
      if (error.kind != Kind::kOutOfMemory || now_seconds() >= deadline) {
        std::size_t wanted = 0;
        for (const auto& restore : restores) {
          if (&restore->claim().device() == &device) wanted += restore->bytes_wanted();
        }
        failing->claim().pool().explain(error, wanted,
                                        wait > 0 ? "Gave up after " + std::to_string(wait) +
                                                       " seconds; everything is still paused and its contents "
                                                       "are safe. Resume again when memory is free"
                                                 : "Everything is still paused and its contents are safe. Resume "
                                                   "again when memory is free, or with wait=seconds");
        throw;
      }
    }
    if (interrupt) interrupt();
    const double left = deadline - now_seconds();
    std::this_thread::sleep_for(std::min(std::chrono::duration<double>(std::max(left, 0.0)),
                                         std::chrono::duration<double>(pause)));
  }
}

// With retain=False the host memory goes back within the call: only after the restore has read it.
void give_backups_back(Restores& restores, TransitionReport& report) noexcept {
  for (const auto& restore : restores) {
    Pool::Claim& claim = restore->claim();
    if (claim.policy().backup != Backup::kHost || claim.policy().is_retained) continue;
    try {
      static_cast<void>(claim.restore()->synchronize(-1, {}));
      claim.set_image({});
      claim.buffer().clear();
    } catch (const std::exception& error) {  // the resume itself has happened: the backup is kept, and said
      report.notes.push_back(claim.pool().describe() + " keeps its backup: " + error.what());
    }
  }
}

}  // namespace

TransitionReport resume(std::vector<std::shared_ptr<Pool>> pools, const ResumeOptions& options) {
  process::require_owner();
  TransitionReport report;
  report.fence = std::make_shared<Fence>(std::vector<Device*>{}, std::vector<std::shared_ptr<Event>>{});
  Stopwatch watch;
  Claims claims(std::move(pools), State::kActive, "resuming", report);
  if (claims.is_empty()) {
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

  double mapped = 0;
  double submitted = 0;
  std::vector<std::shared_ptr<Fence>> fences;
  try {
    for (const auto& restore : restores) restore->map();
    mapped = watch.lap();
    std::vector<std::shared_ptr<Event>> events;
    for (const auto& restore : restores) {
      std::vector<std::shared_ptr<Event>> own;
      if (auto event = restore->submit()) own.push_back(std::move(event));
      events.insert(events.end(), own.begin(), own.end());
      fences.push_back(std::make_shared<Fence>(std::vector<Device*>{&restore->claim().device()}, std::move(own)));
    }
    submitted = watch.lap();
    report.fence = std::make_shared<Fence>(claims.devices(), std::move(events));
    if (options.order == Order::kContext) report.is_host_held = report.fence->order_contexts();
  } catch (Error& error) {
    if (error.kind == Kind::kDriver || error.kind == Kind::kOutOfMemory) {
      error.message += ". Everything is still paused and its contents are safe; resume again";
    }
    throw;
  }
  for (std::size_t i = 0; i < restores.size(); ++i) {
    restores[i]->claim().set_restore(std::move(fences[i]));
    restores[i]->commit();
  }
  const double fenced = watch.lap();
  give_backups_back(restores, report);
  claims.note_memory_after();

  report.seconds = {{"create", created}, {"map", mapped}, {"copy", submitted}, {"fence", fenced},
                    {"total", watch.total()}};
  for (const auto& restore : restores) {
    PoolTransition& transition = claims.report_of(restore->claim());
    transition.bytes = restore->bytes_mapped();
    transition.bytes_copied = restore->bytes_copied();
    restore->claim().set_last_resume(report.seconds);
  }
  return report;
}

}  // namespace fencepool
