// Digests by themselves, for tests against other implementations and for benchmarks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string_view>

#include "backup/pinned_memory.h"
#include "base/clock.h"
#include "bindings/bindings.h"
#include "bindings/unlocked.h"
#include "digest/digest.h"
#include "digest/image.h"
#include "owners/launch.h"

namespace py = pybind11;

namespace fencepool {
namespace {

py::bytes bytes_of(const digest::Digest& digest) {
  return {reinterpret_cast<const char*>(&digest), sizeof digest};
}

// The digests, and the seconds that each of `times` passes took, by the host's clock.
std::pair<std::vector<py::bytes>, double> on_device(const std::string& provider, int ordinal,
                                                    CUdeviceptr address, std::size_t size, std::uint32_t head,
                                                    int times) {
  std::vector<digest::Digest> found;
  double seconds = 0;
  {
    const Unlocked unlocked;
    Device& device = Device::get(provider_of(provider), ordinal);
    if (std::string reason = device.load_kernels(); !reason.empty()) throw Error(Kind::kUnavailable, reason);
    const bool is_valid = size > 0 && size % digest::kUnit == 0 && address % digest::kUnit == 0 && head > 0 &&
                          head % digest::kUnit == 0 && head <= digest::kBlock;
    if (!is_valid) throw Error(Kind::kInvalid, "addresses and sizes of digests are multiples of 16 bytes");
    const Device::Scope scope(device);
    const std::uint64_t blocks = digest::blocks_in(size, head);
    const PinnedMemory output(device, blocks * sizeof(digest::Digest));
    digest::Launch launch{};
    launch.output = output.device_address();
    launch.blocks = static_cast<std::uint32_t>(blocks);
    launch.runs = 1;
    launch.key = digest::process_key();
    launch.run[0] = {address, size, head, 0};
    Stream stream(device);
    Stopwatch watch;
    for (int i = 0; i < times; ++i) launch_digests(device, device.digest_kernel(), launch, stream);
    stream.synchronize();
    seconds = watch.lap() / times;
    const auto* first = static_cast<const digest::Digest*>(output.start());
    found.assign(first, first + blocks);
  }
  std::vector<py::bytes> digests;
  digests.reserve(found.size());
  for (const digest::Digest& one : found) digests.push_back(bytes_of(one));
  return {std::move(digests), seconds};
}

py::bytes on_cpu(std::string_view data) {
  if (data.size() % digest::kUnit != 0 || data.size() > digest::kBlock) {
    throw Error(Kind::kInvalid, "a digest is of at most 256 KiB, in multiples of 16 bytes");
  }
  return bytes_of(digest::of(digest::process_key(), data.data(), data.size()));
}

// What another implementation has to know.
py::dict key() {
  const digest::Key& key = digest::process_key();
  py::dict dict;
  dict["words"] = std::vector<std::uint32_t>(std::begin(key.words), std::end(key.words));
  dict["points"] = std::vector<std::uint64_t>(std::begin(key.point), std::end(key.point));
  std::vector<std::vector<std::uint64_t>> lanes;
  std::vector<std::vector<std::uint64_t>> warps;
  for (std::size_t i = 0; i < 2; ++i) {
    lanes.emplace_back(std::begin(key.lane[i]), std::end(key.lane[i]));
    warps.emplace_back(std::begin(key.warp[i]), std::end(key.warp[i]));
  }
  dict["lanes"] = lanes;
  dict["warps"] = warps;
  return dict;
}

}  // namespace

void bind_digests(py::module_& module) {
  module.def("digests_on_device", &on_device, py::arg("provider"), py::arg("ordinal"), py::arg("address"),
             py::arg("size"), py::arg("head") = digest::kBlock, py::arg("times") = 1);
  module.def("digest_on_cpu", &on_cpu, py::arg("data"));
  module.def("digest_key", &key);
  module.attr("DIGEST_BLOCK") = digest::kBlock;
  module.attr("HAS_KERNELS") = digest::kernel_image() != nullptr;
}

}  // namespace fencepool
