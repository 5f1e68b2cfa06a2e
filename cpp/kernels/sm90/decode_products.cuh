// The operands and products of one warp of a decode kernel, by mma.sync: 16 rows of Q, which stay
// in registers, and a slice of keys. Their order is free where both sides of a product share it: of
// dimensions in Q K^T, of columns of V in P V. So a lane reads neighbouring bytes, and V needs no
// transpose.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "kernels/common/dequantize.cuh"
#include "kernels/common/lane_angles.cuh"
#include "kernels/sm90/decode_load.cuh"

namespace preflash::sm90 {

// The item's rows of Q as operands: with their sign, over 8 bits dequantized or narrowed to
// float16.
template <class Traits>
struct DecodeQuery {
  static constexpr int kRows = 2;                      // of one lane
  static constexpr int kSteps = Traits::kHeadQk / 16;  // of 16 dimensions
  static constexpr int kStepsOfPiece = 4 / Traits::kStoredBytes;

  std::uint32_t operand[kSteps][4];
  float factor[kRows];  // of a row's scores, where Q is narrowed

  // The dimensions of the lane's elements of a step: four neighbouring ones.
  CUTE_DEVICE static int dimension(int step) {
    int piece = step / kStepsOfPiece * 4 + lane_id() % 4;
    return (piece * kStepsOfPiece + step % kStepsOfPiece) * 4;
  }

  CUTE_DEVICE float scale(const auto&, int r) const { return factor[r]; }
  CUTE_DEVICE void load(const ItemView& item) {
    const HopperSegment& params = item.params;
    auto load_rows = [&](auto from) { for_rows([&](int r) { load_row<from>(item, r); }); };
    if (Traits::kConverts && params.q_dtype == DType::kFloat8E4M3) {
      load_rows(C<DType::kFloat8E4M3>{});
    } else if (Traits::narrows_query(params.q_dtype)) {
      load_rows(C<DType::kBFloat16>{});
    } else {
      load_rows(C<Traits::kProducts>{});
    }
  }

 private:
  template <DType kFrom>
  CUTE_DEVICE void load_row(const ItemView& item, int r) {
    const HopperSegment& params = item.params;
    int row = lane_id() / 4 + r * 8;
    const PackedRow packed = item.packed(row);
    const std::int64_t token = std::int64_t{item.request.qo_begin} + packed.token;
    const std::int64_t offset =
        token * params.q.stride_token + item.query_head(packed) * params.q.stride_head;
    const auto* source = static_cast<const unsigned char*>(params.q.data) + offset * size_of(kFrom);
    FourStored<kFrom> stored[kSteps];
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      stored[step] = {};
      if (row < item.num_rows && dimension(step) < params.head_dim_qk) {
        stored[step] = __ldg(
            reinterpret_cast<const FourStored<kFrom>*>(source + dimension(step) * size_of(kFrom)));
      }
    }
    float scale = params.logits.q_factor;
    factor[r] = 1.0f;
    if constexpr (Traits::narrows_query(kFrom)) {
      float maximum = 0.0f;
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        maximum = fmaxf(maximum, FourFloats::of<kFrom>(stored[step]).maximum());
      }
      float narrowing = narrowing_factor(OnlineSoftmax<2>::quad_max(maximum));
      factor[r] = 1.0f / narrowing;
      scale *= narrowing;
    }
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      FourFloats four = FourFloats::of<kFrom>(stored[step]);
      four.multiply(scale);
      operand[step][r] = Pair<Traits::kProducts>::from_floats(four.pair[0]);
      operand[step][2 + r] = Pair<Traits::kProducts>::from_floats(four.pair[1]);
    }
  }
};

template <class Traits>
struct DecodeProducts {
  static constexpr int kKeyBlocks = Traits::kTileN / 8;
  static constexpr int kColumnBlocks = Traits::kHeadVo / 8;
  static constexpr int kBytes = Traits::kStoredBytes;
  static constexpr int kStepsOfPiece = DecodeQuery<Traits>::kStepsOfPiece;
  // 8 groups of lanes share a row of V, in pieces of so many elements.
  static constexpr int kPieceV = std::min(16 / kBytes, Traits::kHeadVo / 8);
  static constexpr int kLoadsV = Traits::kHeadVo / (8 * kPieceV);

  template <int kBlocks>
  using LayoutC = Layout<Shape<Shape<_2, _2, Int<kBlocks>>, _1, _1>>;
  using AccumulatorS = decltype(make_tensor<float>(LayoutC<kKeyBlocks>{}));
  using AccumulatorO = decltype(make_tensor<float>(LayoutC<kColumnBlocks>{}));
  using OperandP =
      decltype(make_tensor<typename Traits::ElementP>(as_operand_a(LayoutC<kKeyBlocks>{})));

  AccumulatorS scores;
  OperandP tOrP;
  AccumulatorO out;

