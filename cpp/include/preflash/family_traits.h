// Properties of a kernel family, as data: [family.*] of cpp/variants/forward.toml holds them, and
// the generated traits_of() returns them. Only the kernels themselves ask which family it is.
#pragma once

#include <cstdint>
#include <limits>

namespace preflash {

// Packed rows of one query tile: all that the kernel computes, or as many as make whole tokens.
enum class TileRows : std::uint8_t { kFull, kTokenAligned };

// Meaning of the dtypes in a kernel's variant.
enum class Operands : std::uint8_t {
  kStored,    // the dtypes of the kernel's tensors
  kComputed,  // the dtype of its matrix products; Load says if tensors may have others
};

// Compile-time or run-time choice of options or segments.
enum class OptionChoice : std::uint8_t {
  kCompiled,  // there is a kernel for each combination
  kRunTime    // one kernel has all of them, and serves launches without
};

// Dtype to which kernels that multiply in one dtype dequantise 8-bit keys and values.
enum class Dequantization : std::uint8_t {
  kToQueries,  // the dtype of the queries; float16 where they have 8 bits themselves
  kToFloat16,
};

// Assignment of work items to CTAs.
enum class Schedule : std::uint8_t {
  kAuto,        // the family's default
  kPersistent,  // num_sms * ctas_per_sm CTAs, each with a list of items
  kOnePerItem,  // one CTA per item; the hardware hands CTAs out in order as slots become free
};

// Relation of a family's TileClass::kDecode kernels to its other kernels.
enum class ShortTiles : std::uint8_t {
  kSameBits,  // the same but for the rows of a tile: those of a request have the same bits in both
  kOwn,       // kernels of another kind, which dequantise and do not rotate
};

// Extra time per query tile of 128 rows of a kernel that reads 8 bits, or rotates, over the kernel
// that reads copies. The first row of the family's that matches holds.
struct Conversion {
  bool rotates = false;
  bool products_of_8_bits = false;  // as stored
  // The largest head_dim that it is for, and the largest of values.
  int most_head_dim = std::numeric_limits<int>::max();
  int most_vo = std::numeric_limits<int>::max();
  // Per key of the tile, in units of 0.2 ns, the time to copy a row of 128 elements in 16 bits.
  // gathered_key: where pages are no multiples of 8 keys.
  double key = 0.0;
  double gathered_key = 0.0;
  double queries = 0.0;     // for the tile's queries, in keys
  bool of_columns = false;  // times are for 128 columns of K and V each
};

struct FamilyTraits {
  static constexpr int kAnyLater = std::numeric_limits<int>::max();

  const char* backend = "";  // name by which a caller selects it
  // Devices that the family runs on, by compute capability: 90 for sm_90, 0 for the CPU.
  int lowest_capability = 0;
  int highest_capability = 0;
  // PREFLASH_ARCHS entry that builds the family, if its code is for one architecture alone.
  const char* architecture = "";
  Operands operands = Operands::kStored;
  // Soft cap, position, mask and skipped tiles.
  OptionChoice options = OptionChoice::kCompiled;
  OptionChoice segments = OptionChoice::kCompiled;  // of which a kernel takes items
  Dequantization dequantization = Dequantization::kToQueries;
  TileRows tile_rows = TileRows::kFull;
  ShortTiles short_tiles = ShortTiles::kSameBits;
  int short_rows = 64;                        // packed rows of a short tile
  Schedule schedule = Schedule::kOnePerItem;  // never kAuto
  // The smallest head_dim at which prefill and decode gain by being one launch beyond the time
  // between two.
  std::uint8_t joint_head_dim = 0;
  int item_keys = 0;  // an item costs as much as so many keys; 0: CostModel::kItem tiles
  // FLOPs that its kernels compute in the time memory delivers a byte; 0: prefill and decode always
  // run as one launch. Otherwise prefer_two_launches() may separate them: if prefill alone takes
  // more than most_prefill times as long as decode, or decode more than most_decode times as long
  // as prefill.
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
