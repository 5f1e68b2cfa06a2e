// The rule by which a compiled variant serves a wanted one. Registry::find() applies it to the
// kernels of a build, find_in_matrix() to the whole matrix.
#pragma once

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

}  // namespace preflash
