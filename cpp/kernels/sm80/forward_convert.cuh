// Conversion of operands in shared memory, between load and products: Q's sign changes if sm_scale
// is not positive; in kernels that convert on load, 8-bit elements are dequantised, and Q and K
// rotated (RoPE), once for all warps and in place.
//
// A thread fetches whole 16-byte chunks of a tile, and neighbours in one warp fetch the chunks of a
// row. So each thread dequantises its own chunks and each warp rotates its own rows, after its own
// wait and before the barrier that announces the tile. That one or two warps multiply a row
// (row_peers.cuh) changes nothing.
#pragma once

#include <bit>

#include "kernels/common/lane_angles.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm80/forward_load.cuh"

namespace preflash::sm80 {

// A [kTileRows, kHeadDim] tile as this thread sees it, and the warp that its row neighbours form.
template <class Traits, int kTileRows>
struct OwnRows {
  using Element = typename Traits::ElementKv;
  using Copy = TileCopy<Traits, Element>;
  static constexpr int kPasses = kTileRows / Traits::kRowsPerPass;
  static constexpr int kBlockColumns = Copy::kBlockColumns;
  static constexpr int kChunkElements = Copy::kChunkElements;
  static constexpr int kPassElements = Traits::kRowsPerPass * kBlockColumns;
  static constexpr int kRowsOfPass = 32 / Traits::kThreadsPerRow;  // of one warp

  Element* tile;
  int thread;

  // First row of the warp in the first pass.
  __device__ __forceinline__ int first_row() const { return thread / 32 * kRowsOfPass; }

  // `row` of the first pass; those of the others are kPassElements apart.
  __device__ __forceinline__ Element* place(int row, int column) const {
    return tile + swizzled<kTileRows>(row, column) / sizeof(Element);
  }
};

// 8-bit elements of a tile, as TileCopy leaves them, to the tile's own.
template <class Traits, int kTileRows, int kHeadDim>
struct RowWidening {
  using Rows = OwnRows<Traits, kTileRows>;
  static constexpr DType kTo = Traits::kVariant.q_dtype;

  Rows rows;

  __device__ __forceinline__ void run(DType from) const {
    dispatch_8_bits(from, [&](auto narrow) { run<narrow>(); });
  }

 private:
  // Chunks that are loaded before the first is stored, so that they wait for shared memory
  // together.
  static constexpr int kBlocks = kHeadDim / Rows::kBlockColumns;
  static constexpr int kPassesAtOnce = std::clamp(4 / kBlocks, 1, Rows::kPasses);

  template <DType kFrom>
  __device__ __forceinline__ void run() const {
    typename Rows::Copy copy(rows.thread);
    auto* own = reinterpret_cast<char*>(rows.place(copy.first_row, copy.column));
#pragma unroll 1
    for (int pass = 0; pass < Rows::kPasses; pass += kPassesAtOnce) {
      uint2 bytes[kPassesAtOnce][kBlocks];
      CUTE_UNROLL
      for (int i = 0; i < kPassesAtOnce; ++i) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          bytes[i][block] =
              *reinterpret_cast<const uint2*>(own + offset(pass + i, block) + copy.narrow_offset());
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < kPassesAtOnce; ++i) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          *reinterpret_cast<uint4*>(own + offset(pass + i, block)) =
              dequantize<kFrom, kTo>(bytes[i][block]);
        }
      }
    }
  }

  __device__ __forceinline__ static int offset(int pass, int block) {
    return (pass * Traits::kRowsPerPass + block * kTileRows) * kBlockRowBytes;
  }
};

// Lane layout of a warp that rotates rows.
template <class Traits>
struct RotaryLanes {
  static constexpr unsigned kUnits = Traits::kHeadQk / (2 * kLanePairs);
  // Above head_dim 256 a lane takes a second unit of the same row.
  static constexpr int kPerRow = std::min(32u, std::bit_ceil(kUnits));
  static constexpr int kRowsAtOnce = 32 / kPerRow;
  // Angles are computed for this many first rows of a tile; further rows follow in steps of as many
  // rows. NOTE: it must be a constant. If it depended on the tile's warps, a key would have other
  // bits in a short tile than in a tall one.
  static constexpr int kSpan = 16;
  static constexpr int kSpansOfPass = Traits::kRowsPerPass / kSpan;
  static_assert(Traits::kRowsPerPass % kSpan == 0);
  // A warp rotates the rows that it has fetched: whole rows, a few at a time.
  static_assert(32 / Traits::kThreadsPerRow % kRowsAtOnce == 0);
  static_assert(Traits::kHeadQk / 2 <= kMaxRotaryPairs);
};

