// Loads of K and V that are converted on load: rows as stored go to the raw ring, from there by way
// of forward_convert.cuh to their tiles. V of 16 bits goes to its tile at once.
#pragma once

#include "kernels/sm90/copy_rows.cuh"
#include "kernels/sm90/forward_convert.cuh"
#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/tile_stream.cuh"

namespace preflash::sm90 {

// Each producer warp has a share of the rows of both operands, and waits only for its own copies.
template <class Traits>
struct ConvertedLoader {
  static constexpr int kWarpKeys = Traits::kTileN / Traits::kProducerWarps;
  static_assert(kWarpKeys <= 32, "a lane looks up the page of one row");

  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  TileWriter<Traits, Operand::kK> k{smem};
  TileWriter<Traits, Operand::kV> v{smem};
  ItemKeys item;

  CUTE_DEVICE ConvertedLoader(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : params(params.segments[0]), smem(smem) {}

  // Publishes K(last), then K(t - 1) and V(t) for each tile, in the order of the consumers. In each
  // operand copies run one tile ahead and page lookups two. Every copy is a group, an empty one
  // where there is no tile, so one group is always in flight.
  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    item = ItemKeys::of(state);
    int tile = tiles.first(state);
    KeySlot slot = find_slot_of_lane(tile);
    int next = tiles.next();
    KeySlot next_slot = find_slot_of_lane(next);
    copy(k, slot, tile);
    cp_async_fence();
    after_first();
    // The iteration behind the last tile publishes the last V.
#pragma unroll 1
    for (bool is_first = true, is_last = false; !is_last; is_first = false) {
      const int ahead = tiles.next();
      KeySlot ahead_slot = find_slot_of_lane(ahead);
      is_last = tile == kNoTile;
      if (is_last) {
        cp_async_fence();
      } else {
        publish_k(tile, [&] { copy(k, next_slot, next); });
      }
      auto copy_next = [&] { copy(v, slot, tile); };
      if (is_first) {
        copy_next();
      } else {
        publish_v(copy_next);
      }
      tile = next;
      slot = next_slot;
      next = ahead;
      next_slot = ahead_slot;
    }
  }

 private:
  CUTE_DEVICE static int first_row() { return threadIdx.x / 32 * kWarpKeys; }
  CUTE_DEVICE bool stored_in_8_bits() const {
    return Traits::kWidens && size_of(params.kv_dtype) == 1;
  }
  CUTE_DEVICE KeySlot find_slot_of_lane(int tile) const {
    return find_slot_within(params, item, tile * Traits::kTileN + first_row() + lane_id());
  }

  template <class Writer>
  CUTE_DEVICE void copy(const Writer& write, KeySlot slot, int tile) const {
    if (tile != kNoTile) {
      if (stored_in_8_bits()) {
        copy_rows<1, Place::kRaw>(write, slot, tile, write.raw());
      } else if constexpr (Writer::kIsK) {
        copy_rows<2, Place::kRaw>(write, slot, tile, write.raw());
      } else {
        write.wait();
        copy_rows<2, Place::kTile>(write, slot, tile, write.bytes());
      }
    }
    cp_async_fence();
  }

  // Publish a tile, and call copy_next() as soon as its part of the raw ring is free.
  CUTE_DEVICE void publish_k(int tile, const auto& copy_next) {
    await_rows();
    const bool rotates = !stored_in_8_bits() || params.position == Position::kRope;
    if (rotates) {
      k.wait();
      rotate_rows(tile * Traits::kTileN);
    } else {
      widen_rows(k, copy_next);
    }
    publish_rows(k);
    if (rotates) copy_next();
  }
  CUTE_DEVICE void publish_v(const auto& copy_next) {
    await_rows();
    if (!stored_in_8_bits()) {
      publish_rows(v);
      copy_next();
      return;
    }
    widen_rows(v, copy_next);
    publish_rows(v);
  }
  // Waits until all of the warp's groups but the last one have arrived.
  CUTE_DEVICE static void await_rows() {
    cp_async_wait<1>();
    __syncwarp();
  }

  CUTE_DEVICE void rotate_rows(int first_key) const {
    auto rotate = [&](auto from) {
      RowConversion<Traits>{k.raw(), first_row()}.template rotate<from>(
          smem, first_key, params.head_dim_qk, k.bytes());
    };
    if (stored_in_8_bits()) {
      dispatch_8_bits(params.kv_dtype, rotate);
    } else {
      rotate(C<Traits::kVariant.kv_dtype>{});
    }
  }
  template <class Writer>
  CUTE_DEVICE void widen_rows(const Writer& write, const auto& copy_next) const {
    constexpr int kHead = Writer::kHead;
    RowConversion<Traits> rows{write.raw(), first_row()};
    auto narrow = rows.template read<kHead>();
    __syncwarp();
    copy_next();
    write.wait();
    dispatch_8_bits(params.kv_dtype,
                    [&](auto from) { rows.template write<from, kHead>(narrow, write.bytes()); });
  }

  enum class Place { kRaw, kTile };

  // Copies the warp's rows of a tile.
  template <int kElementBytes, Place kPlace, class Writer>
  CUTE_DEVICE void copy_rows(const Writer&, KeySlot slot, int tile, unsigned char* target) const {
    constexpr int kRowBytes = Writer::kHead * kElementBytes;
    constexpr int kPieces = kRowBytes / kCopyBytes;
    constexpr int kLanes = kPieces % 8 == 0 ? 8 : 4;  // for one row
    constexpr int kRowsAtOnce = 32 / kLanes;
    static_assert(kPieces % kLanes == 0 && kWarpKeys % kRowsAtOnce == 0);
    const KvTensor& tensor = Writer::tensor(params);
    int head_dim = Writer::head_dim(params);
    int first_key = tile * Traits::kTileN;
    copy_tile<Traits>(item, first_key, head_dim == Writer::kHead, [&](auto rows) {
      int lane_byte = lane_id() % kLanes * kCopyBytes;
      const auto* head = static_cast<const unsigned char*>(tensor.data) +
                         item.kv_head * tensor.stride_head * kElementBytes + lane_byte;
      std::int64_t lane_offset = slot_offset(tensor, slot) * kElementBytes;
      CUTE_UNROLL
      for (int pass = 0; pass < kWarpKeys / kRowsAtOnce; ++pass) {
        int warp_row = pass * kRowsAtOnce + lane_id() / kLanes;
        const unsigned char* source = head + __shfl_sync(0xffffffffu, lane_offset, warp_row);
        int row = first_row() + warp_row;
        CUTE_UNROLL
        for (int i = 0; i < kPieces / kLanes; ++i) {
          int byte = i * kLanes * kCopyBytes;
          int place = kPlace == Place::kRaw ? row * kRowBytes + lane_byte + byte
                                            : swizzled<Traits::kTileN>(row, (lane_byte + byte) / 2);
          copy_piece<rows>(item, first_key + row, head_dim * kElementBytes - lane_byte - byte,
                           cast_smem_ptr_to_uint(target + place), source + byte);
        }
      }
    });
  }
};

}  // namespace preflash::sm90
