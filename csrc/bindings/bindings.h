// What each file of bindings/ adds to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/raw.h"
#include "driver/driver.h"

namespace fencepool {

void bind_errors(pybind11::module_& module);
void bind_pools(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_pytorch(pybind11::module_& module);

// "cuda" or "host".
inline Provider provider_of(const std::string& name) {
  if (name == "cuda") return Provider::kCuda;
  if (name == "host") return Provider::kHost;
  throw Error(Kind::kInvalid, "unknown provider '" + name + "'; there are 'cuda' and 'host'");
}

}  // namespace fencepool
