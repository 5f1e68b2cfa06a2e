// Loads of K and V in slices, in the order of the consumers: V lags K by a tile, across items too.
#pragma once

#include "kernels/sm90/load_gather.cuh"
#include "kernels/sm90/load_tma.cuh"

namespace preflash::sm90 {

// Copies: a form of copying, SliceBoxes, SliceRows or ConvertedSlices.
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
      Copies::template copy<Operand::kK>(tile, 0, slices_of_k<Traits>(this->segment()));
      if (is_first) after_first();
      copy_v_before();
      before = tile;
      any_before = true;
    });
  }
  CUTE_DEVICE void drain() {
    copy_v_before();
    this->finish();
  }

 private:
  CUTE_DEVICE void copy_v_before() {
    if (!any_before) return;
    const int column = first_column<Traits>(this->segment().head_dim_vo);
    Copies::template copy<Operand::kV>(before, column, Traits::kSlicesV);
  }
};

// Slices as TMA boxes.
template <class Traits, class Writer = SliceWriter<Traits>>
struct SliceBoxes {
  using Element = typename Writer::Element;
  static constexpr int kColumns = kBlockColumns<Element>;
  static constexpr int kSliceBytes = Traits::kSliceElements * sizeof(Element);

  // A tile as its loads need it: box lane_id() of each lane.
  struct Tile {
    TmaCoordinates box;
    int kv_head;
  };

  const HopperSegment& params;
  Writer write;
  int turns;  // of other loaders until it is this one's

  CUTE_DEVICE SliceBoxes(const HopperSegment& params, SharedStorage<Traits>& smem, int loader)
      : params(params), write{smem}, turns(loader) {}

 protected:
  CUTE_DEVICE const HopperSegment& segment() const { return params; }
  CUTE_DEVICE Tile find(const ItemKeys& item, int tile) const {
    return {box_coordinates<Traits>(params, item, tile), item.kv_head};
  }
  CUTE_DEVICE static void finish() {}

  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int column, int num_slices) {
    const TensorMaps& maps = params.maps;
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice) {
      if (turns == 0) {
        write.wait();
        issue(kOperand == Operand::kK ? &maps.k : &maps.v, tile,
              column + slice * Traits::kSliceColumns);
        turns = Writer::kLoaders;
      }
      --turns;
      write.next.advance();
    }
  }

 private:
  CUTE_DEVICE void issue(const CUtensorMap* map, const Tile& tile, int column) const {
    Element* target = write.slice();
    TransactionBarrier& full = write.full();
    const int box_rows = params.box.kv_rows;
    if (elect_one_sync()) full.arrive_and_expect_tx(kSliceBytes);
    __syncwarp();
    for (int box = 0; box * box_rows < Traits::kTileN; ++box) {
      TmaCoordinates at{__shfl_sync(0xffffffffu, tile.box.page, box),
                        __shfl_sync(0xffffffffu, tile.box.x, box),
                        __shfl_sync(0xffffffffu, tile.box.r, box)};
      if (elect_one_sync()) {
        CUTE_UNROLL
        for (int block = 0; block < Traits::kSliceColumns / kColumns; ++block) {
          SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                                 static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                                 target + (block * Traits::kTileN + box * box_rows) * kColumns,
                                 column + block * kColumns, at.r, at.x, tile.kv_head, at.page);
        }
      }
      __syncwarp();
    }
  }
};

// The producer warpgroup gathers the rows of slices: one is in flight while the next is copied. Raw
// ones announce themselves.
// NOTE: consumers may wait for the slice in flight, so the next slot must come free without it. The
// slots of V and of K's last slice come free with V's second slice, at most two slots behind.
template <class Traits, class Writer = SliceWriter<Traits>>
struct SliceRows : GatherLoader<Traits> {
  using Base = GatherLoader<Traits>;
  using Element = typename Writer::Element;
  static constexpr int kBlocks = Traits::kSliceColumns / kBlockColumns<Element>;

  struct Tile {
    ItemKeys item;
    typename Base::RowSlots rows;
    int index;
  };

  Writer write;

  CUTE_DEVICE SliceRows(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : Base(params, smem), write{smem} {}

 protected:
  CUTE_DEVICE Tile find(const ItemKeys& item, int tile) {
    this->item = item;
    return {item, this->find_rows(tile), tile};
  }
  CUTE_DEVICE void finish() { Base::drain(); }

  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int column, int num_slices) {
    using Whole = TileWriter<Traits, kOperand>;
    this->item = tile.item;
    const HopperSegment& segment = this->segment();
    const KvTensor& tensor = Whole::tensor(segment);
    KvTensor columns = tensor;
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
      columns.data = static_cast<const Element*>(tensor.data) + column;
      write.wait();
      Base::template fetch<kBlocks>(tile.rows, tile.index, columns,
                                    Whole::head_dim(segment) - column, write.slice());
      this->announce(write);
    }
  }
};

}  // namespace preflash::sm90
