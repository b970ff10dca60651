// Pools, blocks, fences and transitions for Python. Every call that may wait releases the GIL first.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/unlocked.h"
#include "pool/claims.h"
#include "pool/quiesce.h"
#include "pool/registry.h"
#include "pool/transition.h"
#include "pool/tripwires.h"

namespace py = pybind11;

namespace fencepool {
namespace {

using Guard = py::call_guard<Unlocked>;

// Ends a long wait when a signal has come in: Ctrl-C must work. Python runs handlers on the main thread
// only, so no other one needs the GIL for it.
void check_signals() {
  if (!Unlocked::is_main_thread()) return;
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Handles of CUDA streams, by the ordinal of their device.
StreamsByDevice streams_of(const std::map<int, std::vector<std::uintptr_t>>& handles) {
  StreamsByDevice streams;
  for (const auto& [ordinal, own] : handles) {
    streams[&Device::get(Provider::kCuda, ordinal)] = streams_at(own);
  }
  return streams;
}

const char* backup_name(Backup backup) {
  if (backup == Backup::kResident) return "resident";
  if (backup == Backup::kDisk) return "disk";
  return backup == Backup::kHost ? "host" : "none";
}
const char* fill_name(Fill fill) { return fill == Fill::kZero ? "zero" : "undefined"; }

Policy policy_of(const std::string& backup, bool is_retained, const std::string& fill, bool has_digests,
                 const std::string& directory) {
  Policy policy;
  policy.directory = directory;
  policy.is_retained = is_retained;
  policy.digests = has_digests ? Digests::kAvailable : Digests::kNone;
  if (backup == "host") {
    policy.backup = Backup::kHost;
  } else if (backup == "resident") {
    policy.backup = Backup::kResident;
  } else if (backup == "disk") {
    policy.backup = Backup::kDisk;
  } else if (backup != "none") {
    throw Error(Kind::kInvalid,
                "unknown backup '" + backup + "'; there are 'none', 'host', 'resident' and 'disk'");
  }
  if (fill == "zero") {
    policy.fill = Fill::kZero;
  } else if (fill != "undefined") {
    throw Error(Kind::kInvalid, "unknown fill '" + fill + "'; there are 'undefined' and 'zero'");
  }
  return policy;
}

// A tensor of `size` bytes over a block.
py::capsule to_dlpack(const std::shared_ptr<Block>& block, std::int64_t size) {
  const Device& device = block->pool()->device();
  const dlpack::Device where =
      device.is_host() ? dlpack::Device{dlpack::kCpu, 0} : dlpack::Device{dlpack::kCuda, device.ordinal()};
  return dlpack::capsule_of(block, reinterpret_cast<void*>(block->address()), size, where);
}

// A tensor over a part of a backup, in pinned host memory.
py::capsule part_to_dlpack(const std::shared_ptr<BackupPart>& part) {
  return dlpack::capsule_of(part, const_cast<char*>(part->start), static_cast<std::int64_t>(part->size),
                            {dlpack::kCpu, 0});
}

py::list phases_list(const Phases& phases) {
  py::list list;
  for (const auto& [phase, seconds] : phases) list.append(py::make_tuple(phase, seconds));
  return list;
}

py::dict status_dict(Pool& pool) {
  PoolStatus status;
  {
    const Unlocked unlocked;
    status = pool.status();
  }
  py::dict dict;
  dict["state"] = status.state;
  dict["is_paused"] = status.is_paused;
  dict["segments"] = status.segments;
  dict["bytes_reserved"] = status.bytes_reserved;
  dict["bytes_mapped"] = status.bytes_mapped;
  dict["bytes_used"] = status.bytes_used;
  dict["bytes_backed_up"] = status.bytes_backed_up;
  dict["host_bytes"] = status.host_bytes;
  dict["disk_bytes"] = status.disk_bytes;
  dict["is_direct"] = status.is_direct;
  dict["has_digests"] = status.has_digests;
  dict["pending_frees"] = status.pending_frees;
  dict["last_pause"] = phases_list(status.last_pause);
  dict["last_resume"] = phases_list(status.last_resume);
  return dict;
}

py::dict report_dict(const TransitionReport& report) {
  py::list pools;
  for (const PoolTransition& pool : report.pools) {
    py::dict one;
    one["id"] = pool.id;
    one["tag"] = pool.tag;
    one["device"] = pool.device;
    one["backup"] = backup_name(pool.backup);
    one["is_changed"] = pool.is_changed;
    one["bytes"] = pool.bytes;
    one["bytes_copied"] = pool.bytes_copied;
    pools.append(one);
  }
  py::list memory;
  for (const DeviceMemoryChange& device : report.memory) {
    py::dict one;
    one["device"] = device.device;
    one["free_before"] = device.free_before;
    one["free_after"] = device.free_after;
    one["total"] = device.total;
    memory.append(one);
  }
  py::dict dict;
  dict["pools"] = pools;
  dict["memory"] = memory;
  dict["seconds"] = phases_list(report.seconds);
  dict["unreleased_bytes"] = report.unreleased_bytes;
  dict["notes"] = report.notes;
  dict["is_host_held"] = report.is_host_held;
  py::list strays;
  for (const StrayWrites& found : report.strays) {
    py::dict one;
    one["id"] = found.id;
    one["bytes"] = found.bytes;
    one["first"] = found.first;
    one["page"] = found.page;
    strays.append(one);
  }
  dict["strays"] = strays;
  if (report.fence) dict["fence"] = report.fence;
  return dict;
}

py::dict pause_pools(const std::vector<std::shared_ptr<Pool>>& pools, double timeout,
                     const std::map<int, std::vector<std::uintptr_t>>& streams,
                     const std::set<std::uint64_t>& discarded,
                     const std::map<CUdeviceptr, std::size_t>& dead) {
  TransitionReport report;
  {
    const Unlocked unlocked;
    report = pause(pools, {timeout, streams_of(streams), check_signals, discarded, dead});
  }
  return report_dict(report);
}

void quiesce_pools(const std::vector<std::shared_ptr<Pool>>& pools, double timeout,
                   const std::map<int, std::vector<std::uintptr_t>>& handles) {
  const Unlocked unlocked;
  const StreamsByDevice streams = streams_of(handles);
  std::vector<Device*> devices;
  for (const auto& pool : pools) {
    if (std::find(devices.begin(), devices.end(), &pool->device()) == devices.end()) {
      devices.push_back(&pool->device());
    }
  }
  require_no_capture(devices, streams, "waiting for work in flight");
  quiesce(devices, timeout, check_signals);
}

Order order_of(const std::string& name) {
  if (name == "context") return Order::kContext;
  if (name == "explicit") return Order::kExplicit;
  throw Error(Kind::kInvalid, "unknown order '" + name + "'; there are 'context' and 'explicit'");
}

py::dict resume_pools(const std::vector<std::shared_ptr<Pool>>& pools, double wait, const std::string& order,
                      bool is_host_held, const std::map<int, std::vector<std::uintptr_t>>& streams,
                      bool is_verified) {
  TransitionReport report;
  {
    const Unlocked unlocked;
    report =
        resume(pools, {wait, order_of(order), is_host_held, streams_of(streams), check_signals, is_verified});
  }
  return report_dict(report);
}

py::tuple swap_pools(const std::vector<std::shared_ptr<Pool>>& out,
                     const std::vector<std::shared_ptr<Pool>>& in, double timeout,
                     const std::set<std::uint64_t>& discarded, double wait, const std::string& order,
                     bool is_host_held, const std::map<int, std::vector<std::uintptr_t>>& handles,
                     const std::map<CUdeviceptr, std::size_t>& dead) {
  SwapReport report;
  {
    const Unlocked unlocked;
    const StreamsByDevice streams = streams_of(handles);
    report = swap(out, in, {timeout, streams, check_signals, discarded, dead},
                  {wait, order_of(order), is_host_held, streams, check_signals});
  }
  return py::make_tuple(report_dict(report.paused), report_dict(report.resumed));
}

}  // namespace

void bind_pools(py::module_& module) {
  py::class_<Block, std::shared_ptr<Block>>(module, "Block")
      .def_property_readonly("address", &Block::address)
      .def_property_readonly("size", &Block::size)
      .def("to_dlpack", &to_dlpack, py::arg("size"));

  py::class_<BackupPart, std::shared_ptr<BackupPart>>(module, "BackupPart")
      .def_property_readonly("size", [](const BackupPart& part) { return part.size; })
      .def("to_dlpack", &part_to_dlpack);

  py::class_<Fence, std::shared_ptr<Fence>>(module, "Fence")
      .def(
          "wait",
          [](const Fence& fence, std::uintptr_t stream, const std::string& provider, int ordinal) {
            fence.wait(reinterpret_cast<CUstream>(stream), provider_of(provider), ordinal, check_signals);
          },
          py::arg("stream"), py::arg("provider"), py::arg("ordinal"), Guard())
      .def_property_readonly("providers",
                             [](const Fence& fence) {
                               std::vector<std::string> names;
                               if (fence.concerns(Provider::kCuda)) names.emplace_back("cuda");
                               if (fence.concerns(Provider::kHost)) names.emplace_back("host");
                               return names;
                             })
      .def(
          "synchronize",
          [](const Fence& fence, double timeout) { return fence.synchronize(timeout, check_signals); },
          py::arg("timeout"), Guard())
      .def("is_done", &Fence::is_done, Guard())
      .def(
          "part",
          [](const Fence& fence, const std::vector<std::pair<CUdeviceptr, std::size_t>>& spans) {
            std::vector<Run> runs;
            runs.reserve(spans.size());
            for (const auto& [address, size] : spans) runs.push_back({address, size});
            return fence.part(runs);
          },
          py::arg("runs"), Guard());

  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .def_property_readonly("id", &Pool::id)
      .def_property_readonly("tag", &Pool::tag)
      .def_property_readonly("device", [](const Pool& pool) { return pool.device().name(); })
      .def_property_readonly("ordinal", [](const Pool& pool) { return pool.device().ordinal(); })
      .def_property_readonly("provider",
                             [](const Pool& pool) { return pool.device().is_host() ? "host" : "cuda"; })
      .def_property_readonly("backup", [](const Pool& pool) { return backup_name(pool.policy().backup); })
      .def_property_readonly("directory", [](const Pool& pool) { return pool.policy().directory; })
      .def_property_readonly("retain", [](const Pool& pool) { return pool.policy().is_retained; })
      .def_property_readonly("has_digests", &Pool::has_digests)
      .def_property_readonly("fill", [](const Pool& pool) { return fill_name(pool.policy().fill); })
      .def(
          "allocate",
          [](Pool& pool, std::size_t size) {
            return std::shared_ptr<Block>(pool.allocate(size, check_signals));
          },
          py::arg("size"), Guard())
      .def(
          "allocate_batch",
          [](Pool& pool, const std::vector<std::size_t>& sizes) {
            std::vector<std::shared_ptr<Block>> blocks;
            for (auto& block : pool.allocate_batch(sizes, check_signals)) blocks.push_back(std::move(block));
            return blocks;
          },
          py::arg("sizes"), Guard())
      .def("contains", &Pool::contains, py::arg("address"), Guard())
      .def(
          "backup_of",
          [](Pool& pool, CUdeviceptr address, std::size_t size, bool is_view) {
            std::vector<std::shared_ptr<BackupPart>> parts;
            for (BackupPart& part : pool.backup_of(address, size, is_view, check_signals)) {
              parts.push_back(std::make_shared<BackupPart>(std::move(part)));
            }
            return parts;
          },
          py::arg("address"), py::arg("size"), py::arg("view"), Guard())
      .def("status", &status_dict)
      .def(
          "prepare", [](Pool& pool) { return pool.prepare(check_signals); }, Guard())
      .def("trim", [](Pool& pool) { return pool.trim(check_signals); }, Guard());

  module.def(
      "get_pool",
      [](const std::string& provider, int ordinal, const std::string& tag, const std::string& backup,
         bool is_retained, const std::string& fill, bool has_digests, const std::string& directory) {
        const Policy policy = policy_of(backup, is_retained, fill, has_digests, directory);
        return registry::get_pool(Device::get(provider_of(provider), ordinal), tag, policy);
      },
      py::arg("provider"), py::arg("ordinal"), py::arg("tag"), py::arg("backup"), py::arg("retain"),
      py::arg("fill"), py::arg("digests"), py::arg("directory") = "", Guard());
  module.def("set_tripwires", &tripwires::set_on, py::arg("is_on"));
  module.def(
      "why_no_host_memory",
      [](const std::string& provider, int ordinal) {
        return Device::get(provider_of(provider), ordinal).why_no_host_memory();
      },
      py::arg("provider"), py::arg("ordinal"), Guard());
  module.def(
      "load_kernels",
      [](const std::string& provider, int ordinal) {
        return Device::get(provider_of(provider), ordinal).load_kernels();
      },
      py::arg("provider"), py::arg("ordinal"), Guard());
  module.def("pools", &registry::pools, Guard());
  module.def(
      "close_pool", [](const std::shared_ptr<Pool>& pool) { registry::close(pool, check_signals); },
      py::arg("pool"), Guard());
  module.def("pause", &pause_pools, py::arg("pools"), py::arg("timeout"), py::arg("streams"),
             py::arg("discarded") = std::set<std::uint64_t>{},
             py::arg("dead") = std::map<CUdeviceptr, std::size_t>{});
  module.def("quiesce", &quiesce_pools, py::arg("pools"), py::arg("timeout"), py::arg("streams"));
  module.def("resume", &resume_pools, py::arg("pools"), py::arg("wait"), py::arg("order"),
             py::arg("hold_host"), py::arg("streams"), py::arg("verify") = false);
  module.def("swap", &swap_pools, py::arg("out"), py::arg("into"), py::arg("timeout"), py::arg("discarded"),
             py::arg("wait"), py::arg("order"), py::arg("hold_host"), py::arg("streams"), py::arg("dead"));
}

}  // namespace fencepool
