// torch_memory_saver_hook_mode_preload.abi3.so, which starters of processes put into LD_PRELOAD.
//
// It hooks nothing: before the process's main() it puts the directory it lies in first on PYTHONPATH, where
// Python then finds fencepool's package of the name torch_memory_saver. Any program may have it loaded, so it
// needs the C library alone, and leaves everything as it is when something is not as expected.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr const char* kVariable = "PYTHONPATH";

// miles searches the file for this name before it starts a trainer that needs backups on disk.
__attribute__((used)) const char kHasDiskBackups[] = "TMS_INIT_ENABLE_DISK_BACKUP";

// The directory of this library, for free(); null when it cannot be told.
char* own_directory() {
  static const char here = 0;
  Dl_info info;
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) {
    return nullptr;
  }
  char* path = realpath(info.dli_fname, nullptr);
  char* slash = path != nullptr ? strrchr(path, '/') : nullptr;
  if (slash == nullptr) {
    free(path);
    return nullptr;
  }
  *slash = '\0';
  return path;
}

bool is_first(const char* entries, const char* directory) {
  const size_t length = strlen(directory);
  return strncmp(entries, directory, length) == 0 && (entries[length] == ':' || entries[length] == '\0');
}

void set(const char* value) {
  setenv(kVariable, value, 1);  // NOLINT(concurrency-mt-unsafe): before main() there is one thread
}

__attribute__((constructor)) void put_directory_on_python_path() {
  char* directory = own_directory();
  if (directory == nullptr) {
    return;
  }
  const char* others = getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
  if (others == nullptr || *others == '\0') {
    set(directory);
  } else if (!is_first(others, directory)) {
    char* joined = nullptr;
    if (asprintf(&joined, "%s:%s", directory, others) >= 0) {
      set(joined);
      free(joined);
    }
  }
  free(directory);
}

}  // namespace
