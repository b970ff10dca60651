// For debugging: what touches a paused pool by mistake meets a page of a pattern, and is found out at the
// resume.
#pragma once

#include "pool/claims.h"

namespace fencepool::tripwires {

// The pattern's byte: floating-point numbers made of it are NaN, signed integers -1.
inline constexpr unsigned char kPattern = 0xFF;

void set_on(bool is_on) noexcept;  // for pauses to come

// At the end of a pause: each claimed pool gets a page of its own, at all addresses that lead nowhere now.
// Where that fails it is recorded as a problem, and the addresses fault as without it.
void lay(Claims& claims) noexcept;
// Before a resume changes mappings: waits for the work in flight on devices with paused pools that have such
// a page, and says in the report which pools were written to.
void look(Claims& claims, TransitionReport& report, const Interrupt& interrupt);

}  // namespace fencepool::tripwires
