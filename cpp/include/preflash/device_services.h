// Everything the project asks of a CUDA runtime besides the forward kernels: the table of functions
// in libpreflash_kernels_common.so, so that no code above it links against CUDA. Exported as
// `extern "C" const DeviceServices* preflash_device_services()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "preflash/mask_tiles.h"
#include "preflash/params.h"
#include "preflash/per_segment.h"
#include "preflash/variant.h"

namespace preflash {

// Properties of a machine that the planner uses. On the CPU, processors count as SMs.
struct DeviceFacts {
  int device = -1;             // CUDA ordinal; -1: the CPU
  int compute_capability = 0;  // 90 for sm_90; 0: the CPU
  int num_sms = 1;
  int smem_per_block = 0;  // opt-in limit
  int smem_per_sm = 0;
  std::int64_t l2_bytes = 0;
  char name[64] = "cpu";
};

// Pinned staging for plan uploads: two buffers, each fenced by an event, so that a second plan()
// may be written while the first one's copy is in flight. Not thread-safe; one per wrapper, or per
// thread.
struct PlanUploader;

// Pinned memory of a large array, out of which uploads copy it straight to the device; fenced by an
// event, too. Uploads of several threads may copy one.
struct PinnedArray;

// Part of an uploader's acquired buffer, and its destination.
struct StagedCopy {
  std::size_t begin = 0;  // in bytes
  void* to = nullptr;
  std::size_t bytes = 0;
};

struct ArrayCopy {
  PinnedArray* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
};

// Rises with the kernels' ABI, whose params the services take, and by itself where this table alone
// changes: the forward kernels then need not be compiled again.
inline constexpr int kServicesAbiVersion = 100 * kKernelAbiVersion + 4;

struct DeviceServices {
  int abi_version = kServicesAbiVersion;
  const char* cuda_version = "";

  int (*device_count)() = nullptr;  // 0 where there is no driver or no GPU; never an error
  LaunchError (*query)(int device, DeviceFacts* facts) = nullptr;

  PlanUploader* (*uploader_create)(int device) = nullptr;
  void (*uploader_destroy)(PlanUploader*) = nullptr;
  // Host memory of at least `bytes`, free to write: waits until the copy that last read it is done.
  LaunchError (*uploader_acquire)(PlanUploader*, std::size_t bytes, void** host) = nullptr;
  // Starts copying parts of the acquired buffer to device memory on `stream`, and arrays to theirs.
  LaunchError (*uploader_submit)(PlanUploader*, std::span<const StagedCopy> parts,
                                 const PerSegment<ArrayCopy>& arrays, void* stream) = nullptr;
  // Extends the last submitted copy by all work given to `stream` since.
  LaunchError (*uploader_extend)(PlanUploader*, void* stream) = nullptr;
  // Orders all later work of `stream` after every submitted copy. The host waits only if the stream
  // is being captured into a CUDA graph.
  LaunchError (*uploader_join)(PlanUploader*, void* stream) = nullptr;

  // Allocates an array of at least `bytes`, which is free to write at `host`.
  LaunchError (*pinned_create)(int device, std::size_t bytes, PinnedArray** array,
                               void** host) = nullptr;
  // Waits until no copy reads the array, and frees it.
  void (*pinned_destroy)(PinnedArray*) = nullptr;
  // True if no copy reads the array any more, so that it may be written again.
  bool (*pinned_is_free)(PinnedArray*) = nullptr;

  // The target's device is made current for the launch and the caller's restored afterwards.
  LaunchError (*launch_forward)(const ForwardKernel&, const ForwardParams&, int num_ctas,
                                const LaunchTarget&) = nullptr;
  // True if the target's stream is being captured into a CUDA graph.
  bool (*is_capturing)(const LaunchTarget&) = nullptr;
  // Orders all later work of the target's stream after all earlier work of `before`, another stream
  // of the device, unless that is being captured: the target's would become part of the capture.
  LaunchError (*order_behind)(void* before, const LaunchTarget&) = nullptr;
  LaunchError (*prepass)(const PrepassParams&, const LaunchTarget&) = nullptr;
  LaunchError (*combine)(const CombineParams&, const LaunchTarget&) = nullptr;
  LaunchError (*merge_states)(const MergeStatesParams&, const LaunchTarget&) = nullptr;
  LaunchError (*set_lengths)(const RequestLengths&, const LaunchTarget&) = nullptr;
  LaunchError (*mask_tiles)(const MaskTilesParams&, const LaunchTarget&) = nullptr;
  LaunchError (*pack_bits)(const PackBitsParams&, const LaunchTarget&) = nullptr;
  LaunchError (*append_paged_kv)(const AppendParams&, const LaunchTarget&) = nullptr;
};

}  // namespace preflash
