// Loads for kernels to which K and V come in slices (slice_ring.cuh): the ring is filled in the
// order of the consumers. V lags K by a tile, also from one item to the next.
#pragma once

#include "kernels/sm90/load_gather.cuh"
#include "kernels/sm90/load_tma.cuh"
#include "kernels/sm90/slice_ring.cuh"

namespace preflash::sm90 {

// Warps that load slices as TMA boxes, in turns: a warp issues a box in about 70 clocks, which is
// too slow for one where pages are small.
inline constexpr int kSliceLoaders = 3;

template <class Traits>
struct SliceTmaLoader {
  using Element = typename Traits::ElementKv;
  static constexpr int kColumns = kBlockColumns<Element>;
  static constexpr int kSliceBytes = Traits::kSliceElements * sizeof(Element);

  // A tile as its loads need it: box lane_id() of each lane.
  struct Tile {
    TmaCoordinates box;
    int kv_head;
  };

  const HopperSegment& params;
  SliceWriter<Traits> write;
  int turns;         // of other loaders until it is this one's
  Tile before = {};  // whose V is still to be loaded
  bool any_before = false;

  // loader: of kSliceLoaders
  __device__ __forceinline__ SliceTmaLoader(const HopperSegment& params,
                                            SharedStorage<Traits>& smem, int loader)
      : params(params), write{smem}, turns(loader) {}

  // Calls after_first() once K of the first tile has been issued.
  template <class Tiles, class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, Tiles& tiles,
                                            const AfterFirst& after_first) {
    ItemKeys item = ItemKeys::of(state);
    auto look_up = [&](int tile) { return box_coordinates<Traits>(params, item, tile); };
    for_each_tile(tiles, state, look_up, [&](int, const TmaCoordinates& box, bool is_first) {
      Tile now{box, item.kv_head};
      fetch(&params.maps.k, now, 0, slices_of_k<Traits>(params));
      if (is_first) after_first();
      drain();
      before = now;
      any_before = true;
    });
  }
  // V of the last tile.
  __device__ __forceinline__ void drain() {
    if (!any_before) return;
    fetch(&params.maps.v, before, first_column<Traits>(params.head_dim_vo), Traits::kSlicesV);
  }

 private:
  __device__ __forceinline__ void fetch(const CUtensorMap* map, const Tile& tile, int column,
                                        int num_slices) {
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice) {
      if (turns == 0) {
        write.wait();
        issue(map, tile, column + slice * Traits::kSliceColumns);
        turns = kSliceLoaders;
      }
      --turns;
      write.next.advance();
    }
  }

  __device__ __forceinline__ void issue(const CUtensorMap* map, const Tile& tile,
                                        int column) const {
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

// The whole producer warpgroup gathers the rows of slices. One is in flight while the next is
// copied. NOTE: its consumers may wait for it, so a slot must come free without it: those of V and
// of K's last slice come free with V's second slice, which lies two slots behind at most.
template <class Traits>
struct SliceGatherLoader : GatherLoader<Traits> {
  using Base = GatherLoader<Traits>;
  using typename Base::Element;
  using typename Base::RowSlots;
  static constexpr int kBlocks = Traits::kSliceColumns / Base::kColumns;

  struct Tile {
    ItemKeys item;
    RowSlots rows;
    int index;
  };

  SliceWriter<Traits> write;
  Tile before = {};  // whose V is still to be loaded
  bool any_before = false;

  __device__ __forceinline__ SliceGatherLoader(const ParamsOf<Traits>& params,
                                               SharedStorage<Traits>& smem)
      : Base(params, smem), write{smem} {}

  // Calls after_first() once K of the first tile has been issued.
  template <class Tiles, class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, Tiles& tiles,
                                            const AfterFirst& after_first) {
    const ItemKeys item = ItemKeys::of(state);
    auto look_up = [&](int tile) {
      this->item = item;
      return this->find_rows(tile);
    };
    for_each_tile(tiles, state, look_up, [&](int tile, const RowSlots& rows, bool is_first) {
      Tile now{item, rows, tile};
      const HopperSegment& segment = this->segment();
      fetch(now, segment.k, segment.head_dim_qk, 0, slices_of_k<Traits>(segment));
      if (is_first) after_first();
      fetch_v_before();
      before = now;
      any_before = true;
    });
  }
  __device__ __forceinline__ void drain() {
    fetch_v_before();
    Base::drain();
  }

 private:
  __device__ __forceinline__ void fetch_v_before() {
    if (!any_before) return;
    const HopperSegment& segment = this->segment();
    fetch(before, segment.v, segment.head_dim_vo, first_column<Traits>(segment.head_dim_vo),
          Traits::kSlicesV);
  }

  __device__ __forceinline__ void fetch(const Tile& tile, const KvTensor& tensor, int head_dim,
                                        int column, int num_slices) {
    this->item = tile.item;
    KvTensor columns = tensor;
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
      columns.data = static_cast<const Element*>(tensor.data) + column;
      write.wait();
      Base::template fetch<kBlocks>(tile.rows, tile.index, columns, head_dim - column,
                                    write.slice());
      this->publish_before(write.full());
      write.next.advance();
    }
  }
};

}  // namespace preflash::sm90
