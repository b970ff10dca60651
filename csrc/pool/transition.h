// Pausing and resuming sets of pools: all or nothing.
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "pool/fence.h"
#include "pool/pool.h"

namespace fencepool {

// What happened to one pool.
struct PoolTransition {
  std::uint64_t id = 0;
  std::string tag;
  std::string device;
  Backup backup = Backup::kNone;
  bool is_changed = false;       // false: it was in the wanted state already
  std::size_t bytes = 0;         // device memory released or mapped
  std::size_t bytes_copied = 0;  // to or from the backup
};

struct DeviceMemoryChange {
  std::string device;
  std::size_t free_before = 0, free_after = 0, total = 0;  // bytes, as the driver reports them
};

// What was written by mistake to a pool while it was paused; only looked for when debugging (tripwires.h).
struct StrayWrites {
  std::uint64_t id = 0;   // of the pool
  std::size_t bytes = 0;  // of the page that differ from its pattern
  std::size_t first = 0;  // offset of the first of them, modulo the page
  std::size_t page = 0;   // bytes
};

struct TransitionReport {
  std::vector<PoolTransition> pools;
  std::vector<DeviceMemoryChange> memory;
  Phases seconds;
  std::size_t unreleased_bytes = 0;  // a pause only: what the driver refused to take back
  std::vector<std::string> notes;
  bool is_host_held = false;        // a resume only: the host waited, as the driver cannot order contexts
  std::shared_ptr<Fence> fence;     // a resume only
  std::vector<StrayWrites> strays;  // a resume only
};

// Notes what was out of the ordinary, for the caller of a transition that has happened and for status().
void note(TransitionReport& report, std::initializer_list<std::string_view> parts) noexcept;

// Streams of devices that may be capturing, besides the watched ones.
using StreamsByDevice = std::map<const Device*, std::vector<CUstream>>;

struct PauseOptions {
  double timeout = 60;  // seconds for the work in flight to end; negative: no limit
  StreamsByDevice streams;
  Interrupt interrupt;
  std::set<std::uint64_t> discarded;        // ids of pools whose contents this pause drops, backup or not
  std::map<CUdeviceptr, std::size_t> dead;  // bytes of live blocks that hold nothing: start to size
};

// Releases the device memory of all `pools`, contents first where their policy says so.
//
// Waits for the work in flight, takes space for the backups, copies, and unmaps and releases batch by batch
// as copies end; pools without a backup come last, all of them unmapped before the first is released. When a
// step fails, every one before it is undone, contents from the backups, and the error is thrown with every
// pool as it was (giving_away.h).
// Errors: kCapture, kQuiesceTimeout, kHostMemory, kDriver. Thread-safe; holds no lock meanwhile.
TransitionReport pause(std::vector<std::shared_ptr<Pool>> pools, const PauseOptions& options);

enum class Order { kContext, kExplicit };

struct ResumeOptions {
  double wait = 0;  // seconds to keep trying while another process gives memory back
  Order order = Order::kContext;
  // Return only when restores on the embedded driver have ended: there the CPU itself runs what comes later.
  bool is_host_held = false;
  StreamsByDevice streams;
  Interrupt interrupt;
  bool is_verified = false;  // the contents are compared with their digests; the host waits for it
};

// Takes device memory for all `pools`, maps it where it was, submits the copies back, and orders the
// devices' later work behind them. The host is not held for the copies.
//
// The fence covers pools that were active already too, as long as their own last restore is under way.
// Nothing is committed before every step has succeeded: when one fails, what was taken is given back
// and every pool is paused as it was, contents in its backup. Errors: kCapture, kOutOfMemory, kDriver,
// kCorrupted.
TransitionReport resume(std::vector<std::shared_ptr<Pool>> pools, const ResumeOptions& options);

struct SwapReport {
  TransitionReport paused, resumed;
};

// A pause of `out` and a resume of `in` at once: each side copies on streams of its own while the other one
// does. Device memory for `in` is taken as far as there is some at the start, and as `out` lets go of its
// own, which goes over to a segment of the same size or is released. No pool may be on both sides. The
// streams of the two options are the same.
//
// All or nothing over both sides, as either alone. Pools of `out` whose contents are not kept are released
// last; when `in` needs their memory, a failure after that brings them back without their contents, and a
// note says so. Memory that would not do even then is found out before anything changes (kOutOfMemory). Other
// errors: those of both. Thread-safe; holds no lock meanwhile.
SwapReport swap(const std::vector<std::shared_ptr<Pool>>& out, const std::vector<std::shared_ptr<Pool>>& in,
                const PauseOptions& pause_options, const ResumeOptions& resume_options);

}  // namespace fencepool
