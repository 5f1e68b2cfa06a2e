// A kernel is a variant plus its tile and its launch function. cpp/variants/forward.toml says what
// a variant is and which there are, cmake/codegen/generate.py turns each into a named type, and the
// registry finds one at plan() time.
#pragma once

#include "preflash/item_record.h"
#include "preflash/plan.h"
#include "preflash/types.h"

namespace preflash {

struct ForwardParams;

// Returns the dtype of a kernel's matrix products for keys of 8 bits, which float16 and bfloat16
// both represent exactly. It is float16 unless the queries choose: a tensor core multiplies both
// equally fast, and float16 keeps three more bits of the softmax's weights.
constexpr DType product_dtype(Family family, DType q_dtype) {
  const bool queries_choose =
      size_of(q_dtype) == 2 && traits_of(family).dequantization == Dequantization::kToQueries;
  return queries_choose ? q_dtype : DType::kFloat16;
}

// Returns the variant that a kernel of the wanted family is compiled for, to serve `wanted`, which
// has the dtypes and position of the tensors. A compiled form is its own compiled form.
constexpr Variant compiled_form(Variant wanted) {
  if (traits_of(wanted.family).segments == OptionChoice::kRunTime) wanted.segments = Segments::kOne;
  if (traits_of(wanted.family).operands == Operands::kStored) return wanted;
  const bool queries_of_8_bits =
      wanted.q_dtype == DType::kFloat8E4M3 && wanted.kv_dtype == wanted.q_dtype;
  if (queries_of_8_bits || (size_of(wanted.q_dtype) == 2 && size_of(wanted.kv_dtype) == 1)) {
    wanted.q_dtype = wanted.kv_dtype = product_dtype(wanted.family, wanted.q_dtype);
    wanted.load = Load::kConverted;
  }
  if (wanted.position == Position::kRope) {
    wanted.position = Position::kNone;
    wanted.load = Load::kConverted;
    if (traits_of(wanted.family).short_tiles == ShortTiles::kOwn) {
      wanted.tile_class = TileClass::kPrefill;
    }
  }
  return wanted;
}

// True if a kernel applies an option only to launches that ask for it: kernels of two or more
// options, which serve every combination of theirs ([[options]] of forward.toml), and all kernels
// of some families.
constexpr bool options_at_run_time(const Variant& compiled) {
  return traits_of(compiled.family).options == OptionChoice::kRunTime || num_options(compiled) > 1;
}

// True if a kernel whose value on the axis of an option is `has` serves a launch that wants
// `wanted`; `without` is the axis's value for no such option.
template <class Value>
constexpr bool serves_option(const Variant& compiled, Value has, Value wanted, Value without) {
  if (has == wanted || traits_of(compiled.family).options == OptionChoice::kRunTime) return true;
  return wanted == without && options_at_run_time(compiled);
}

struct TileShape {
  int m = 0;       // packed query rows
  int n = 0;       // keys
  int stages = 1;  // K/V tiles in flight
  int warps = 4;
  // Promised by the launch bounds; the planner fills num_sms * ctas_per_sm slots.
  int ctas_per_sm = 1;
};

// Device-side errors travel as text: nullptr means that the launch was accepted.
using LaunchError = const char*;

// Target of a launch: a GPU and its stream, or a number of CPU threads, the caller's included.
struct LaunchTarget {
  int device = -1;  // CUDA ordinal; -1: the CPU
  void* stream = nullptr;
  int num_threads = 1;
};

// num_ctas: as planned, in units of ctas_per_item.
using ForwardLaunch = LaunchError (*)(const ForwardParams& params, int num_ctas,
                                      const LaunchTarget& target);

// Use of mask tiles by a kernel with mask bits.
enum class MaskTileUse : std::uint8_t {
  kUnused,  // it looks at the bits of every tile
  kUsed     // it reads which are empty, full or partial (mask_tiles.h)
};

struct ForwardKernel {
  const char* id = nullptr;  // id_of(variant), e.g. "sm80_bf16_d128_decode"
  Variant variant;
  TileShape tile;
  int smem_bytes = 0;  // dynamic shared memory of one CTA
  ForwardLaunch launch = nullptr;
  FamilyTraits traits = traits_of(variant.family);  // traits that the planner uses
  int ctas_per_item = 1;       // each reads the item's rows of q and makes a part of o's columns
  TileShape second_tile = {};  // of the second segment, where the kernel has two
  MaskTileUse mask_tile_use = MaskTileUse::kUnused;
  // True if a row's bits depend on the first and last tile of keys of its query tile:
  // batch-invariant plans then align query tiles (QueryGrid).
  bool aligns_query_tiles = false;
  Tracing tracing = Tracing::kNone;
  // True if queries of 16 bits become e4m3 on their way (AttentionOptions::quantizes_q).
  bool quantizes_q = false;

  // Returns the tile shape for one of the launch's segments.
  const TileShape& tile_of(int segment) const {
    return variant.segments == Segments::kTwo && segment == 1 ? second_tile : tile;
  }
  // Returns where chunks of keys begin in one of the launch's segments.
  ChunkOrigin chunk_origin(int segment, const AttentionOptions& options) const {
    if (!options.chunks_begin_at_window()) return {};
    return {.reach = options.reach(), .alignment = tile_of(segment).n};
  }
  // Returns the grid of query tiles for one of the launch's segments.
  QueryGrid query_grid(int segment, const AttentionOptions& options) const {
    const int group_size = options.gqa_ratio();
    return {.rows_per_tile = rows_per_tile(traits.tile_rows, tile_of(segment).m, group_size),
            .group_size = group_size,
            .aligned = aligns_query_tiles && options.split.is_invariant()};
  }
};

// Table that a kernel library exports through `extern "C" const KernelLibrary*
// preflash_kernel_library()`.
struct KernelLibrary {
  int abi_version = 0;
  Family family = Family::kCpu;
  const char* architectures = "";  // e.g. "80;90"
  const ForwardKernel* kernels = nullptr;
  int num_kernels = 0;
  // Runs several segments as one launch, each as the kernel that it names; null: none of the
  // kernels takes more than one segment.
  ForwardLaunch launch_segments = nullptr;
};

inline constexpr int kKernelAbiVersion = 18;

}  // namespace preflash
