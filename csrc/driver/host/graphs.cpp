// Graphs made by capture, and their launches.
#include "driver/host/captures.h"

namespace fencepool::host_driver {
namespace {

CUresult run_program(const std::vector<Work>& program) {
  for (const Work& work : program) {
    if (const CUresult status = work(); status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

constexpr unsigned long long kInstantiateFlags =
    CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

}  // namespace

namespace calls {

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  return entry([&] {
    if (executable == nullptr || (flags & ~kInstantiateFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
    const EngineLock lock(engine().mutex);
    const auto found = engine().graphs.find(reinterpret_cast<std::uintptr_t>(graph));
    if (found == engine().graphs.end()) return CUDA_ERROR_INVALID_VALUE;
    const std::uintptr_t id = engine().next_handle++;
    engine().executables.emplace(id, std::make_shared<GraphExec>(GraphExec{found->second, {}}));
    *executable = reinterpret_cast<CUgraphExec>(id);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    const auto found = engine().executables.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == engine().executables.end()) return CUDA_ERROR_INVALID_VALUE;
    GraphExec& executable = *found->second;
    std::shared_ptr<Stream> stream;
    if (const CUresult status = find_stream(stream_handle, stream); status != CUDA_SUCCESS) return status;
    Work work = [program = executable.program] { return run_program(*program); };
    if (stream->capture != nullptr) {  // a graph in a graph
      if (stream->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      add_node(*stream, std::move(work));
      return CUDA_SUCCESS;
    }
    if (const CUresult status = check_legacy(*stream, true); status != CUDA_SUCCESS) return status;
    Marks launch{{stream, stream->submitted + 1}};
    submit(stream, Operation{executable.last_launch, std::move(work)});
    executable.last_launch = std::move(launch);
    return CUDA_SUCCESS;
  });
}

// A launch in flight holds the program itself.
CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    const bool was_there = engine().executables.erase(reinterpret_cast<std::uintptr_t>(handle)) != 0;
    return was_there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuGraphDestroy(CUgraph handle) {
  return entry([&] {
    const EngineLock lock(engine().mutex);
    const bool was_there = engine().graphs.erase(reinterpret_cast<std::uintptr_t>(handle)) != 0;
    return was_there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
