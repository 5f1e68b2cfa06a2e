// The C interface: checks what C can get wrong, and calls the same core that Python's binding
// calls. No exception leaves a function.
#include "preflash/preflash.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/captured.h"
#include "core/device.h"
#include "core/device_plan.h"
#include "core/launch.h"
#include "core/plan.h"
#include "planner/message.h"
#include "registry/registry.h"
#include "registry/shared_library.h"

namespace preflash {
namespace {

thread_local std::string last_error;

void remember(const char* sentence) noexcept {
  try {
    last_error = sentence;
  } catch (const std::exception&) {
    last_error.clear();  // there is no memory for the sentence
  }
}

// The registry of this library, whose kernel libraries lie beside it unless the caller named
// another directory.
Registry& registry() {
  static std::once_flag once;
  std::call_once(once, [] { Registry::instance().set_library_dir(own_directory()); });
  return Registry::instance();
}

template <class Call>
preflash_status guarded(const Call& call) noexcept {
  try {
    call();
    return PREFLASH_OK;
  } catch (const NotCompiledError& error) {
    remember(error.what());
    return PREFLASH_NOT_COMPILED;
  } catch (const std::invalid_argument& error) {
    remember(error.what());
    return PREFLASH_INVALID_ARGUMENT;
  } catch (const std::exception& error) {
    remember(error.what());
  } catch (...) {
    remember("an exception that is none of C++'s library");
  }
  return PREFLASH_FAILED;
}

void need(const void* pointer, const char* name) {
  if (pointer == nullptr) refuse(name, " is NULL");
}

void need_flag(std::int32_t value, const char* name) {
  if (value != 0 && value != 1) refuse(name, " = ", value, ": must be 0 or 1");
}

// A copy of a caller's struct, whose release may know fewer members, or more: those must be 0.
template <class Struct>
Struct copy_of(const Struct* given, const Struct& defaults, const char* name) {
  need(given, name);
  constexpr std::size_t kLargest = 4096;
  if (given->size < sizeof(std::size_t) || given->size > kLargest || given->size % 8 != 0) {
    refuse(name, ".size = ", given->size, ": begin with its INIT macro");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < given->size; ++i) {
    if (bytes[i] != 0) {
      refuse(name, ".size = ", given->size, ", of a later release, whose member at byte ", i,
             " is set: this library (", preflash_version(), ") does not know it");
    }
  }
  Struct copy = defaults;
  std::memcpy(&copy, given, std::min(given->size, sizeof(Struct)));
  return copy;
}

DType dtype_of(std::int32_t dtype, const char* name) {
  switch (dtype) {
    case PREFLASH_FLOAT32: return DType::kFloat32;
    case PREFLASH_FLOAT16: return DType::kFloat16;
    case PREFLASH_BFLOAT16: return DType::kBFloat16;
    case PREFLASH_FLOAT8_E4M3: return DType::kFloat8E4M3;
    case PREFLASH_FLOAT8_E5M2: return DType::kFloat8E5M2;
  }
  refuse(name, " = ", dtype, " is no preflash_dtype");
}

bool is_8_bit(DType dtype) { return size_of(dtype) == 1; }

// Refuses dtypes that no kernel reads and writes together, though each is an axis of its own.
void check_dtypes(const AttentionOptions& options) {
  const DType q = options.q_dtype, kv = options.kv_dtype, o = options.o_dtype;
  const auto named = [](const char* name, DType dtype) {
    return std::string(name) + " = " + std::string(name_of(dtype));
  };
  if (q == DType::kFloat8E5M2) refuse(named("q_dtype", q), ": convert such queries");
  if (kv != q && (is_8_bit(q) || !is_8_bit(kv))) {
    refuse(named("kv_dtype", kv), " with ", named("q_dtype", q),
           ": must be q's, or of 8 bits beside wider queries");
  }
  const bool writes =
      is_8_bit(q) ? o == DType::kBFloat16 || o == DType::kFloat16 || o == q : o == q;
  if (!writes) {
    refuse(named("o_dtype", o), " with ", named("q_dtype", q),
           ": must be q's; for queries of 8 bits also float16 or bfloat16");
  }
}

// The limits within which float32 keeps the bits of logits; Python has the same, and their reasons
// (_check/validate.py).
constexpr float kSmallestSoftCap = 1e-6f, kLargestSoftCap = 1e30f;
constexpr float kLargestScale = 2.358e38f, kSmallestBiasedScale = 1e-30f;
constexpr double kMostRadians = 1024.0;

void check_sm_scale(float scale, const AttentionOptions& options) {
  const float size = std::abs(scale);
  const bool fits = size <= kLargestScale &&
                    (options.soft_cap == 0.0f || std::isfinite(scale / options.soft_cap));
  if (!fits) refuse("sm_scale = ", scale, ": logits must stay finite in float32");
  const bool biased = options.position == Position::kAlibi && options.soft_cap == 0.0f;
  if (biased && size > 0.0f && size < kSmallestBiasedScale) {
    refuse("sm_scale = ", scale, " with ALiBi: must be 0 or at least 1e-30 in size");
  }
}

Position position_of(std::int32_t position) {
  switch (position) {
    case PREFLASH_POSITION_NONE: return Position::kNone;
    case PREFLASH_ROPE: return Position::kRope;
    case PREFLASH_ALIBI: return Position::kAlibi;
  }
  refuse("position = ", position, " is no preflash_position");
}

AttentionOptions options_of(const preflash_segment& given) {
  need_flag(given.causal, "causal");
  need_flag(given.custom_mask, "custom_mask");
  need_flag(given.batch_invariant, "batch_invariant");
  if (given.causal && given.custom_mask) refuse("causal = 1 with custom_mask = 1: one of them");
  if (given.window_left < -1) {
    refuse("window_left = ", given.window_left, ": must be -1 (none) or a number of keys");
  }
  if (given.reserved != 0) refuse("reserved = ", given.reserved, ": must be 0");
  const double radians = std::max(1.0, 1.0 / given.rope_theta) / given.rope_scale;
  const bool turns = std::isfinite(given.rope_scale) && given.rope_scale > 0.0 &&
                     std::isfinite(given.rope_theta) && given.rope_theta > 0.0 &&
                     radians <= kMostRadians;
  if (!turns) {
    refuse("rope_scale = ", given.rope_scale, ", rope_theta = ", given.rope_theta,
           ": must be positive and finite, and turn a row by at most 1024 radians a position");
  }
  const float cap = given.soft_cap;
  if (!(cap == 0.0f || (cap >= kSmallestSoftCap && cap <= kLargestSoftCap))) {
    refuse("soft_cap = ", cap, ": must be 0 (off), or from 1e-6 to 1e30");
  }
  AttentionOptions options;
  options.num_qo_heads = given.num_qo_heads;
  options.num_kv_heads = given.num_kv_heads;
  options.head_dim_qk = given.head_dim_qk;
  options.head_dim_vo = given.head_dim_vo;
  options.q_dtype = dtype_of(given.q_dtype, "q_dtype");
  options.kv_dtype = dtype_of(given.kv_dtype, "kv_dtype");
  options.o_dtype = dtype_of(given.o_dtype, "o_dtype");
  options.causal = given.causal != 0;
  options.mask = given.custom_mask ? Mask::kCustom : Mask::kBounds;
  options.window_left = given.window_left;
  options.soft_cap = given.soft_cap;
  options.position = position_of(given.position);
  if (options.position == Position::kRope) {
    options.rope = {.scale = given.rope_scale, .theta = given.rope_theta};
  }
  options.split.disable = given.batch_invariant != 0;
  check_dtypes(options);
  return options;
}

std::shared_ptr<const Batch> batch_of(const preflash_segment& given) {
  if (given.num_requests < 0) refuse("num_requests = ", given.num_requests, " is negative");
  if (given.page_size < 0) refuse("page_size = ", given.page_size, " is negative");
  if (given.graph_max_rows < 0) refuse("graph_max_rows = ", given.graph_max_rows, " is negative");
  need(given.qo_indptr, "qo_indptr");
  need(given.kv_indptr, "kv_indptr");
  const bool paged = given.page_size > 0;
  if (paged) {
    need(given.last_page_len, "last_page_len");
  } else if (given.last_page_len != nullptr || given.page_indices != nullptr) {
    refuse("page_size = 0 with last_page_len or page_indices: set it, or leave them NULL");
  }
  if (given.block_table_stride < 0) {
    refuse("block_table_stride = ", given.block_table_stride, " is negative");
  }
  auto batch =
      std::make_shared<Batch>(BatchArrays{.qo_indptr = given.qo_indptr,
                                          .kv_indptr = given.kv_indptr,
                                          .last_page_len = paged ? given.last_page_len : nullptr,
                                          .num_requests = given.num_requests,
                                          .page_size = given.page_size});
  if (given.block_table_stride > 0) {
    if (!paged) refuse("block_table_stride = ", given.block_table_stride, " without page_size");
    for (int i = 0; i < given.num_requests; ++i) {
      const std::int64_t pages = std::int64_t{given.kv_indptr[i + 1]} - given.kv_indptr[i];
      if (pages > given.block_table_stride) {
        refuse("request ", i, " has ", pages, " pages, a row of the block table ",
               given.block_table_stride);
      }
    }
    batch->use_block_table(given.block_table_stride);
  }
  if (given.custom_mask && (given.kv_lens != nullptr || given.graph_max_rows > 0)) {
    refuse("custom_mask = 1 with ", given.kv_lens != nullptr ? "kv_lens" : "graph_max_rows",
           ": bits are laid out by lengths that plan and run must know");
  }
  if (given.custom_mask) batch->use_mask();
  if (given.kv_lens != nullptr) batch->use_kv_upper_bounds();
  return batch;
}

int need_count(int num_segments) {
  if (num_segments < 1 || num_segments > kMaxSegments) {
    refuse("num_segments = ", num_segments, ": must be 1 or ", kMaxSegments);
  }
  return num_segments;
}

PerSegment<preflash_segment> segments_of(const preflash_segment* given, int num_segments) {
  need(given, "segments");
  PerSegment<preflash_segment> segments;
  const auto* next = reinterpret_cast<const unsigned char*>(given);
  for (int s = 0; s < need_count(num_segments); ++s) {
    // Members that the caller's release knows follow each other by his size of the struct.
    const auto* segment = reinterpret_cast<const preflash_segment*>(next);
    segments.add(copy_of(segment, preflash_segment PREFLASH_SEGMENT_INIT, "segment"));
    next += segment->size;
  }
  return segments;
}

PerSegment<PlanRequest> requests_of(const PerSegment<preflash_segment>& segments) {
  PerSegment<PlanRequest> requests;
  for (const preflash_segment& segment : segments) {
    requests.add({.options = options_of(segment),
                  .batch = batch_of(segment),
                  .graph_max_rows = segment.graph_max_rows});
  }
  return requests;
}

void check_device(int device) {
  if (device < kCpuDevice)
    refuse("device = ", device, ": must be a GPU's ordinal, or -1 (the CPU)");
}

// The variants of the segments' options in a family, or the sentence that says why there is none.
FoundKernel kernel_of(Family family, const PerSegment<AttentionOptions>& options) {
  if (options.size() == 1 || traits_of(family).segments == OptionChoice::kRunTime) {
    FoundKernel found;
    for (const AttentionOptions& one : options) {
      found = registry().find(variant_of(one, family));
      if (found.kernel == nullptr) break;
    }
    return found;
  }
  return registry().find_joint(variant_of(options[0], family), variant_of(options[1], family));
}

// The families that a backend means on a device, best first.
std::vector<Family> families_of(std::int32_t backend, int device) {
  check_device(device);
  registry();
  const int capability = device == kCpuDevice ? 0 : facts_of(device).compute_capability;
  if (backend == PREFLASH_AUTO) return families_for(capability);
  const char* const names[] = {"auto", "cpu", "fa2", "fa3"};
  const auto index = static_cast<unsigned>(backend);
  if (index >= std::size(names)) refuse("backend = ", index, " is no preflash_backend");
  for (const Family family : kFamilies) {
    if (backend_of(family) != names[index]) continue;
    if (!traits_of(family).runs_on(capability)) {
      refuse("backend ", names[index], " does not run on device ", device);
    }
    return {family};
  }
  throw NotCompiledError(std::string("this build has no backend ") + names[index]);
}

// The first family that serves the options, or the last, whose plan says why not.
Family choose_family(std::int32_t backend, int device,
                     const PerSegment<AttentionOptions>& options) {
  const std::vector<Family> families = families_of(backend, device);
  for (const Family family : families) {
    if (kernel_of(family, options).kernel != nullptr) return family;
  }
  return families.back();
}

PerSegment<AttentionOptions> options_of(const PerSegment<PlanRequest>& requests) {
  PerSegment<AttentionOptions> options;
  for (const PlanRequest& request : requests) options.add(request.options);
  return options;
}

// Checks that strides keep rows apart and on multiples of 16 bytes.
void check_strides(const preflash_tensor& tensor, const char* name, std::int64_t heads,
                   std::int64_t head_dim, DType dtype) {
  if (tensor.num_tokens > 0) need(tensor.data, name);
  if (tensor.num_tokens < 0 || tensor.num_pages < 1) {
    refuse(name, " has ", tensor.num_tokens, " tokens on ", tensor.num_pages, " pages");
  }
  const std::int64_t alignment = 16 / size_of(dtype);
  const std::pair<std::int64_t, std::int64_t> dimensions[] = {
      {tensor.num_pages, tensor.stride_page},
      {tensor.num_tokens, tensor.stride_token},
      {heads, tensor.stride_head}};
  for (const auto& [extent, stride] : dimensions) {
    if (extent > 1 && (stride < head_dim || stride % alignment != 0)) {
      refuse(name, " has a stride of ", stride, " elements: must be a multiple of ", alignment,
             " and at least head_dim = ", head_dim);
    }
  }
}

// Stride of a dimension, 0 where it has one element.
std::int64_t stride(std::int64_t extent, std::int64_t given) { return extent > 1 ? given : 0; }

RowTensor rows_of(const preflash_tensor& tensor, std::int64_t heads) {
  return {.stride_token = stride(tensor.num_tokens, tensor.stride_token),
          .stride_head = stride(heads, tensor.stride_head),
          .num_tokens = tensor.num_tokens};
}

KvTensor kv_of(const preflash_tensor& tensor, std::int64_t heads) {
  return {.stride_page = stride(tensor.num_pages, tensor.stride_page),
          .stride_token = stride(tensor.num_tokens, tensor.stride_token),
          .stride_head = stride(heads, tensor.stride_head),
          .num_pages = tensor.num_pages,
          .num_tokens = tensor.num_tokens};
}

// Two rows of an output may not be the same memory.
void check_apart(const preflash_tensor& out, std::int64_t heads, std::int64_t head_dim) {
  std::pair<std::int64_t, std::int64_t> inner{out.stride_head, heads};
  std::pair<std::int64_t, std::int64_t> outer{out.stride_token, out.num_tokens};
  if (outer.second <= 1 || inner.second <= 1) return;
  if (outer.first < inner.first) std::swap(inner, outer);
  if (outer.first < inner.first * (inner.second - 1) + head_dim) {
    refuse("out has strides of ", out.stride_token, " and ", out.stride_head,
           " elements for tokens and heads: rows would overlap");
  }
}

RunTensors run_tensors_of(const preflash_tensors& given, const PlannedSegment& planned) {
  const AttentionOptions& options = planned.options;
  const Batch& batch = *planned.batch;
  const std::int64_t q_heads = options.num_qo_heads, kv_heads = options.num_kv_heads;
  check_strides(given.q, "q", q_heads, options.head_dim_qk, options.q_dtype);
  check_strides(given.k, "k", kv_heads, options.head_dim_qk, options.kv_dtype);
  check_strides(given.v, "v", kv_heads, options.head_dim_vo, options.kv_dtype);
  check_strides(given.out, "out", q_heads, options.head_dim_vo, options.o_dtype);
  check_apart(given.out, q_heads, options.head_dim_vo);
  if (given.q.num_pages != 1 || given.out.num_pages != 1) refuse("q and out have no pages");
  if (given.out.num_tokens != given.q.num_tokens) {
    refuse("out has ", given.out.num_tokens, " rows, q ", given.q.num_tokens);
  }
  if (given.q.num_tokens < batch.qo_end()) {
    refuse("q has ", given.q.num_tokens, " rows, the batch ", batch.qo_end());
  }
  if (given.k.num_pages != given.v.num_pages || given.k.num_tokens != given.v.num_tokens) {
    refuse("k and v have ", given.k.num_pages, " x ", given.k.num_tokens, " and ",
           given.v.num_pages, " x ", given.v.num_tokens, " tokens; must be equal");
  }
  if (batch.page_size() > 0 ? given.k.num_tokens != batch.page_size()
                            : given.k.num_pages != 1 || given.k.num_tokens < batch.kv_end()) {
    refuse("k has ", given.k.num_pages, " x ", given.k.num_tokens, " tokens; planned were ",
           batch.page_size() > 0 ? "pages of " + std::to_string(batch.page_size())
                                 : std::to_string(batch.kv_end()) + " tokens");
  }
  if (!std::isfinite(given.sm_scale) || !std::isfinite(given.out_scale)) {
    refuse("sm_scale = ", given.sm_scale, ", out_scale = ", given.out_scale, ": must be finite");
  }
  check_sm_scale(given.sm_scale, options);
  if ((given.mask_bits != nullptr) != (options.mask == Mask::kCustom)) {
    refuse("mask_bits are for a plan with custom_mask = 1, which needs them");
  }
  return {.q = rows_of(given.q, q_heads),
          .k = kv_of(given.k, kv_heads),
          .v = kv_of(given.v, kv_heads),
          .o = rows_of(given.out, q_heads),
          .lse = {.stride_token = stride(given.q.num_tokens, given.lse_stride_token),
                  .stride_head = stride(q_heads, given.lse_stride_head)}};
}

void check_lse(const preflash_tensors& given, std::int64_t heads) {
  if (given.lse == nullptr) return;
  std::pair<std::int64_t, std::int64_t> inner{given.lse_stride_head, heads};
  std::pair<std::int64_t, std::int64_t> outer{given.lse_stride_token, given.q.num_tokens};
  if (outer.second > 1 && inner.second > 1 && outer.first < inner.first) std::swap(inner, outer);
  const bool apart =
      (inner.second <= 1 || inner.first >= 1) &&
      (outer.second <= 1 || outer.first >= std::max<std::int64_t>(inner.first * inner.second, 1));
  if (!apart && !(inner.second <= 1 && outer.first >= 1)) {
    refuse("lse has strides of ", given.lse_stride_token, " and ", given.lse_stride_head,
           " for tokens and heads: elements would overlap");
  }
}

}  // namespace
}  // namespace preflash

