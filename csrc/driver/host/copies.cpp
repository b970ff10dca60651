// Copies, memset and host functions: the work that streams carry.
#include <algorithm>
#include <cstring>
#include <optional>
#include <shared_mutex>
#include <thread>

#include "driver/host/devices.h"
#include "driver/host/host_registry.h"
#include "driver/host/memory_book.h"
#include "driver/host/streams.h"

namespace fencepool::host_driver {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

struct Place {
  Address address;
  bool is_device;  // else the caller answers for it
};

// One copy (or fill) as a stream's thread carries it out.
struct Transfer {
  Context* context;
  Place to;
  Place from;  // unused by a fill
  std::size_t size;
  std::optional<unsigned char> fill;
  std::optional<Direction> link;  // none: within the device
};

// Whether the chunk may be touched now. A host pointer into reserved addresses is held to their rules too:
// a stream's thread must never fault there.
bool may_touch(MemoryBook& book, const Context& context, const Place& place, std::size_t offset,
               std::size_t size, bool is_write) {
  const Address address = place.address + offset;
  if (!place.is_device && !book.touches_reservation(address, size)) return true;
  return book.is_accessible_by(context.device, address, size, is_write);
}

// Moves one chunk while nobody can unmap it.
CUresult move_chunk(const Transfer& transfer, std::size_t offset, std::size_t size) {
  MemoryBook& book = memory_book();
  const std::shared_lock<SharedMutex> lock(book.mutex);
  if (!may_touch(book, *transfer.context, transfer.to, offset, size, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  auto* to = reinterpret_cast<void*>(transfer.to.address + offset);
  if (transfer.fill) {
    std::memset(to, *transfer.fill, size);
    return CUDA_SUCCESS;
  }
  if (!may_touch(book, *transfer.context, transfer.from, offset, size, false))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::memmove(to, reinterpret_cast<const void*>(transfer.from.address + offset), size);
  return CUDA_SUCCESS;
}

CUresult carry_out(const Transfer& transfer) {
  Device& device = device_at(transfer.context->device);
  for (std::size_t offset = 0; offset < transfer.size; offset += kChunk) {
    if (transfer.context->is_broken()) return transfer.context->status();
    const std::size_t size = std::min(kChunk, transfer.size - offset);
    const Device::Clock::time_point begin = Device::Clock::now();
    if (const CUresult status = move_chunk(transfer, offset, size); status != CUDA_SUCCESS) return status;
    if (transfer.link) std::this_thread::sleep_until(device.book(*transfer.link, size, begin));
  }
  return CUDA_SUCCESS;
}

// As the driver does at the call: device addresses must be mapped by then. Whether they still are, and
// whether the device has access, shows when the work runs.
bool is_mapped(const Place& place, std::size_t size) {
  if (!place.is_device) return true;
  MemoryBook& book = memory_book();
  const std::shared_lock<SharedMutex> lock(book.mutex);
  return book.is_covered(place.address, size, [](const Mapping&) { return true; });
}

// The link that work between two places within the address space takes: none within a device.
std::optional<Direction> link_between(CUdeviceptr to, std::optional<CUdeviceptr> from) {
  MemoryBook& book = memory_book();
  const std::shared_lock<SharedMutex> lock(book.mutex);
  if (book.is_on_host(to)) return Direction::kToHost;
  if (from && book.is_on_host(*from)) return Direction::kToDevice;
  return std::nullopt;
}

// The context whose stream it is: work touches memory with the access of that context's device.
CUresult context_of(CUstream handle, Context*& context) {
  if (const CUresult status = require_current(context); status != CUDA_SUCCESS) return status;
  const EngineLock lock(engine().mutex);
  std::shared_ptr<Stream> stream;
  const CUresult status = find_stream(handle, stream);
  if (status == CUDA_SUCCESS) context = &stream->context;
  return status;
}

CUresult transfer(Transfer transfer, const Place* host, CUstream handle) {
  if (const CUresult status = context_of(handle, transfer.context); status != CUDA_SUCCESS) return status;
  if (transfer.size == 0) return CUDA_SUCCESS;
  if (!is_mapped(transfer.to, transfer.size)) return CUDA_ERROR_INVALID_VALUE;
  if (!transfer.fill && !is_mapped(transfer.from, transfer.size)) return CUDA_ERROR_INVALID_VALUE;
  HostMemory kind = HostMemory::kRegistered;
  if (host != nullptr) {
    if (host->address == 0 || end_of(host->address, transfer.size) == 0) return CUDA_ERROR_INVALID_VALUE;
    kind = host_registry().kind_of(host->address, transfer.size);
  }
  if (kind == HostMemory::kMixed) return CUDA_ERROR_INVALID_VALUE;
  const Context& context = *transfer.context;
  Marks submitted;
  const CUresult status = submit_or_capture(handle, [transfer] { return carry_out(transfer); }, &submitted);
  if (status != CUDA_SUCCESS || kind == HostMemory::kRegistered || submitted.empty()) return status;
  // Pageable memory: in order on the stream, but the caller may use it again when the call returns.
  EngineLock lock(engine().mutex);
  return wait_for(lock, context, submitted);
}

}  // namespace

namespace calls {

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t size, CUstream stream) {
  return entry([&] {
    const Place host{reinterpret_cast<Address>(from), false};
    return transfer({nullptr, {to, true}, host, size, std::nullopt, Direction::kToDevice}, &host, stream);
  });
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t size, CUstream stream) {
  return entry([&] {
    const Place host{reinterpret_cast<Address>(to), false};
    return transfer({nullptr, host, {from, true}, size, std::nullopt, Direction::kToHost}, &host, stream);
  });
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size, CUstream stream) {
  return entry([&] {
    return transfer({nullptr, {to, true}, {from, true}, size, std::nullopt, link_between(to, from)}, nullptr,
                    stream);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t size, CUstream stream) {
  return entry([&] {
    return transfer({nullptr, {to, true}, {0, false}, size, value, link_between(to, std::nullopt)}, nullptr,
                    stream);
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return entry([&] {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return submit_or_capture(stream, [function, data] {
      const HostFunctionScope scope;
      function(data);
      return CUDA_SUCCESS;
    });
  });
}

}  // namespace calls
}  // namespace fencepool::host_driver