template <class Traits>
__device__ __forceinline__ void fill_rotary_tables(const ConversionSegment& params,
                                                   ConversionTables<Traits>& tables, int thread) {
  for (int pair = thread; pair < params.head_dim_qk / 2; pair += Traits::kThreads) {
    std::uint64_t frequency = params.rotary.of_pair[pair];
    tables.frequency[pair] = frequency;
    tables.row_step[pair] = rotation_by(turns_at(RotaryLanes<Traits>::kRowsAtOnce, frequency));
    tables.span_step[pair] = rotation_by(turns_at(RotaryLanes<Traits>::kSpan, frequency));
  }
}

// Turns the warp's own rows of a tile of K or Q. Its lanes have waited for the rows.
template <class Traits, int kTileRows>
struct RowRotation {
  using Lanes = RotaryLanes<Traits>;
  using Rows = OwnRows<Traits, kTileRows>;
  using Element = typename Rows::Element;
  static constexpr DType kDType = Traits::kVariant.q_dtype;

  Rows rows;
  const ConversionTables<Traits>& tables;
  int half;  // of the head: pair d is elements d and d + half

  // Row r is at position first_position + r. Only a tile's first angles are computed: the others
  // follow by a few rotations, each off by another 1e-7 at most.
  __device__ __forceinline__ void run(int first_position) const {
    for_each_unit([&](int pair, int row) {
      LaneAngles angles =
          LaneAngles::at<rotation_by>(first_position + row % Lanes::kSpan, tables.frequency + pair);
      LaneAngles span_step = LaneAngles::load(tables.span_step + pair);
#pragma unroll 1
      for (int i = 0; i < Rows::kRowsOfPass; i += Lanes::kRowsAtOnce) {
        Element* low_place = rows.place(row + i, pair);
        Element* high_place = rows.place(row + i, pair + half);
        // Loads all passes first: one latency, not one per pass.
        uint2 low[Rows::kPasses], high[Rows::kPasses];
        CUTE_UNROLL
        for (int pass = 0; pass < Rows::kPasses; ++pass) {
          low[pass] = *at(low_place, pass);
          high[pass] = *at(high_place, pass);
        }
        LaneAngles of_pass = angles;
        of_pass.turn(span_step, Lanes::kSpansOfPass > 1 ? row / Lanes::kSpan : 0);
        CUTE_UNROLL
        for (int pass = 0; pass < Rows::kPasses; ++pass) {
          rotate(of_pass, low[pass], high[pass], at(low_place, pass), at(high_place, pass));
          if (pass + 1 < Rows::kPasses) of_pass.turn(span_step, Lanes::kSpansOfPass);
        }
        angles.turn(LaneAngles::load(tables.row_step + pair));
      }
    });
  }

  // Row r is at position position_of(r); fewer than end_row rows exist.
  template <class PositionOf>
  __device__ __forceinline__ void run(int end_row, PositionOf position_of) const {
    for_each_unit([&](int pair, int first_row) {
#pragma unroll 1
      for (int i = 0; i < Rows::kRowsOfPass; i += Lanes::kRowsAtOnce) {
        uint2* low = at(rows.place(first_row + i, pair), 0);
        uint2* high = at(rows.place(first_row + i, pair + half), 0);
#pragma unroll 1
        for (int row = first_row + i; row < min(end_row, kTileRows); row += Traits::kRowsPerPass) {
          rotate(LaneAngles::at<rotation_by>(position_of(row), tables.frequency + pair), *low,
                 *high, low, high);
          low += kPassStride;
          high += kPassStride;
        }
      }
    });
  }

 private:
  static constexpr int kPassStride = Rows::kPassElements * sizeof(Element) / sizeof(uint2);

  __device__ __forceinline__ static uint2* at(Element* place, int pass) {
    return reinterpret_cast<uint2*>(place) + pass * kPassStride;
  }

  __device__ __forceinline__ static void rotate(const LaneAngles& angles, uint2 low, uint2 high,
                                                uint2* low_target, uint2* high_target) {
    FourFloats low_floats = FourFloats::of<kDType>(low);
    FourFloats high_floats = FourFloats::of<kDType>(high);
    angles.rotate(low_floats, high_floats);
    low_floats.store<kDType>(low_target);
    high_floats.store<kDType>(high_target);
  }

  // Calls visit(pair, row) for what this lane has of the warp's rows, their first pair and row.
  template <class Visitor>
  __device__ __forceinline__ void for_each_unit(Visitor visit) const {
    int lane = rows.thread % 32;
    int row = rows.first_row() + lane / Lanes::kPerRow;
#pragma unroll 1
    for (int pair = lane % Lanes::kPerRow * kLanePairs; pair < half;
         pair += Lanes::kPerRow * kLanePairs) {
      visit(pair, row);
    }
  }
};

