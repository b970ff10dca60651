// The exclusive right to change a pool's state, and access to its insides while it lasts.
#pragma once

#include "pool/pool.h"

namespace fencepool {

class Pool::Claim {
 public:
  // Waits for other transitions of the pool. `doing` is shown by status() meanwhile. Whoever claims
  // several pools does it in the order of their ids.
  Claim(std::shared_ptr<Pool> pool, const char* doing);
  // Unclaims. The state is the one set, or the one it had. What was freed meanwhile is given back.
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  State state() const { return state_; }
  void set_state(State state) { state_ = state; }
  Pool& pool() const { return *pool_; }
  Device& device() const { return pool_->device_; }
  const Policy& policy() const { return pool_->policy_; }

  // In allocation order. Stable while the claim lasts.
  std::vector<Segment*> segments() const;
  // Gives back what was freed before the device became idle. Only before segments() is used.
  void reap_idle();
  // The pool's own stream for copies, made on first use. Needs a Device::Scope.
  Stream& stream();
  HostBuffer& buffer() const { return pool_->buffer_; }

  using Piece = Pool::Piece;
  using Image = std::map<std::uint64_t, std::vector<Piece>>;
  // Where each live run of bytes goes in a backup, in allocation order, packed from position 0.
  Image plan_image() const;
  static std::size_t image_bytes(const Image& image);
  const Image& image() const { return pool_->image_; }
  void set_image(Image image);
  void set_restore(std::shared_ptr<Fence> fence) { pool_->restore_ = std::move(fence); }
  const std::shared_ptr<Fence>& restore() const { return pool_->restore_; }
  void set_last_pause(const Phases& phases);
  void set_last_resume(const Phases& phases);

 private:
  std::shared_ptr<Pool> pool_;
  State state_;
};

}  // namespace fencepool
