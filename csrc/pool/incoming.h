// What a resume does once memory is taken. A swap does the same.
#pragma once

#include <memory>
#include <vector>

#include "pool/claims.h"
#include "pool/restore.h"

namespace fencepool {

using Restores = std::vector<std::unique_ptr<Restore>>;

// The fences of a resume.
struct RestoreFences {
  std::shared_ptr<Fence> whole;             // also of restores under way in pools that were active already
  std::vector<std::shared_ptr<Fence>> own;  // one a restore
};
// `marks` has an entry a restore, null where nothing is brought back.
RestoreFences fences_of(const Claims& claims, const Restores& restores,
                        const std::vector<std::shared_ptr<const Marks>>& marks);

// Orders what comes later behind the fence, as the options say.
void order(const Fence& fence, const ResumeOptions& options, TransitionReport& report,
           const char* doing = "resume");

// Every pool is active; backups that are not retained go back, once their restores have read them.
void commit(Restores& restores, RestoreFences& fences, bool is_ordered, TransitionReport& report) noexcept;
// Completes the report and what each pool remembers: `own`, an entry a restore, whose last phase is the
// total.
void complete(Claims& claims, Restores& restores, std::vector<Phases>& own, double total,
              TransitionReport& report) noexcept;

}  // namespace fencepool
