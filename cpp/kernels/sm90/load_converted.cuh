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
        publish(k, tile, [&] { copy(k, next_slot, next); });
      }
      auto copy_next = [&] { copy(v, slot, tile); };
      if (is_first) {
        copy_next();
      } else {
        publish(v, tile, copy_next);
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
        copy_raw<1>(write, slot, tile);
      } else if constexpr (Writer::kIsK) {
        copy_raw<2>(write, slot, tile);
      } else {
        write.wait();
        copy_rows<2, 8>(write, slot, tile, TilePlaces<Traits::kTileN>(write.bytes(), first_row()));
      }
    }
    cp_async_fence();
  }

  // Publishes a tile, and calls copy_next() as soon as its part of the raw ring is free.
  template <class Writer>
  CUTE_DEVICE void publish(Writer& write, int tile, const auto& copy_next) {
    await_rows();
    const bool rotates = Writer::kIsK && params.position == Position::kRope;
    const bool widens = stored_in_8_bits() && !rotates;
    if (widens) {
      widen_rows(write, copy_next);
    } else if (Writer::kIsK) {
      write.wait();
      rotate_rows(tile * Traits::kTileN);
    }
    publish_rows(write);
    if (!widens) copy_next();
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
    typename RowConversion<Traits>::template Units<kHead> units;
    rows.template read<kHead>(units);
    __syncwarp();
    copy_next();
    write.wait();
    dispatch_8_bits(params.kv_dtype,
                    [&](auto from) { rows.template write<from, kHead>(units, write.bytes()); });
  }

  // Copies the warp's rows of a tile to the raw ring.
  template <int kBytes, class Writer>
  CUTE_DEVICE void copy_raw(const Writer& write, KeySlot slot, int tile) const {
    constexpr int kRowBytes = Writer::kHead * kBytes;
    constexpr int kLanes = kRowBytes % kBlockRowBytes == 0 ? 8 : 4;
    const std::uint32_t target = cast_smem_ptr_to_uint(write.raw()) +
                                 (first_row() + lane_id() / kLanes) * kRowBytes +
                                 lane_id() % kLanes * kCopyBytes;
    copy_rows<kBytes, kLanes>(write, slot, tile, [=](int pass, int piece) {
      return target + pass * (32 / kLanes) * kRowBytes + piece * kLanes * kCopyBytes;
    });
  }
  template <int kBytes, int kLanes, class Writer>
  CUTE_DEVICE void copy_rows(const Writer&, KeySlot slot, int tile, const auto& place) const {
    RowCopies<Traits, kWarpKeys, Writer::kHead * kBytes, kLanes>::template copy<kBytes>(
        item, tile * Traits::kTileN, first_row(), Writer::Source::tensor(params),
        Writer::Source::head_dim(params), &slot, place);
  }
};

}  // namespace preflash::sm90
