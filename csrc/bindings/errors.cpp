// The one place where an Error of the core becomes a Python exception.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/problems.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace fencepool {
namespace {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kDriver:
      return "driver";
    case Kind::kOutOfMemory:
      return "out_of_memory";
    case Kind::kHostMemory:
      return "host_memory";
    case Kind::kDisk:
      return "disk";
    case Kind::kQuiesceTimeout:
      return "quiesce_timeout";
    case Kind::kCapture:
      return "capture";
    case Kind::kPaused:
      return "paused";
    case Kind::kBusy:
      return "busy";
    case Kind::kUnavailable:
      return "unavailable";
    case Kind::kForked:
      return "forked";
    case Kind::kCorrupted:
      return "corrupted";
    case Kind::kInvalid:
      return "invalid";
  }
  return "driver";
}

// The classes live in fencepool/errors.py; its from_core() picks one and fills it.
void raise(const Error& error) {
  const py::object from_core = py::module_::import("fencepool.errors").attr("from_core");
  const py::object raised = from_core(
      py::arg("kind") = kind_name(error.kind), py::arg("message") = error.message,
      py::arg("call") = error.call, py::arg("code") = error.code, py::arg("status") = error.status,
      py::arg("path") = error.path, py::arg("pool") = error.pool, py::arg("bytes_wanted") = error.wanted,
      py::arg("bytes_free") = error.free, py::arg("notes") = error.notes);
  PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
}

}  // namespace

void bind_errors(py::module_& module) {
  // pybind11 fixes the signature.
  py::register_exception_translator(
      [](std::exception_ptr pointer) {  // NOLINT(performance-unnecessary-value-param)
        try {
          if (pointer) std::rethrow_exception(pointer);
        } catch (const Error& error) {
          raise(error);
        }
      });
  module.def("problems", &problems::list);
  module.def("problem_count", &problems::total);
  module.def("clear_problems", &problems::clear);
}

}  // namespace fencepool
