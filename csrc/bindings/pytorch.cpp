// Pools as allocators of PyTorch, for python/fencepool/pytorch/cuda_regions.py.
#include "pytorch/slots.h"

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "bindings/unlocked.h"

namespace py = pybind11;

namespace fencepool {

void bind_pytorch(py::module_& module) {
  module.def("torch_slot", &torch_slots::slot_of, py::arg("pool"), py::call_guard<Unlocked>());
  module.def(
      "give_torch_slot_back", [](const std::shared_ptr<Pool>& pool) { torch_slots::give_slot_back(*pool); },
      py::arg("pool"), py::call_guard<Unlocked>());
  module.def(
      "raise_torch_refusal",
      [](const std::shared_ptr<Pool>& pool) {
        const auto refusal = torch_slots::last_refusal(*pool);
        if (refusal != nullptr) throw Error(*refusal);
      },
      py::arg("pool"), py::call_guard<Unlocked>());
}

}  // namespace fencepool
