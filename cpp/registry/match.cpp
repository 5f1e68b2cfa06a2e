#include "registry/match.h"

#include <algorithm>
#include <span>

#include "registry/matrix.h"

namespace preflash {

bool serves(const Variant& compiled, const Variant& wanted) {
  if (compiled.family != wanted.family) return false;
  std::span<const Axis> axes = reported_axes();
  const Variant form = compiled_form(wanted);
  if (compiled.tile_class == TileClass::kDecode && form.tile_class != TileClass::kDecode &&
      traits_of(compiled.family).short_tiles == ShortTiles::kOwn) {
    return false;
  }
  if (compiled.tile_class == TileClass::kCompact && form.tile_class != TileClass::kCompact) {
    return false;
  }
  const auto serves_as = [&](const Variant& asked) {
    return std::all_of(axes.begin(), axes.end(),
                       [&](const Axis& axis) { return axis.serves(compiled, asked); });
  };
  // Kernels that multiply 8 bits as they are stored have the dtypes of the tensors.
  return serves_as(form) || serves_as(wanted);
}

bool serves_better(const Variant& a, const Variant& b, const Variant& wanted) {
  const int size_a = a.head_dim_qk + a.head_dim_vo;
  const int size_b = b.head_dim_qk + b.head_dim_vo;
  if (size_a != size_b) return size_a < size_b;
  const TileClass tile_class = compiled_form(wanted).tile_class;
  if (a.tile_class != b.tile_class) return a.tile_class == tile_class;
  if (a.load != b.load) return a.load == Load::kDirect;
  return num_options(a) < num_options(b);
}

const Variant* find_in_matrix(const Variant& wanted) {
  const Variant* best = nullptr;
  for (const Variant& variant : every_variant()) {
    if (!serves(variant, wanted)) continue;
    if (best == nullptr || serves_better(variant, *best, wanted)) best = &variant;
  }
  return best;
}

}  // namespace preflash
