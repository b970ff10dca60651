#include "bindings/dlpack.h"

#include <utility>

#include "base/allocation_faults.h"

namespace py = pybind11;

namespace fencepool::dlpack {
namespace {

struct Lease {
  std::shared_ptr<void> owner;
  std::int64_t shape = 0;
  ManagedTensor managed{};
};

}  // namespace

py::capsule capsule_of(std::shared_ptr<void> owner, void* address, std::int64_t size, Device device) {
  auto lease = std::make_unique<Lease>();
  lease->owner = std::move(owner);
  lease->shape = size;
  Tensor& tensor = lease->managed.tensor;
  tensor.data = address;
  tensor.device = device;
  tensor.dimensions = 1;
  tensor.dtype = {kUnsigned, 8, 1};
  tensor.shape = &lease->shape;
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  lease->managed.manager = lease.get();
  lease->managed.deleter = [](ManagedTensor* managed) {
    const allocation_faults::Inside inside;
    delete static_cast<Lease*>(managed->manager);
  };
  PyObject* capsule = PyCapsule_New(&lease->managed, "dltensor", [](PyObject* unused) {
    // A capsule that a tensor was made from has been renamed, and its tensor owns the lease.
    if (PyCapsule_IsValid(unused, "dltensor") == 0) return;
    auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(lease.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace fencepool::dlpack
