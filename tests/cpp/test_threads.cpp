#include <doctest/doctest.h>

#include <random>
#include <thread>

#include "base/clock.h"
#include "pytorch/slots.h"
#include "support.h"

using namespace fencepool;
using namespace fencepool::testing;

namespace {

constexpr int kThreads = 8;

// Runs `work(index)` on so many threads at once. Failures are counted: doctest's checks are for one thread.
template <class Work>
int failures_of(Work work) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      try {
        if (!work(index)) ++failures;
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

}  // namespace

TEST_CASE("eight threads with pools of their own") {
  CHECK(failures_of([](int index) {
          const auto pool = new_pool(index % 2 == 0 ? Backup::kHost : Backup::kNone, index % 2);
          bool is_right = true;
          for (int round = 0; round < 6; ++round) {
            std::vector<std::unique_ptr<Block>> blocks;
            for (int i = 0; i < 6; ++i) {
              blocks.push_back(pool->allocate(i % 2 == 0 ? 3000 : 2 * kMiB, {}));
              fill(*blocks.back(), static_cast<unsigned char>(index + i));
            }
            blocks.erase(blocks.begin());
            pause_pools({pool});
            resume_pools({pool});
            if (index % 2 != 0) continue;
            for (int i = 0; i < 5; ++i) {
              is_right = is_right && holds(*blocks[static_cast<std::size_t>(i)],
                                           static_cast<unsigned char>(index + i + 1));
            }
          }
          registry::close(pool, {});
          return is_right;
        }) == 0);
}

TEST_CASE("eight threads on two shared pools: allocate, free, pause, resume, look") {
  const std::vector<std::shared_ptr<Pool>> pools{new_pool(Backup::kHost), new_pool(Backup::kNone)};
  CHECK(failures_of([&](int index) {
          std::mt19937 random(static_cast<unsigned>(index));
          for (int step = 0; step < 60; ++step) {
            const auto& pool = pools[random() % 2];
            try {
              switch (random() % 5) {
                case 0:
                  pause_pools({pools[0], pools[1]});
                  break;
                case 1:
                  resume_pools({pool});
                  break;
                case 2:
                  static_cast<void>(pool->status());
                  break;
                default:
                  const auto block = pool->allocate(random() % 2 == 0 ? 512 : kMiB, {});
                  break;
              }
            } catch (const Error& error) {
              if (error.kind != Kind::kPaused) return false;
            }
          }
          return true;
        }) == 0);
  resume_pools(pools);
  for (const auto& pool : pools) registry::close(pool, {});
}

TEST_CASE("no operation on one pool waits for a copy of another") {
  const auto slow = new_pool(Backup::kHost);
  const auto quick = new_pool(Backup::kNone);
  {
    auto large = slow->allocate(64 * kMiB, {});
    auto own = quick->allocate(kMiB, {});
    fill(*large, 1);
    host_driver::Settings settings;
    settings.bandwidth = 64 * kMiB;  // a second for the copy
    std::atomic<bool> is_paused{false};
    std::thread pausing;
    int rounds = 0;
    {
      const WithSettings narrow(settings);
      pausing = std::thread([&] {
        pause_pools({slow});
        is_paused = true;
      });
      while (slow->status().state != "pausing" && !is_paused) std::this_thread::yield();
      while (!is_paused) {
        const auto block = quick->allocate(2 * kMiB, {});
        static_cast<void>(quick->status());
        ++rounds;
      }
      pausing.join();
    }
    CHECK(rounds > 10);
    resume_pools({slow});
    CHECK(holds(*large, 1));
  }
  registry::close(slow, {});
  registry::close(quick, {});
}

TEST_CASE("PyTorch's entry points from eight threads, and a refusal") {
  const auto pool = new_pool(Backup::kNone);
  const int slot = torch_slots::slot_of(pool);
  CHECK(torch_slots::slot_of(pool) == slot);
  CHECK(failures_of([&](int) {
          for (int i = 0; i < 20; ++i) {
            void* memory = torch_slots::allocate(slot, 2 * kMiB, 0);
            if (memory == nullptr || !pool->contains(reinterpret_cast<CUdeviceptr>(memory))) return false;
            torch_slots::give_back(slot, memory);
          }
          return true;
        }) == 0);
  CHECK(torch_slots::allocate(slot, kMiB, 1) == nullptr);  // another device's memory
  const bool is_said = torch_slots::last_refusal(*pool) != nullptr;
  REQUIRE(is_said);
  CHECK(torch_slots::last_refusal(*pool)->message.find(pool->tag()) != std::string::npos);
  pause_pools({pool});
  CHECK(torch_slots::allocate(slot, kMiB, 0) == nullptr);
  CHECK(torch_slots::last_refusal(*pool)->kind == Kind::kPaused);
  resume_pools({pool});
  registry::close(pool, {});
  torch_slots::give_slot_back(*pool);
}
