// The part of the DLPack exchange format (version 0.x, https://dmlc.github.io/dlpack/latest/) that is
// needed to hand a run of bytes to a tensor library without a copy. Layout and numbers are fixed by
// that specification.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

namespace fencepool::dlpack {

constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;
constexpr std::uint8_t kUnsigned = 1;

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dimensions;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: dense
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// A capsule of `size` bytes at an address. The tensor made from it keeps `owner` alive, and lets go of it
// when it dies, on whatever thread, with or without the GIL.
pybind11::capsule capsule_of(std::shared_ptr<void> owner, void* address, std::int64_t size, Device device);

}  // namespace fencepool::dlpack
