// Which KV tiles of an item a custom mask leaves, found in its bits by the producer warp that
// announces them.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

// Looks through the mask from an item's last tile on. One look reads every token's bits of several
// tiles, 32 keys to a lane, and answers for all of these tiles.
template <class Traits>
struct MaskScan {
  static constexpr int kWordBits = 32;
  static constexpr int kTileWords = Traits::kTileN / kWordBits;
  // NOTE: tokens begin at any bit, so a lane needs the next lane's word too, and the last has none.
  static constexpr int kScanTiles = 31 / kTileWords;
  static constexpr int kBatch = Traits::kProducerRegisters >= 56 ? 12 : 6;  // tokens
  static_assert(Traits::kTileN % kWordBits == 0);

  const std::uint32_t* words;  // of the whole mask
  std::uint64_t first_bit;     // of the item's first token
  int num_tokens;
  int kv_len;
  TileRange tiles;  // that the bounds leave, and those of which they keep everything
  int scanned;      // the first tile of the last look
  // Bit l: of lane l's keys in the last look.
  std::uint32_t any;  // some token keeps one
  std::uint32_t all;  // all tokens keep all

  __device__ __forceinline__ static MaskScan of(const HopperSegment& params,
                                                const RequestInfo& request, RowSpan tokens,
                                                const TileRange& tiles) {
    std::int64_t first_bit = request.mask_begin * 8 + std::int64_t{tokens.first} * request.kv_len;
    return {reinterpret_cast<const std::uint32_t*>(params.extras.mask_bits),
            static_cast<std::uint64_t>(first_bit),
            tokens.last - tokens.first + 1,
            request.kv_len,
            tiles,
            tiles.end,
            0,
            0};
  }

  // The last tile before `end` of which a key may be kept; tiles.begin - 1: there is none.
  __device__ __forceinline__ int last_kept_before(int end) {
    int tile = end - 1;
    for (; tile >= tiles.begin; --tile) {
      if (tile < scanned) look_at(max(tile - kScanTiles + 1, tiles.begin));
      if (bits_of(any, tile) != 0) break;
    }
    return tile;
  }
  // Whether all tokens keep all of the tile that was found last.
  __device__ __forceinline__ bool is_whole(int tile) const {
    return bits_of(all, tile) == (1u << kTileWords) - 1 && !tiles.needs_mask(tile);
  }

 private:
  __device__ __forceinline__ std::uint32_t bits_of(std::uint32_t lanes, int tile) const {
    return lanes >> ((tile - scanned) * kTileWords) & ((1u << kTileWords) - 1);
  }

  // Bounds but the request's end are left out here: they only make fewer keys kept, and is_whole()
  // asks for them.
  __device__ __forceinline__ void look_at(int first_tile) {
    scanned = first_tile;
    int keys_left = kv_len - first_tile * Traits::kTileN - lane_id() * kWordBits;
    // NOTE: at most the word behind the one with the last bit: so much is readable (RunExtras).
    bool reads = keys_left + kWordBits - 1 > 0;
    // Bits of a batch of tokens are counted in 32 bits; longer rows come one by one.
    int step = kv_len < 1 << 26 ? kBatch : 1;
    std::uint32_t kept = 0;
    std::uint32_t missing = 0;
    // Two batches are in flight.
    Batch batch = read_batch(first_tile, 0, step, reads);
    for (int token = step; token < num_tokens; token += step) {
      Batch next = read_batch(first_tile, token, step, reads);
      add(batch, kept, missing);
      batch = next;
    }
    add(batch, kept, missing);
    if (keys_left < kWordBits) kept &= keys_left > 0 ? (1u << keys_left) - 1 : 0u;
    any = __ballot_sync(0xffffffffu, kept != 0);
    all = __ballot_sync(0xffffffffu, missing == 0);
  }

  // A word of each token, and where the lane's bits begin in the first and the last token's.
  struct Batch {
    std::uint32_t raw[kBatch];
    std::uint32_t first;
    std::uint32_t last;
  };

  __device__ __forceinline__ Batch read_batch(int tile, int token, int step, bool reads) const {
    std::uint64_t bit = first_bit + static_cast<std::uint64_t>(token) * kv_len +
                        static_cast<std::uint64_t>(tile) * Traits::kTileN;
    const std::uint32_t* first_word = words + bit / kWordBits + lane_id();
    Batch batch;
    batch.first = bit % kWordBits;
    batch.last = batch.first + (min(step, num_tokens - token) - 1) * kv_len;
    // What is left of the batch reads its last token again.
    std::uint32_t at = batch.first;
    CUTE_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      batch.raw[i] = reads ? __ldg(first_word + at / kWordBits) : 0u;
      at = min(at + kv_len, batch.last);
    }
    return batch;
  }
  __device__ __forceinline__ void add(const Batch& batch, std::uint32_t& kept,
                                      std::uint32_t& missing) const {
    std::uint32_t at = batch.first;
    CUTE_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      std::uint32_t next = __shfl_down_sync(0xffffffffu, batch.raw[i], 1);
      std::uint32_t word = __funnelshift_r(batch.raw[i], next, at);
      kept |= word;
      missing |= ~word;
      at = min(at + kv_len, batch.last);
    }
  }
};

}  // namespace preflash::sm90