using namespace preflash;

struct preflash_plan {
  std::shared_ptr<const Uploader> uploader;
  std::shared_ptr<DevicePlan> place;
  void* int_memory = nullptr;
  std::size_t int_bytes = 0;
  PerSegment<const std::int32_t*> kv_lens;
  PerSegment<Captured> captured;  // by CUDA graphs: empty if no run was
  void* stream = nullptr;  // behind the upload of the plan: the upload's own, or the last run's
  int num_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
};

namespace {

// Refuses a batch that a captured run cannot replay.
void check_graphs(const preflash_plan& plan, const PerSegment<PlanRequest>& requests,
                  const PerSegment<const std::int32_t*>& kv_lens, const void* int_memory) {
  if (plan.captured.size() == 0) return;
  const char* const kept = ": a CUDA graph has captured a run with another; use another plan";
  if (requests.size() != plan.captured.size()) refuse("num_segments = ", requests.size(), kept);
  if (int_memory != plan.int_memory) refuse("int_memory", kept);
  if (!(kv_lens == plan.kv_lens)) refuse("kv_lens", kept);
  for (int s = 0; s < requests.size(); ++s) plan.captured[s].check(*requests[s].batch, -1);
}

}  // namespace

int preflash_abi_version(void) { return PREFLASH_ABI_VERSION; }
const char* preflash_version(void) { return PREFLASH_VERSION; }
const char* preflash_last_error(void) { return last_error.c_str(); }

