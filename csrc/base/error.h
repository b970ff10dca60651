// The one exception type of the core. The bindings turn each Kind into a Python class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace fencepool {

enum class Kind {
  kDriver,          // a driver call failed
  kOutOfMemory,     // the device has too little memory
  kHostMemory,      // the host has too little memory for a backup
  kDisk,            // the file of a backup, or the directory for it
  kQuiesceTimeout,  // work in flight did not end in time
  kCapture,         // a stream of the device is being captured into a CUDA graph
  kPaused,          // the pool is paused and the operation needs it active
  kBusy,            // the pool still has live tensors
  kUnavailable,     // the provider cannot be used on this machine
  kForked,          // called in a child process after fork
  kCorrupted,       // a backup holds something else than was stored
  kInvalid,         // a bad argument
};

class Error : public std::exception {
 public:
  Error(Kind error_kind, std::string error_message) : kind(error_kind), message(std::move(error_message)) {}

  const char* what() const noexcept override { return message.c_str(); }

  // A failure that happened while undoing this one. Never replaces it.
  void add_note(std::string note) { notes.push_back(std::move(note)); }

  Kind kind;
  std::string message;
  std::string call;        // the driver or system call that failed, empty when none did
  int code = 0;            // its CUresult, or errno
  std::string status;      // the CUresult's name, "CUDA_ERROR_OUT_OF_MEMORY", or errno's words
  std::string path;        // the directory of a kDisk
  std::string pool;        // the pool at work, empty when none was
  std::size_t wanted = 0;  // bytes the operation needs, 0 when it needs none
  std::size_t free = 0;    // bytes the driver, or the file system, reports as free
  std::vector<std::string> notes;
};

// "14.2 GiB", for messages.
std::string format_bytes(std::size_t bytes);
// "0x7f0000000000".
std::string format_address(std::uintptr_t address);

}  // namespace fencepool
