#include "base/host_budget.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <locale>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"

namespace fencepool::host_budget {
namespace {

constexpr const char* kVariable = "FENCEPOOL_HOST_BUDGET";
constexpr double kLargest = 1e18;  // bytes: more is a slip, and would not fit everywhere

struct State {
  Mutex mutex;
  std::optional<std::size_t> budget GUARDED_BY(mutex);
  bool is_known GUARDED_BY(mutex) = false;  // else the variable has still to be read
  std::size_t used GUARDED_BY(mutex) = 0;
};

// Never destroyed: pools may outlive static destructors.
State& the_state() {
  static State& state = *new State;
  return state;
}

std::optional<std::size_t> budget_of(State& state) REQUIRES(state.mutex) {
  if (!state.is_known) {
    const char* text = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
    if (text != nullptr && *text != '\0') state.budget = parse(text, kVariable);
    state.is_known = true;
  }
  return state.budget;
}

// Bytes that are left of the budget; the largest value of the type without one.
std::size_t room_in(State& state) REQUIRES(state.mutex) {
  const std::optional<std::size_t> budget = budget_of(state);
  if (!budget) return std::numeric_limits<std::size_t>::max();
  return *budget - std::min(*budget, state.used);
}

void require_locked(State& state, std::size_t bytes) REQUIRES(state.mutex) {
  const std::size_t room = room_in(state);
  if (bytes <= room) return;
  Error error(Kind::kHostMemory, "a backup needs " + format_bytes(bytes) +
                                     " more of host memory, backups of this process hold " +
                                     format_bytes(state.used) + " and their budget is " +
                                     format_bytes(budget_of(state).value_or(0)) +
                                     ", set by fencepool.set_host_budget() or " + kVariable +
                                     "; trim() gives back what pools keep while they are active");
  error.wanted = bytes;
  error.free = room;
  throw error;
}

}  // namespace

std::size_t parse(const std::string& text, const std::string& what) {
  static constexpr std::array<std::pair<const char*, double>, 10> kUnits{{{"", 1},
                                                                          {"B", 1},
                                                                          {"KB", 1e3},
                                                                          {"MB", 1e6},
                                                                          {"GB", 1e9},
                                                                          {"TB", 1e12},
                                                                          {"KiB", 0x1p10},
                                                                          {"MiB", 0x1p20},
                                                                          {"GiB", 0x1p30},
                                                                          {"TiB", 0x1p40}}};
  // Digits and a point only: a stream would take signs, exponents and white space inside too.
  const std::size_t end = text.find_first_not_of("0123456789.");
  std::istringstream number(text.substr(0, end));
  number.imbue(std::locale::classic());
  double value = 0;
  if (number >> value && number.peek() == std::istringstream::traits_type::eof()) {
    std::string unit = end == std::string::npos ? "" : text.substr(end);
    unit.erase(0, unit.find_first_not_of(' '));
    for (const auto& [name, factor] : kUnits) {
      if (unit == name && value * factor <= kLargest) return static_cast<std::size_t>(value * factor);
    }
  }
  throw Error(Kind::kInvalid, what + " is a size such as 1073741824, 64GiB or 1.5TB, not '" + text + "'");
}

void set(std::optional<std::size_t> bytes) {
  State& state = the_state();
  const Lock lock(state.mutex);
  state.budget = bytes;
  state.is_known = true;
}

std::optional<std::size_t> get() {
  State& state = the_state();
  const Lock lock(state.mutex);
  return budget_of(state);
}

std::size_t used() {
  State& state = the_state();
  const Lock lock(state.mutex);
  return state.used;
}

bool allows(std::size_t bytes) {
  State& state = the_state();
  const Lock lock(state.mutex);
  return bytes <= room_in(state);
}

void require(std::size_t bytes) {
  State& state = the_state();
  const Lock lock(state.mutex);
  require_locked(state, bytes);
}

Charge::Charge(std::size_t bytes) : bytes_(bytes) {
  State& state = the_state();
  const Lock lock(state.mutex);
  require_locked(state, bytes);
  state.used += bytes;
}

Charge::Charge(Charge& whole, std::size_t bytes) noexcept : bytes_(bytes) { whole.bytes_ -= bytes; }

Charge::~Charge() {
  if (bytes_ == 0) return;  // a forked child leaks, and must not wait for a lock that nobody will let go of
  State& state = the_state();
  const Lock lock(state.mutex);
  state.used -= bytes_;
}

}  // namespace fencepool::host_budget