preflash_status preflash_set_kernel_directory(const char* directory) {
  return guarded([&] {
    need(directory, "directory");
    try {
      registry().set_library_dir(directory);
    } catch (const std::logic_error& error) {
      throw std::invalid_argument(error.what());
    }
  });
}

preflash_status preflash_find_variant(int device, std::int32_t backend,
                                      const preflash_segment* segments, int num_segments,
                                      const char** variant) {
  return guarded([&] {
    need(variant, "variant");
    PerSegment<AttentionOptions> options;
    for (const preflash_segment& segment : segments_of(segments, num_segments)) {
      options.add(options_of(segment));
    }
    const Family family = choose_family(backend, device, options);
    const FoundKernel found = kernel_of(family, options);
    if (found.kernel == nullptr) throw NotCompiledError(found.error);
    std::string name = found.kernel->id;
    if (options.size() > 1 && traits_of(family).segments == OptionChoice::kRunTime) {
      name = std::string(kernel_of(family, options[0]).kernel->id) + "+" + name;
    }
    static std::mutex mutex;
    static std::set<std::string>* const names = new std::set<std::string>;  // for callers to keep
    const std::scoped_lock lock(mutex);
    *variant = names->insert(std::move(name)).first->c_str();
  });
}

preflash_status preflash_sizes(int device, std::int32_t backend, const preflash_segment* segments,
                               int num_segments, preflash_memory* memory) {
  return guarded([&] {
    preflash_memory sizes = copy_of(memory, preflash_memory PREFLASH_MEMORY_INIT, "memory");
    const auto requests = requests_of(segments_of(segments, num_segments));
    const Family family = choose_family(backend, device, options_of(requests));
    const Plan widest(family, device, requests, std::int64_t{1} << 40);
    const Plan least(family, device, requests, 0);
    sizes.int_bytes = static_cast<std::size_t>(std::max(widest.int_bytes(), least.int_bytes()));
    sizes.float_bytes = static_cast<std::size_t>(widest.float_bytes());
    std::memcpy(memory, &sizes, std::min(memory->size, sizeof sizes));
  });
}

