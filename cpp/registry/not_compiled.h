// The sentence for a request that no compiled kernel serves.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "preflash/variant.h"

namespace preflash {

// True if `compiled` computes what `wanted` asks for. The tile class matters only for kernels that
// are compact, or whose family has short tiles of their own kind, which compute less.
bool serves(const Variant& compiled, const Variant& wanted);

// True if `a` is the better of two variants that serve `wanted`: less padding first, then the tile
// class, then products in the stored dtype, then fewer options.
bool serves_better(const Variant& a, const Variant& b, const Variant& wanted);

// Returns the variant that a build of every variant would run for `wanted`, or nullptr.
const Variant* find_in_matrix(const Variant& wanted);

inline bool in_matrix(const Variant& wanted) { return find_in_matrix(wanted) != nullptr; }

// Says what was asked, what is compiled for that family, and what would work. `compiled` holds the
// variants of the wanted family; `elsewhere` the families, if any, whose kernels serve the request.
std::string describe_not_compiled(const Variant& wanted, std::span<const Variant> compiled,
                                  const std::vector<Family>& elsewhere);

// The same for a family that has no library here; `why` says what is missing.
std::string describe_absent(const Variant& wanted, const std::string& why,
                            const std::vector<Family>& elsewhere);

// For two segments of a family that has no kernel for both in one launch; `elsewhere` holds the
// families that run any two.
std::string describe_separate(const Variant& first, const Variant& second,
                              const std::vector<Family>& elsewhere);

}  // namespace preflash
