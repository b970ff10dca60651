// The extension module fencepool._core: what Python sees of the core.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core of fencepool. Not a public interface: use the package fencepool.";
  module.attr("__version__") = FENCEPOOL_VERSION;
  fencepool::bind_errors(module);
  fencepool::bind_pools(module);
  fencepool::bind_machine(module);
  fencepool::bind_digests(module);
  fencepool::bind_pytorch(module);
  fencepool::bind_raw(module);
}