preflash_status preflash_plan_create(int device, preflash_plan** plan) {
  return guarded([&] {
    need(plan, "plan");
    check_device(device);
    registry();
    auto made = std::make_unique<preflash_plan>();
    made->uploader = std::make_shared<const Uploader>(device);
    *plan = made.release();
  });
}

void preflash_plan_destroy(preflash_plan* plan) { delete plan; }

preflash_status preflash_plan_set_num_threads(preflash_plan* plan, int num_threads) {
  return guarded([&] {
    need(plan, "plan");
    check_num_threads(num_threads);
    plan->num_threads = num_threads;
  });
}

preflash_status preflash_plan_batch(preflash_plan* plan, std::int32_t backend,
                                    const preflash_segment* segments, int num_segments,
                                    void* int_memory, std::size_t int_bytes,
                                    std::size_t float_bytes, void* stream) {
  return guarded([&] {
    need(plan, "plan");
    const PerSegment<preflash_segment> given = segments_of(segments, num_segments);
    const auto requests = requests_of(given);
    const int device = plan->uploader->device();
    const Family family = choose_family(backend, device, options_of(requests));
    auto made = std::make_shared<const Plan>(family, device, requests,
                                             static_cast<std::int64_t>(float_bytes));
    if (made->int_bytes() > 0) need(int_memory, "int_memory");
    if (reinterpret_cast<std::uintptr_t>(int_memory) % 16 != 0) {
      refuse("int_memory is at no multiple of 16 bytes");
    }
    Upload upload{.stream = stream};
    PerSegment<const std::int32_t*> kv_lens;
    for (int s = 0; s < given.size(); ++s) {
      const bool reads_pages = given[s].page_size > 0 && requests[s].batch->page_entries() > 0;
      if (reads_pages) need(given[s].page_indices, "page_indices");
      // Without pages to read any address will do: the batch has none of its own to upload.
      upload.page_indices.add(given[s].page_size == 0 ? nullptr
                              : given[s].page_indices != nullptr
                                  ? given[s].page_indices
                                  : static_cast<const std::int32_t*>(int_memory));
      kv_lens.add(given[s].kv_lens);
    }
    check_graphs(*plan, requests, kv_lens, int_memory);
    // Plans for a graph are all of one size, that of the first.
    const bool stays = plan->place != nullptr && int_memory == plan->int_memory &&
                       (int_bytes == plan->int_bytes || plan->place->plan()->graph_safe());
    auto place = stays ? plan->place
                       : std::make_shared<DevicePlan>(plan->uploader, int_memory,
                                                      static_cast<std::int64_t>(int_bytes));
    try {
      place->write(std::move(made), upload);
    } catch (const std::logic_error& error) {
      throw std::invalid_argument(error.what());
    } catch (const std::exception&) {
      plan->place = nullptr;  // the last work list may be overwritten in part
      throw;
    }
    plan->place = std::move(place);
    plan->int_memory = int_memory;
    plan->int_bytes = int_bytes;
    plan->kv_lens = kv_lens;
    plan->stream = stream;
  });
}

