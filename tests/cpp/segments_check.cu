// Kernels over two segments, as far as the device code of both families has them: compiled, and run
// nowhere yet. What belongs to an item takes the segment that its request names; the tile may
// differ from segment to segment.
#include <cstdio>
#include <iterator>

#include "kernels/sm80/forward_kernel.cuh"
#include "kernels/sm90/forward_kernel.cuh"

namespace preflash {
namespace {

struct PrefillSm80 {
  static constexpr Variant kVariant = {.family = Family::kSm80,
                                       .q_dtype = DType::kBFloat16,
                                       .kv_dtype = DType::kBFloat16,
                                       .head_dim_qk = 128,
                                       .head_dim_vo = 128,
                                       .mask = Mask::kCustom};
  static constexpr TileShape kTile = {.m = 128, .n = 64, .ctas_per_sm = 2};
};

struct DecodeSm80 {
  static constexpr Variant kVariant = {.family = Family::kSm80,
                                       .q_dtype = DType::kBFloat16,
                                       .kv_dtype = DType::kBFloat16,
                                       .head_dim_qk = 128,
                                       .head_dim_vo = 128,
                                       .tile_class = TileClass::kDecode};
  static constexpr TileShape kTile = {.m = 64, .n = 64, .stages = 2, .ctas_per_sm = 2};
};

struct Sm90 {
  static constexpr Variant kVariant = {.family = Family::kSm90,
                                       .q_dtype = DType::kBFloat16,
                                       .kv_dtype = DType::kBFloat16,
                                       .head_dim_qk = 128,
                                       .head_dim_vo = 128};
  static constexpr TileShape kTile = {.m = 128, .n = 128, .stages = 2, .warps = 12};
};

template <class First, class Second>
__global__ void __launch_bounds__(128)
    two_segments(const __grid_constant__ LaunchParams<KernelSegment, 2> params) {
  using FirstTraits = sm80::ForwardTraits<First>;
  using SecondTraits = sm80::ForwardTraits<Second>;
  static_assert(FirstTraits::kThreads == 128 && SecondTraits::kThreads == 128);
  extern __shared__ __align__(128) unsigned char smem[];
  const WorkItem& item = params.items[blockIdx.x];
  const RequestInfo request = params.requests[item.request];
  const KernelSegment& segment = params.segment_of(request);
  int thread = threadIdx.x;
  if (request.segment == 0) {
    auto& storage = *reinterpret_cast<sm80::SharedStorage<FirstTraits>*>(smem);
    sm80::run_item(segment, request, item, storage, thread);
  } else {
    auto& storage = *reinterpret_cast<sm80::SharedStorage<SecondTraits>*>(smem);
    sm80::run_item(segment, request, item, storage, thread);
  }
}

}  // namespace
}  // namespace preflash

int main() {
  using namespace preflash;
  static_assert(sizeof(LaunchParams<sm90::HopperSegment, 2>) <= 4096, "what a launch may pass");
  // Kernels whose address is taken are compiled.
  const void* kernels[] = {reinterpret_cast<const void*>(&two_segments<PrefillSm80, DecodeSm80>),
                           reinterpret_cast<const void*>(&sm90::forward_kernel<Sm90>)};
  std::printf("%zu kernels over two segments were compiled\n", std::size(kernels));
  return kernels[0] == kernels[1];
}
