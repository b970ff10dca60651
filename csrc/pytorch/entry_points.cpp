// The C functions that torch.cuda.memory.CUDAPluggableAllocator finds by name in this extension:
// fencepool_alloc_00 and fencepool_free_00 to fencepool_alloc_77 and fencepool_free_77, the slot's number
// in octal. Exported by bindings/exports.map.
//
// PyTorch's types for them: void* (ssize_t size, int device, cudaStream_t stream) and
// void (void* address, ssize_t size, int device, cudaStream_t stream).
#include <sys/types.h>

#include "pytorch/slots.h"

#define FENCEPOOL_EXPORTED extern "C" __attribute__((visibility("default")))
#define FENCEPOOL_SLOT(row, column)                                                                    \
  FENCEPOOL_EXPORTED void* fencepool_alloc_##row##column(ssize_t size, int device, void*) {            \
    return fencepool::torch_slots::allocate(row * 8 + column, static_cast<std::size_t>(size), device); \
  }                                                                                                    \
  FENCEPOOL_EXPORTED void fencepool_free_##row##column(void* address, ssize_t, int, void*) {           \
    fencepool::torch_slots::give_back(row * 8 + column, address);                                      \
  }
#define FENCEPOOL_ROW(row) \
  FENCEPOOL_SLOT(row, 0)   \
  FENCEPOOL_SLOT(row, 1)   \
  FENCEPOOL_SLOT(row, 2)   \
  FENCEPOOL_SLOT(row, 3)   \
  FENCEPOOL_SLOT(row, 4) FENCEPOOL_SLOT(row, 5) FENCEPOOL_SLOT(row, 6) FENCEPOOL_SLOT(row, 7)

static_assert(fencepool::torch_slots::kSlots == 64, "as many as are written out below");
FENCEPOOL_ROW(0)
FENCEPOOL_ROW(1)
FENCEPOOL_ROW(2)
FENCEPOOL_ROW(3)
FENCEPOOL_ROW(4)
FENCEPOOL_ROW(5)
FENCEPOOL_ROW(6)
FENCEPOOL_ROW(7)
