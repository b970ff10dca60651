#include "base/problems.h"

#include <deque>

#include "base/mutex.h"

namespace fencepool::problems {
namespace {

struct Log {
  Mutex mutex;
  std::deque<std::string> entries GUARDED_BY(mutex);
  std::size_t total GUARDED_BY(mutex) = 0;
};

// Never destroyed: deleters may run after static destructors.
Log& the_log() {
  static Log& log = *new Log;
  return log;
}

}  // namespace

void record(std::initializer_list<std::string_view> parts) noexcept {
  try {
    std::string what;
    for (const std::string_view part : parts) what += part;
    Log& log = the_log();
    const Lock lock(log.mutex);
    ++log.total;
    log.entries.push_back(std::move(what));
    if (log.entries.size() > kKept) log.entries.pop_front();
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to record that there is no memory
  }
}

std::vector<std::string> list() {
  Log& log = the_log();
  const Lock lock(log.mutex);
  return {log.entries.begin(), log.entries.end()};
}

std::size_t total() {
  Log& log = the_log();
  const Lock lock(log.mutex);
  return log.total;
}

void clear() {
  Log& log = the_log();
  const Lock lock(log.mutex);
  log.entries.clear();
  log.total = 0;
}

}  // namespace fencepool::problems
