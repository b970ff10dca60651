// The driver calls as they are, for tests.
#pragma once

#include <pybind11/pybind11.h>

namespace fencepool {

// Adds the submodule `raw` to `core`. No part of the public interface.
void bind_raw(pybind11::module_& core);

}  // namespace fencepool