  // (rows, columns) of this lane
  CUTE_DEVICE auto rows_of_s() {
    return make_tensor(scores.data(), as_rows_and_columns(scores.layout()));
  }
  CUTE_DEVICE auto rows_of_o() {
    return make_tensor(out.data(), as_rows_and_columns(out.layout()));
  }

  CUTE_DEVICE static void prepare_o(const auto&, const auto&) {}

  // S = Q K^T. k: the slice
  template <DType kFrom>
  CUTE_DEVICE void multiply_qk(const DecodeQuery<Traits>& q, const unsigned char* k) {
    using Places = SlicePlaces<Traits::kHeadQk * kBytes>;
    clear(scores);
    CUTE_UNROLL
    for (int piece = 0; piece < Places::kPieces / 4; ++piece) {
      uint4 stored[kKeyBlocks];
      CUTE_UNROLL
      for (int block = 0; block < kKeyBlocks; ++block) {
        int place = Places::of_k(block * 8 + lane_id() / 4, piece * 4 + lane_id() % 4);
        stored[block] = *reinterpret_cast<const uint4*>(k + place);
      }
      CUTE_UNROLL
      for (int i = 0; i < kStepsOfPiece; ++i) {
        CUTE_UNROLL
        for (int block = 0; block < kKeyBlocks; ++block) {
          FourElements four = elements<kFrom>(&stored[block].x + i * kBytes);
          multiply(&scores(block * 4), q.operand[piece * kStepsOfPiece + i], four.pair[0],
                   four.pair[1]);
        }
      }
    }
  }

  // O += P V. v: the slice
  template <DType kFrom>
  CUTE_DEVICE void multiply_pv(const unsigned char* v) {
    using Places = SlicePlaces<Traits::kHeadVo * kBytes>;
    Tensor p = recast<std::uint32_t>(tOrP);
    CUTE_UNROLL
    for (int step = 0; step < Traits::kTileN / 16; ++step) {
      CUTE_UNROLL
      for (int load = 0; load < kLoadsV; ++load) {
        PieceV stored[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int row = step * 16 + lane_id() % 4 * 2 + i / 2 * 8 + i % 2;
          int byte = load * 128 + lane_id() / 4 * (kPieceV * kBytes);
          stored[i] =
              *reinterpret_cast<const PieceV*>(v + Places::of_v(row, byte / 16) + byte % 16);
        }
        CUTE_UNROLL
        for (int i = 0; i < kPieceV * kBytes / 4; ++i) {
          multiply_columns<kFrom>(&out((load * kPieceV + i * (4 / kBytes)) * 4), &p(step * 4),
                                  (&stored[0].x)[i], (&stored[1].x)[i], (&stored[2].x)[i],
                                  (&stored[3].x)[i]);
        }
      }
    }
  }

  // The first of the neighbouring columns of O that a lane has in a load, of c = 0 or 1.
  CUTE_DEVICE static int first_column(int load, int c) {
    return load * 8 * kPieceV + (lane_id() % 4 * 2 + c) * kPieceV;
  }

 private:
  using PieceV = conditional_t<kPieceV * kBytes == 16, uint4, uint2>;

  CUTE_DEVICE static void multiply(float* c, const std::uint32_t* a, std::uint32_t b0,
                                   std::uint32_t b1) {
    using Instruction = conditional_t<Traits::kProducts == DType::kFloat16,
                                      SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
    Instruction::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                     c[3]);
  }
  // Four neighbouring elements from these words on.
  template <DType kFrom>
  CUTE_DEVICE static FourElements elements(const std::uint32_t* words) {
    if constexpr (kBytes == 1) {
      return dequantize<kFrom, DType::kFloat16>(words[0]);
    } else {
      return {words[0], words[1]};
    }
  }
  // The columns of a word, four or two, of 16 keys: of keys 2 q, 2 q + 1, and those 8 after them.
  template <DType kFrom>
  CUTE_DEVICE static void multiply_columns(float* c, const std::uint32_t* a, std::uint32_t key0,
                                           std::uint32_t key1, std::uint32_t key8,
                                           std::uint32_t key9) {
    if constexpr (kBytes == 2) {
      multiply(c, a, __byte_perm(key0, key1, 0x5410), __byte_perm(key8, key9, 0x5410));
      multiply(c + 4, a, __byte_perm(key0, key1, 0x7632), __byte_perm(key8, key9, 0x7632));
    } else {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const unsigned select = half == 0 ? 0x5140 : 0x7362;
        FourElements low = dequantize<kFrom, DType::kFloat16>(__byte_perm(key0, key1, select));
        FourElements high = dequantize<kFrom, DType::kFloat16>(__byte_perm(key8, key9, select));
        multiply(c + half * 8, a, low.pair[0], high.pair[0]);
        multiply(c + half * 8 + 4, a, low.pair[1], high.pair[1]);
      }
    }
  }
};

}  // namespace preflash::sm90
