// The table that libpreflash_kernels_common.so exports. Checks what a launch cannot survive, sets
// the device, launches. No decisions.
#include "preflash/device_services.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "cuda/device_facts.h"
#include "cuda/device_guard.h"
#include "cuda/launch_error.h"
#include "cuda/pinned_memory.h"
#include "cuda/plan_uploader.h"
#include "kernels/combine/combine.h"
#include "kernels/common/append_paged_kv.h"
#include "kernels/common/mask_tiles.h"
#include "kernels/common/merge_states.h"
#include "kernels/common/pack_bits.h"
#include "kernels/common/request_lengths.h"
#include "kernels/prepass/prepass.h"

namespace preflash {
namespace {

PlanUploader* create_uploader(int device) { return new (std::nothrow) PlanUploader(device); }

void destroy_uploader(PlanUploader* uploader) { delete uploader; }

LaunchError acquire(PlanUploader* uploader, std::size_t bytes, void** host) {
  if (uploader == nullptr) return usage_error("plan upload: no uploader (out of host memory?)");
  return uploader->acquire(bytes, host);
}

LaunchError submit(PlanUploader* uploader, std::span<const StagedCopy> parts,
                   const PerSegment<ArrayCopy>& arrays, void* stream) {
  if (uploader == nullptr) return usage_error("plan upload: no uploader (out of host memory?)");
  return uploader->submit(parts, arrays, static_cast<cudaStream_t>(stream));
}

LaunchError extend(PlanUploader* uploader, void* stream) {
  if (uploader == nullptr) return usage_error("plan upload: no uploader (out of host memory?)");
  return uploader->extend(static_cast<cudaStream_t>(stream));
}

LaunchError join(PlanUploader* uploader, void* stream) {
  if (uploader == nullptr) return usage_error("plan upload: no uploader (out of host memory?)");
  return uploader->join(static_cast<cudaStream_t>(stream));
}

LaunchError create_pinned(int device, std::size_t bytes, PinnedArray** array, void** host) {
  std::unique_ptr<PinnedArray> made(new (std::nothrow) PinnedArray(device));
  if (made == nullptr) return usage_error("plan upload: out of host memory");
  if (LaunchError error = made->reserve(bytes, host)) return error;
  *array = made.release();
  return nullptr;
}

void destroy_pinned(PinnedArray* array) { delete array; }

bool pinned_is_free(PinnedArray* array) { return array->is_free(); }

cudaStream_t stream_of(const LaunchTarget& target) {
  return static_cast<cudaStream_t>(target.stream);
}

LaunchError launch_forward(const ForwardKernel& kernel, const ForwardParams& params, int num_ctas,
                           const LaunchTarget& target) {
  if (kernel.launch == nullptr) {
    return usage_error("kernel %s has no launch function", kernel.id ? kernel.id : "(unnamed)");
  }
  if (num_ctas <= 0) return nullptr;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return kernel.launch(params, num_ctas, target);
}

bool is_capturing(const LaunchTarget& target) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream_of(target), &status) != cudaSuccess) {
    cudaGetLastError();  // the default stream beside another stream's capture
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

// An event of each device, which one call at a time records and waits for.
class OrderingEvents {
 public:
  LaunchError order(cudaStream_t before, const LaunchTarget& target) {
    const std::lock_guard lock(mutex_);
    cudaEvent_t& event = events_[target.device];
    cudaError_t status = cudaSuccess;
    if (event == nullptr) status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (status == cudaSuccess) status = cudaEventRecord(event, before);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(stream_of(target), event, 0);
    return runtime_error(status, "ordering a stream behind another");
  }

 private:
  std::mutex mutex_;
  std::map<int, cudaEvent_t> events_;
};

LaunchError order_behind(void* before, const LaunchTarget& target) {
  // Lives as long as the process: the driver may be gone when static objects are destroyed.
  static auto& events = *new OrderingEvents;
  if (is_capturing({.device = target.device, .stream = before})) return nullptr;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return events.order(static_cast<cudaStream_t>(before), target);
}

LaunchError refuse_dtype(const char* what, DType dtype) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32) {
    return nullptr;
  }
  std::string_view name = name_of(dtype);
  return usage_error("%s: dtype %.*s is not supported; use f16, bf16 or f32", what,
                     static_cast<int>(name.size()), name.data());
}

