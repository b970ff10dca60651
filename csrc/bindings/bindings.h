// What each file of bindings/ adds to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings/raw.h"
#include "driver/driver.h"

namespace fencepool {

void bind_errors(pybind11::module_& module);
void bind_pools(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_digests(pybind11::module_& module);
void bind_pytorch(pybind11::module_& module);

// Streams as Python hands them over.
inline std::vector<CUstream> streams_at(const std::vector<std::uintptr_t>& handles) {
  std::vector<CUstream> streams;
  streams.reserve(handles.size());
  for (const std::uintptr_t handle : handles) streams.push_back(reinterpret_cast<CUstream>(handle));
  return streams;
}

// "cuda" or "host".
inline Provider provider_of(const std::string& name) {
  if (name == "cuda") return Provider::kCuda;
  if (name == "host") return Provider::kHost;
  throw Error(Kind::kInvalid, "unknown provider '" + name + "'; there are 'cuda' and 'host'");
}

}  // namespace fencepool
