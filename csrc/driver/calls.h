// The driver calls fencepool makes, each listed once: the only way to the machine.
//
// X(name, since) names a function of the CUDA driver API and the first CUDA
// version (major * 1000 + minor * 10) whose driver has it. A call of version
// kBaseline or older is required: a provider without it cannot be used. A newer
// one is optional: its absence is reported by name and has a documented
// fallback (see docs/design.md, "Absent calls").
//
// Source: CUDA Driver API reference, whose signatures `cuda.h` declares.
#pragma once

#include <cuda.h>

namespace fencepool::driver {

// cuMemCreate and its relatives came with CUDA 10.2; PyTorch's own floor is 11.8.
inline constexpr int kBaseline = 11080;

}  // namespace fencepool::driver

#define FENCEPOOL_DRIVER_CALLS(X)             \
  /* the library and its devices */           \
  X(cuInit, 2000)                             \
  X(cuDriverGetVersion, 2020)                 \
  X(cuGetErrorName, 6000)                     \
  X(cuGetErrorString, 6000)                   \
  X(cuDeviceGetCount, 2000)                   \
  X(cuDeviceGet, 2000)                        \
  X(cuDeviceGetName, 2000)                    \
  X(cuDeviceGetAttribute, 2000)               \
  X(cuDeviceTotalMem, 3020)                   \
  X(cuDeviceGetPCIBusId, 4010)                \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  /* contexts */                              \
  X(cuCtxPushCurrent, 4000)                   \
  X(cuCtxPopCurrent, 4000)                    \
  X(cuCtxGetCurrent, 4000)                    \
  X(cuCtxSynchronize, 2000)                   \
  X(cuCtxRecordEvent, 12050)                  \
  X(cuCtxWaitEvent, 12050)                    \
  /* virtual and physical memory */           \
  X(cuMemGetInfo, 3020)                       \
  X(cuMemGetAllocationGranularity, 10020)     \
  X(cuMemAddressReserve, 10020)               \
  X(cuMemAddressFree, 10020)                  \
  X(cuMemCreate, 10020)                       \
  X(cuMemRelease, 10020)                      \
  X(cuMemMap, 10020)                          \
  X(cuMemUnmap, 10020)                        \
  X(cuMemSetAccess, 10020)                    \
  X(cuMemGetAccess, 10020)                    \
  X(cuMemRetainAllocationHandle, 11000)       \
  X(cuMemExportToShareableHandle, 10020)      \
  X(cuMemImportFromShareableHandle, 10020)    \
  /* host memory and copies */                \
  X(cuMemHostRegister, 6050)                  \
  X(cuMemHostUnregister, 4000)                \
  X(cuMemHostGetDevicePointer, 3020)          \
  X(cuMemcpyHtoDAsync, 3020)                  \
  X(cuMemcpyDtoHAsync, 3020)                  \
  X(cuMemcpyDtoDAsync, 3020)                  \
  X(cuMemsetD8Async, 3020)                    \
  /* kernels */                               \
  X(cuModuleLoadData, 2000)                   \
  X(cuModuleUnload, 2000)                     \
  X(cuModuleGetFunction, 2000)                \
  X(cuLaunchKernel, 4000)                     \
  /* streams, events, captures and graphs */  \
  X(cuStreamCreate, 2000)                     \
  X(cuStreamDestroy, 4000)                    \
  X(cuStreamSynchronize, 2000)                \
  X(cuStreamQuery, 2000)                      \
  X(cuStreamWaitEvent, 3020)                  \
  X(cuStreamGetCtx, 9020)                     \
  X(cuStreamIsCapturing, 10000)               \
  X(cuStreamBeginCapture, 10010)              \
  X(cuStreamEndCapture, 10000)                \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuLaunchHostFunc, 10000)                  \
  X(cuEventCreate, 2000)                      \
  X(cuEventDestroy, 4000)                     \
  X(cuEventRecord, 2000)                      \
  X(cuEventQuery, 2000)                       \
  X(cuEventSynchronize, 2000)                 \
  X(cuGraphInstantiateWithFlags, 11040)       \
  X(cuGraphLaunch, 10000)                     \
  X(cuGraphExecDestroy, 10000)                \
  X(cuGraphDestroy, 10000)