LaunchError combine(const CombineParams& params, const LaunchTarget& target) {
  if (params.o_dtype != DType::kFloat8E4M3) {
    if (LaunchError error = refuse_dtype("combine", params.o_dtype)) return error;
  }
  if (params.head_dim_vo <= 0 || params.head_dim_vo % 8 != 0 || params.grid.group_size <= 0 ||
      params.grid.rows_per_tile <= 0) {
    return usage_error(
        "combine: head_dim_vo %d must be a positive multiple of 8, group_size %d and "
        "rows_per_tile %d positive",
        params.head_dim_vo, params.grid.group_size, params.grid.rows_per_tile);
  }
  if (params.num_merges <= 0) return nullptr;
  DeviceFacts facts;
  if (LaunchError error = query_device(target.device, &facts)) return error;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_combine(params, facts.num_sms, stream_of(target)),
                       "launching combine");
}

LaunchError prepass(const PrepassParams& params, const LaunchTarget& target) {
  if (params.to_dtype != DType::kFloat16 && params.to_dtype != DType::kBFloat16) {
    return usage_error("pre-pass: copies have 16 bits, f16 or bf16");
  }
  if (params.num_requests <= 0) return nullptr;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_prepass(params, stream_of(target)), "launching the pre-pass");
}

LaunchError merge_states(const MergeStatesParams& params, const LaunchTarget& target) {
  if (LaunchError error = refuse_dtype("merge_states", params.dtype)) return error;
  if (params.num_tokens <= 0 || params.num_heads <= 0) return nullptr;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_merge_states(params, stream_of(target)), "launching merge_states");
}

LaunchError set_lengths(const RequestLengths& lengths, const LaunchTarget& target) {
  if (lengths.num_requests <= 0) return nullptr;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_set_lengths(lengths, stream_of(target)), "setting lengths");
}

LaunchError mask_tiles(const MaskTilesParams& params, const LaunchTarget& target) {
  constexpr int kMaxTileKeys = 512;  // threads of a CTA, 32 of a word's keys each
  const MaskTilesShape& shape = params.shape;
  if (shape.tile_keys <= 0 || shape.tile_keys % 16 != 0 || shape.tile_keys > kMaxTileKeys ||
      shape.rows_per_tile <= 0 || shape.group_size <= 0) {
    return usage_error(
        "mask_tiles: tile_keys %d must be a multiple of 16 up to %d, rows_per_tile %d and "
        "group_size %d positive",
        shape.tile_keys, kMaxTileKeys, shape.rows_per_tile, shape.group_size);
  }
  if (params.num_requests <= 0) return nullptr;
  DeviceFacts facts;
  if (LaunchError error = query_device(target.device, &facts)) return error;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_mask_tiles(params, facts.num_sms, stream_of(target)),
                       "launching mask_tiles");
}

LaunchError pack_bits(const PackBitsParams& params, const LaunchTarget& target) {
  if (params.num_segments <= 0) return nullptr;
  DeviceFacts facts;
  if (LaunchError error = query_device(target.device, &facts)) return error;
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_pack_bits(params, facts.num_sms, stream_of(target)),
                       "launching pack_bits");
}

LaunchError append_paged_kv(const AppendParams& params, const LaunchTarget& target) {
  if (params.num_tokens <= 0) return nullptr;
  if (params.page_size <= 0) {
    return usage_error("append_paged_kv: page_size %d must be positive", params.page_size);
  }
  DeviceGuard guard(target.device);
  if (guard.error() != nullptr) return guard.error();
  return runtime_error(launch_append_paged_kv(params, stream_of(target)),
                       "launching append_paged_kv");
}

// "13.0" out of 13000.
const char* cuda_version() {
  static char text[16] = "";
  std::snprintf(text, sizeof(text), "%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  return text;
}

}  // namespace
}  // namespace preflash

extern "C" [[gnu::visibility("default")]] const preflash::DeviceServices*
preflash_device_services() {
  using namespace preflash;
  static const DeviceServices services = {
      .abi_version = kServicesAbiVersion,
      .cuda_version = cuda_version(),
      .device_count = &device_count,
      .query = &query_device,
      .uploader_create = &create_uploader,
      .uploader_destroy = &destroy_uploader,
      .uploader_acquire = &acquire,
      .uploader_submit = &submit,
      .uploader_extend = &extend,
      .uploader_join = &join,
      .pinned_create = &create_pinned,
      .pinned_destroy = &destroy_pinned,
      .pinned_is_free = &pinned_is_free,
      .launch_forward = &launch_forward,
      .is_capturing = &is_capturing,
      .order_behind = &order_behind,
      .prepass = &prepass,
      .combine = &combine,
      .merge_states = &merge_states,
      .set_lengths = &set_lengths,
      .mask_tiles = &mask_tiles,
      .pack_bits = &pack_bits,
      .append_paged_kv = &append_paged_kv,
  };
  return &services;
}
