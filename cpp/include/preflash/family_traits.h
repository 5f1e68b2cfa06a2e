// The facts of a kernel family, as data: [family.*] of cpp/variants/forward.toml holds them, and
// the generated traits_of() tells them. Nothing but the kernels themselves asks which family it is.
#pragma once

#include <cstdint>
#include <limits>

namespace preflash {

// Packed rows of one query tile: all that the kernel computes, or as many as make whole tokens.
enum class TileRows : std::uint8_t { kFull, kTokenAligned };

// What the dtypes of a kernel's variant are.
enum class Operands : std::uint8_t {
  kStored,    // those of its tensors
  kComputed,  // that of its matrix products; Load tells whether the tensors may have others
};

// Where something is chosen.
enum class OptionChoice : std::uint8_t {
  kCompiled,  // there is a kernel for each combination
  kRunTime    // one kernel has all of them, and serves launches without
};

// What keys and values of 8 bits become in kernels that multiply in one dtype.
enum class Widening : std::uint8_t {
  kToQueries,  // the dtype of the queries; float16 where they have 8 bits themselves
  kToFloat16,
};

// How items reach CTAs.
enum class Schedule : std::uint8_t {
  kAuto,        // the family's default
  kPersistent,  // num_sms * ctas_per_sm CTAs, each with a list of items
  kOnePerItem,  // one CTA per item; the hardware hands CTAs out in order as slots become free
};

// What kernels of TileClass::kDecode are beside the others of their family.
enum class ShortTiles : std::uint8_t {
  kSameBits,  // the same but for the rows of a tile: those of a request have the same bits in both
  kOwn,       // kernels of another kind, which dequantise and do not rotate
};

struct FamilyTraits {
  static constexpr int kAnyLater = std::numeric_limits<int>::max();

  const char* backend = "";  // what a caller names
  // Devices that it runs on: their compute capability, 90 for sm_90; 0 is the CPU.
  int lowest_capability = 0;
  int highest_capability = 0;
  // The entry of PREFLASH_ARCHS that asks for it, where it is code of one architecture alone.
  const char* architecture = "";
  Operands operands = Operands::kStored;
  // Soft cap, position, mask and skipped tiles.
  OptionChoice options = OptionChoice::kCompiled;
  OptionChoice segments = OptionChoice::kCompiled;  // of which a kernel takes items
  Widening widening = Widening::kToQueries;
  TileRows tile_rows = TileRows::kFull;
  ShortTiles short_tiles = ShortTiles::kSameBits;
  int short_rows = 64;                        // packed rows of a short tile
  Schedule schedule = Schedule::kOnePerItem;  // never kAuto
  // The smallest head_dim at which prefill and decode gain by being one launch beyond the time
  // between two.
  std::uint8_t joint_head_dim = 0;
  int item_keys = 0;  // an item costs as much as so many keys; 0: CostModel::kItem tiles
  // What its kernels compute while memory delivers a byte, where prefill and decode run one after
  // the other if that is faster (faster_apart()); 0: always as one launch. They do where the one
  // alone takes more than so many times as long as the other.
  std::int16_t flops_per_byte = 0;
  std::uint8_t most_prefill = 0;
  std::uint8_t most_decode = 0;

  constexpr bool runs_on(int compute_capability) const {
    return lowest_capability <= compute_capability && compute_capability <= highest_capability;
  }
  constexpr bool on_cpu() const { return runs_on(0); }
  constexpr bool one_architecture() const { return architecture[0] != '\0'; }
  // True where it runs on every device that `other` runs on.
  constexpr bool covers(const FamilyTraits& other) const {
    return runs_on(other.lowest_capability) && runs_on(other.highest_capability);
  }
};

}  // namespace preflash
