// Loads of K and V in slices, in the order of the consumers: V lags K by a tile, across items too.
#pragma once

#include "kernels/sm90/load_gather.cuh"
#include "kernels/sm90/load_tma.cuh"

namespace preflash::sm90 {

// Copies: a form of copying, SliceBoxes, SliceRows or ConvertedSlices. It looks up all keys of a
// tile, and copies one part of them, all of K's columns or this CTA's of V, slice by slice.
template <class Traits, class Copies>
struct KvSliceLoader : Copies {
  using Tile = typename Copies::Tile;
  using Copies::Copies;

  Tile before = {};  // whose V is still to be loaded
  bool any_before = false;

  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    const ItemKeys item = ItemKeys::of(state);
    auto look_up = [&](int tile) { return this->find(item, tile); };
    for_each_tile(tiles, state, look_up, [&](const Tile& tile, bool is_first) {
      const int num_slices = slices_of_k<Traits>(this->segment());
      Copies::template copy<Operand::kK>(tile, cta_rank<Traits>(), 0, num_slices);
      if (is_first) after_first();
      copy_v_before();
      before = tile;
      any_before = true;
    });
  }
  CUTE_DEVICE void drain() {
    copy_v_before();
    Copies::drain();
  }

 private:
  CUTE_DEVICE void copy_v_before() {
    if (!any_before) return;
#pragma unroll 1
    for (int i = 0; i < Traits::kClusterSize; ++i) {
      const int part = cta_rank<Traits>() ^ i;
      Copies::template copy<Operand::kV>(before, part, first_column<Traits>(), Traits::kSlicesV);
    }
  }
};

// Slices as TMA boxes.
template <class Traits, class Writer>
struct SliceBoxes {
  static constexpr int kBlocks = Traits::kSliceColumns / kBlockColumns<typename Writer::Element>;

  // A tile as its loads need it: box lane_id() of each lane.
  struct Tile {
    TmaCoordinates box;
    int kv_head;
  };

  const HopperSegment& params;
  Writer write;
  int loader;
  int turns;  // of other loaders until it is this one's

  CUTE_DEVICE SliceBoxes(const HopperSegment& params, SharedStorage<Traits>& smem, int loader)
      : params(params), write{smem}, loader(loader), turns(loader) {}

 protected:
  CUTE_DEVICE static void drain() {}
  CUTE_DEVICE const HopperSegment& segment() const { return params; }
  CUTE_DEVICE Tile find(const ItemKeys& item, int tile) const {
    return {box_coordinates<Traits>(params, item, tile), item.kv_head};
  }

  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int part, int column, int num_slices) {
    const int lane = lane_id() + part * (Traits::kTileN / params.box.kv_rows);
    const TmaCoordinates box{__shfl_sync(0xffffffffu, tile.box.page, lane),
                             __shfl_sync(0xffffffffu, tile.box.x, lane),
                             __shfl_sync(0xffffffffu, tile.box.r, lane)};
    const KvMaps& maps = kOperand == Operand::kK ? params.maps.k : params.maps.v;
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
      if (turns == 0) {
        write.wait();
        load_boxes<Traits, kBlocks>(maps, TMA::CacheHintSm90::EVICT_LAST, params.box.kv_rows, box,
                                    tile.kv_head, column, write, loader);
        turns = Writer::kLoaders;
      }
      --turns;
      write.next.advance();
    }
  }
};

// Producer warps gather the rows of slices: one is in flight while the next is copied. Raw
// ones announce themselves.
// NOTE: consumers may wait for the slice in flight, so the next slot must come free without it. The
// slots of a tile's last slice of K and of V come free, at the latest, two slices behind.
template <class Traits, class Writer, int kWarps = kWarpgroupWarps>
struct SliceRows : GatherLoader<Traits, Writer, Writer, kWarps> {
  using Base = GatherLoader<Traits, Writer, Writer, kWarps>;
  using Element = typename Writer::Element;
  static constexpr int kBlocks = Traits::kSliceColumns / kBlockColumns<Element>;

  struct Tile {
    ItemKeys item;
    typename Base::RowSlots rows;
  };

  Writer write;

  CUTE_DEVICE SliceRows(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : Base(params, smem), write{smem} {}

 protected:
  CUTE_DEVICE Tile find(const ItemKeys& item, int tile) {
    this->item = item;
    return {item, this->find_rows(tile)};
  }

  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int part, int column, int num_slices) {
    using Source = SourceOf<kOperand>;
    const auto rows = this->rows_of_part(tile.rows, part);
    this->item = tile.item;
    const HopperSegment& segment = this->segment();
    const KvTensor& tensor = Source::tensor(segment);
    KvTensor columns = tensor;
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
      columns.data = static_cast<const Element*>(tensor.data) + column;
      write.wait();
      Base::template fetch<kBlocks>(rows, columns, Source::head_dim(segment) - column,
                                    write.tile());
      this->announce(write);
    }
  }
};

}  // namespace preflash::sm90
