// Where a pool with a backup on a disk keeps its contents while it is paused, and the way there.
#pragma once

#include <memory>
#include <string>

#include "backup/disk_file.h"
#include "backup/staging.h"

namespace fencepool {

struct DiskStore {
  // Throws kDisk where the directory is not fit for it.
  DiskStore(Device& device, const std::string& directory) : file(directory), staging(Staging::of(device)) {}

  DiskFile file;
  std::shared_ptr<Staging> staging;  // the buffers of its device last as long as such pools
};

}  // namespace fencepool