// Converts one item's operands; does nothing in kernels that convert nothing on load.
template <class Traits, bool kConverts = Traits::kConverts>
struct OperandConversion {
  using Storage = SharedStorage<Traits>;

  const KernelSegment& params;
  const RequestInfo& request;
  const WorkItem& item;
  Storage& smem;
  int thread;

  __device__ __forceinline__ void keys(int, int) const {}
  __device__ __forceinline__ void values(int) const {}
  __device__ __forceinline__ bool wanted_by_queries() const { return false; }
  __device__ __forceinline__ void queries() const {}
  template <class Scores, class At>
  __device__ __forceinline__ void scores(Scores&, const At&) const {}
};

template <class Traits>
struct OperandConversion<Traits, true> {
  using Storage = SharedStorage<Traits>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  const KernelSegment& params;
  const RequestInfo& request;
  const WorkItem& item;
  Storage& smem;
  int thread;

  // Converts the K tile in a stage. Each thread dequantises the chunks, and each warp rotates the
  // rows, that it has fetched itself.
  __device__ __forceinline__ void keys(int tile, int stage) const {
    dequantize<kTileN, Traits::kHeadQk>(smem.k[stage], params.kv_dtype);
    if (rotates()) {
      __syncwarp();
      rotation<kTileN>(smem.k[stage]).run(tile * kTileN);
    }
  }
  __device__ __forceinline__ void values(int stage) const {
    dequantize<kTileN, Traits::kHeadVo>(smem.v[stage], params.kv_dtype);
  }

  __device__ __forceinline__ bool wanted_by_queries() const {
    return rotates() || stored<Traits>(params.q_dtype) == Stored::k8Bits;
  }
  __device__ __forceinline__ void queries() const {
    dequantize<kTileM, Traits::kHeadQk>(smem.q, params.q_dtype);
    if (!rotates()) return;
    __syncwarp();
    int num_rows = request.qo_len * params.group_size - item.row_begin;
    int first_position = request.kv_len - request.qo_len;
    rotation<kTileM>(smem.q).run(num_rows, [&](int row) {
      return first_position + unpack_row(params, item.row_begin + row).token;
    });
    __syncwarp();
  }

  // The scales of the heads' fp8 operands. scores: (rows, columns) of this thread.
  template <class Scores, class At>
  __device__ __forceinline__ void scores(Scores& scores, const At& at) const {
    if (!has_head_factors<Traits>(params)) return;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      float factor = smem.conversion.row_factor[at.tile_row(r)];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = __fmul_rn(scores(r, c), factor);
    }
  }

 private:
  __device__ __forceinline__ bool rotates() const { return params.position == Position::kRope; }

  template <int kTileRows, int kHeadDim, class Element>
  __device__ __forceinline__ void dequantize(Element* tile, DType from) const {
    if (stored<Traits>(from) == Stored::kAsInTile) return;
    RowWidening<Traits, kTileRows, kHeadDim>{{tile, thread}}.run(from);
  }
  template <int kTileRows, class Element>
  __device__ __forceinline__ RowRotation<Traits, kTileRows> rotation(Element* tile) const {
    return {{tile, thread}, smem.conversion, params.head_dim_qk / 2};
  }
};

// Converts Q in shared memory, between load and the first product. Each warp changes the rows that
// it has copied itself, so its own wait is enough before and the next barrier after.
template <class Traits>
struct QPrologue {
  using ElementQ = typename Traits::ElementQ;

  const OperandConversion<Traits>& conversion;

  __device__ __forceinline__ bool wanted() const {
    return conversion.params.logits.q_factor != 1.0f || conversion.wanted_by_queries();
  }

  __device__ __forceinline__ void run() const {
    conversion.queries();
    float factor = conversion.params.logits.q_factor;
    if (!Traits::kConverts || factor != 1.0f) scale(factor);
  }

 private:
  // Applies Q's factor; rare: sm_scale <= 0.
  __device__ __forceinline__ void scale(float factor) const {
    TileCopy<Traits, ElementQ> copy(conversion.thread);
    ElementQ* own = conversion.smem.q + typename Traits::LayoutQ{}(copy.first_row, copy.column);
#pragma unroll 1
    for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
#pragma unroll 1
      for (int block = 0; block < Traits::kHeadQk / copy.kBlockColumns; ++block) {
        ElementQ* chunk =
            own + (pass * Traits::kRowsPerPass + block * Traits::kTileM) * copy.kBlockColumns;
#pragma unroll 1
        for (int i = 0; i < copy.kChunkElements; ++i) {
          chunk[i] = static_cast<ElementQ>(static_cast<float>(chunk[i]) * factor);
        }
      }
    }
  }
};

}  // namespace preflash::sm80
