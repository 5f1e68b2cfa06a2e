// The DeviceServices table of the CPU: the same calls as on a GPU, done at once in plain memory.
#include <unistd.h>

#include <cstring>
#include <memory>
#include <new>

#include "cpu/append_paged_kv.h"
#include "cpu/cpu_backend.h"
#include "cpu/guarded.h"
#include "cpu/isa.h"
#include "cpu/merge.h"
#include "cpu/pack_bits.h"
#include "cpu/prepass.h"
#include "preflash/request_lengths.h"

namespace preflash {
namespace {

// CPU type behind PlanUploader. Submitting copies at once, so one buffer is enough.
struct HostStaging {
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;
};

// CPU type behind PinnedArray.
struct HostArray {
  std::unique_ptr<std::byte[]> memory;
};

HostArray* array_of(PinnedArray* array) { return reinterpret_cast<HostArray*>(array); }

HostStaging* staging_of(PlanUploader* uploader) { return reinterpret_cast<HostStaging*>(uploader); }

int device_count() { return 1; }

// Processors that plans divide the work among on every machine, so that split points, and with them
// the bits of a result, do not depend on the number of cores or threads. Many cores still have
// enough to do; on one core the partials of the splits cost up to 3 %
// (docs/dev/experiments/cpu-backend.md).
constexpr int kNominalProcessors = 32;

LaunchError query(int /*device*/, DeviceFacts* facts) {
  *facts = {};
  facts->num_sms = kNominalProcessors;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long l2_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  facts->l2_bytes = l2_bytes > 0 ? l2_bytes : 0;
#endif
  return nullptr;
}

PlanUploader* uploader_create(int /*device*/) {
  return reinterpret_cast<PlanUploader*>(new (std::nothrow) HostStaging);
}

void uploader_destroy(PlanUploader* uploader) { delete staging_of(uploader); }

LaunchError uploader_acquire(PlanUploader* uploader, std::size_t bytes, void** host) {
  HostStaging& staging = *staging_of(uploader);
  if (bytes > staging.bytes) {
    staging.memory.reset(new (std::nothrow) std::byte[bytes]);
    staging.bytes = staging.memory ? bytes : 0;
    if (!staging.memory) return "out of host memory for the plan";
  }
  *host = staging.memory.get();
  return nullptr;
}

LaunchError uploader_submit(PlanUploader* uploader, std::span<const StagedCopy> parts,
                            const PerSegment<ArrayCopy>& arrays, void* /*stream*/) {
  const HostStaging& staging = *staging_of(uploader);
  for (const StagedCopy& part : parts) {
    if (part.begin + part.bytes > staging.bytes) {
      return "the plan is larger than the staging memory acquired for it";
    }
    if (part.bytes > 0) std::memcpy(part.to, staging.memory.get() + part.begin, part.bytes);
  }
  for (const ArrayCopy& array : arrays) {
    if (array.bytes > 0) std::memcpy(array.to, array_of(array.from)->memory.get(), array.bytes);
  }
  return nullptr;
}

LaunchError uploader_join(PlanUploader* /*uploader*/, void* /*stream*/) { return nullptr; }

LaunchError pinned_create(int /*device*/, std::size_t bytes, PinnedArray** array, void** host) {
  auto made = std::unique_ptr<HostArray>(new (std::nothrow) HostArray);
  if (made != nullptr) made->memory.reset(new (std::nothrow) std::byte[bytes]);
  if (made == nullptr || made->memory == nullptr) return "out of host memory for page indices";
  *host = made->memory.get();
  *array = reinterpret_cast<PinnedArray*>(made.release());
  return nullptr;
}

void pinned_destroy(PinnedArray* array) { delete array_of(array); }

bool pinned_is_free(PinnedArray* /*array*/) { return true; }

LaunchError launch_forward(const ForwardKernel& kernel, const ForwardParams& params, int num_ctas,
                           const LaunchTarget& target) {
  return kernel.launch(params, num_ctas, target);
}

bool is_capturing(const LaunchTarget& /*target*/) { return false; }

LaunchError order_behind(void* /*before*/, const LaunchTarget& /*target*/) { return nullptr; }

LaunchError set_lengths(const RequestLengths& lengths, const LaunchTarget& /*target*/) {
  for (int i = 0; i < lengths.num_requests; ++i) set_length(lengths, i, lengths.requests[i]);
  return nullptr;
}

template <class Params, void (*kFunction)(const Params&, int num_threads)>
LaunchError call(const Params& params, const LaunchTarget& target) {
  return cpu::guarded([&] { kFunction(params, target.num_threads); });
}

constexpr DeviceServices kServices{
    .device_count = device_count,
    .query = query,
    .uploader_create = uploader_create,
    .uploader_destroy = uploader_destroy,
    .uploader_acquire = uploader_acquire,
    .uploader_submit = uploader_submit,
    .uploader_join = uploader_join,
    .pinned_create = pinned_create,
    .pinned_destroy = pinned_destroy,
    .pinned_is_free = pinned_is_free,
    .launch_forward = launch_forward,
    .is_capturing = is_capturing,
    .order_behind = order_behind,
    .prepass = call<PrepassParams, cpu::prepass>,
    .combine = call<CombineParams, cpu::combine>,
    .merge_states = call<MergeStatesParams, cpu::merge_states>,
    .set_lengths = set_lengths,
    .pack_bits = call<PackBitsParams, cpu::pack_bits>,
    .append_paged_kv = call<AppendParams, cpu::append_paged_kv>,
};

}  // namespace

const DeviceServices* cpu_device_services() {
  cpu::isa_kernels();  // a refusal is the caller's to see as such, before anything is launched
  return &kServices;
}

const char* cpu_isa_name() { return cpu::isa_kernels().name; }

}  // namespace preflash
