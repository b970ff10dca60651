#include "driver/faults.h"

namespace fencepool::driver {

void Faults::arm(Call call, std::uint64_t nth, bool is_lasting, CUresult result) {
  const Lock lock(mutex_);
  call_ = call;
  left_ = nth;
  is_lasting_ = is_lasting;
  result_ = result;
  injected_ = 0;
  armed_ = true;
}

void Faults::disarm() {
  const Lock lock(mutex_);
  armed_ = false;
}

bool Faults::take_armed(Call call, CUresult* result) noexcept {
  const Lock lock(mutex_);
  if (!armed_ || (call_ != Call::kCount && call_ != call)) return false;
  if (left_ > 1) {
    --left_;
    return false;
  }
  *result = result_;
  ++injected_;
  if (!is_lasting_) armed_ = false;
  return true;
}

}  // namespace fencepool::driver