const char* preflash_plan_variant(const preflash_plan* plan) {
  if (plan == nullptr || plan->place == nullptr) return nullptr;
  return plan->place->plan()->id().c_str();
}

preflash_status preflash_run(preflash_plan* plan, const preflash_tensors* tensors, int num_segments,
                             void* float_memory, std::size_t float_bytes, void* stream) {
  return guarded([&] {
    need(plan, "plan");
    if (plan->place == nullptr) refuse("preflash_run() before preflash_plan_batch()");
    need(tensors, "tensors");
    const Plan& planned = *plan->place->plan();
    if (num_segments != planned.segments().size()) {
      refuse("num_segments = ", num_segments, "; planned were ", planned.segments().size());
    }
    RunArguments arguments{.segments = {},
                           .float_workspace = float_memory,
                           .float_workspace_bytes = static_cast<std::int64_t>(float_bytes),
                           .stream = stream,
                           .num_threads = plan->num_threads};
    PerSegment<RunTensors> bound;
    const auto* next = reinterpret_cast<const unsigned char*>(tensors);
    for (int s = 0; s < num_segments; ++s) {
      const auto* given = reinterpret_cast<const preflash_tensors*>(next);
      const preflash_tensors one =
          copy_of(given, preflash_tensors PREFLASH_TENSORS_INIT, "tensors");
      next += given->size;
      const PlannedSegment& segment = planned.segments()[s];
      bound.add(run_tensors_of(one, segment));
      check_lse(one, segment.options.num_qo_heads);
      arguments.segments.add(
          {.q = one.q.data,
           .k = one.k.data,
           .v = one.v.data,
           .o = one.out.data,
           .lse = one.lse,
           .extras = {.mask_bits = one.mask_bits, .sinks = one.sinks, .kv_lens = plan->kv_lens[s]},
           .sm_scale = one.sm_scale,
           .out_scale = one.out_scale});
    }
    if (stream != plan->stream) plan->place->arrive_before(stream);
    plan->stream = stream;
    if (!Launch(plan->place, bound).run(arguments)) return;
    const bool first = plan->captured.size() == 0;
    for (int s = 0; s < num_segments; ++s) {
      const Captured now = Captured::of(bound[s], planned.segments()[s].batch->page_size());
      if (first) {
        plan->captured.add(now);
      } else {
        plan->captured[s] = plan->captured[s].or_larger(now);
      }
    }
  });
}
