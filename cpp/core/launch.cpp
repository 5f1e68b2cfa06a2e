// The hot path: what happens between Python's run() and the kernel.
#include "core/launch.h"

#include <stdexcept>
#include <string>

namespace preflash {
namespace {

// A view of storage that was freed lies at its offset from null. Nothing is ever mapped so low: on
// a GPU below 4 GiB, in a process below the smallest address of a program.
bool is_freed(const void* address, int device) {
  const std::uintptr_t lowest = std::uintptr_t{1} << (device == kCpuDevice ? 22 : 32);
  return reinterpret_cast<std::uintptr_t>(address) < lowest;
}

[[noreturn]] void refuse_address(const char* name, const void* address, int device) {
  if (is_freed(address, device)) {
    throw std::invalid_argument(
        std::string(name) +
        " has no memory behind it (a FakeTensor, or storage that was freed): pass a tensor with "
        "data");
  }
  throw std::invalid_argument(
      std::string(name) + " starts at an address that is " +
      std::to_string(reinterpret_cast<std::uintptr_t>(address) % 16) +
      " past a multiple of 16 bytes; kernels load 16 bytes at a time: make a contiguous copy");
}

// An address that a kernel will read or write `bytes` from.
void check_address(const char* name, const void* address, std::int64_t bytes, int device) {
  if (bytes == 0) return;
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0 || is_freed(address, device)) {
    refuse_address(name, address, device);
  }
}

// A tensor with its name, and where it lies in this run.
struct Placed {
  const char* name;
  const void* address;
  const MemorySpan& span;
};

void check_apart(const Placed& written, const Placed& other) {
  if (!may_overlap(written.address, written.span, other.address, other.span)) return;
  throw std::invalid_argument(std::string(written.name) + " shares memory with " + other.name +
                              ", which would be overwritten while it is in use: give " +
                              written.name + " memory of its own");
}

MemorySpan span_of(const RowTensor& tensor, std::int64_t num_heads, std::int64_t head_dim,
                   DType dtype) {
  const std::int64_t size = size_of(dtype);
  return {.dimensions = {{{tensor.stride_token * size, tensor.num_tokens},
                          {tensor.stride_head * size, num_heads}}},
          .row_bytes = head_dim * size};
}

MemorySpan span_of(const KvTensor& tensor, std::int64_t num_heads, std::int64_t head_dim,
                   DType dtype) {
  const std::int64_t size = size_of(dtype);
  return {.dimensions = {{{tensor.stride_page * size, tensor.num_pages},
                          {tensor.stride_token * size, tensor.num_tokens},
                          {tensor.stride_head * size, num_heads}}},
          .row_bytes = head_dim * size};
}

MemorySpan span_of(const LseTensor& tensor, std::int64_t num_tokens, std::int64_t num_heads) {
  constexpr std::int64_t kSize = sizeof(float);
  return {.dimensions = {{{tensor.stride_token * kSize, num_tokens},
                          {tensor.stride_head * kSize, num_heads}}},
          .row_bytes = kSize};
}

MemorySpan span_of_bytes(std::int64_t bytes) { return {.row_bytes = bytes}; }

}  // namespace

Launch::Launch(std::shared_ptr<const DevicePlan> place, const RunTensors& tensors)
    : place_(std::move(place)), tensors_(tensors), services_(&services_of(place_->device())) {
  bind();
}

void Launch::bind() {
  if (place_->plan() == nullptr) throw std::logic_error("a launch of a place without a plan");
  plan_ = place_->plan();
  forward_ = place_->params();
  ForwardSegment& segment = forward_.segments[0];
  segment.q = tensors_.q;
  segment.q.num_tokens = plan_->batch().qo_end();
  segment.k = tensors_.k;
  segment.v = tensors_.v;
  segment.o = tensors_.o;
  segment.o.num_tokens = segment.q.num_tokens;
  segment.lse = tensors_.lse;

  const ForwardKernel& kernel = plan_->kernel();
  combine_.o = segment.o;
  combine_.lse = tensors_.lse;
  combine_.o_dtype = plan_->options().o_dtype;
  combine_.requests = forward_.requests;
  combine_.merges = place_->merges();
  combine_.num_merges = plan_->sizes().num_merges;
  combine_.tile_rows = rows_per_tile(kernel.traits.tile_rows, kernel.tile.m, segment.group_size);
  combine_.group_size = segment.group_size;
  combine_.head_dim_vo = segment.head_dim_vo;

  const AttentionOptions& options = plan_->options();
  spans_ = {
      .q = span_of(segment.q, options.num_qo_heads, options.head_dim_qk, options.q_dtype),
      .k = span_of(segment.k, options.num_kv_heads, options.head_dim_qk, options.kv_dtype),
      .v = span_of(segment.v, options.num_kv_heads, options.head_dim_vo, options.kv_dtype),
      .o = span_of(segment.o, options.num_qo_heads, options.head_dim_vo, options.o_dtype),
      .lse = span_of(segment.lse, segment.q.num_tokens, options.num_qo_heads),
  };
}

void Launch::check(const RunArguments& arguments) const {
  const int device = plan_->device();
  check_address("q", arguments.q, spans_.q.extent(), device);
  check_address("k", arguments.k, spans_.k.extent(), device);
  check_address("v", arguments.v, spans_.v.extent(), device);
  check_address("out", arguments.o, spans_.o.extent(), device);
  check_address("float_workspace_buffer", arguments.float_workspace, plan_->float_bytes(), device);

  const MemorySpan partials = span_of_bytes(plan_->float_bytes());
  const MemorySpan work_list = span_of_bytes(plan_->int_bytes());
  const RunExtras& extras = arguments.extras;
  const AttentionOptions& options = plan_->options();
  const MemorySpan of_qo_heads = span_of_bytes(options.num_qo_heads * std::int64_t{sizeof(float)});
  const MemorySpan of_kv_heads = span_of_bytes(options.num_kv_heads * std::int64_t{sizeof(float)});
  const Placed per_head[] = {
      {"sinks", extras.sinks, of_qo_heads},
      {"scale_q", extras.scale_q, of_qo_heads},
      {"scale_k", extras.scale_k, of_kv_heads},
      {"scale_v", extras.scale_v, of_kv_heads},
  };
  const Placed q{"q", arguments.q, spans_.q};
  const Placed out{"out", arguments.o, spans_.o};
  const Placed others[] = {
      {"k", arguments.k, spans_.k},
      {"v", arguments.v, spans_.v},
      {"float_workspace_buffer", arguments.float_workspace, partials},
      {"int_workspace_buffer", place_->memory(), work_list},
  };
  // q itself may be written to: an item has read its rows of q, which nobody else reads, before it
  // writes the same rows of out.
  if (arguments.o != arguments.q || spans_.o != spans_.q) check_apart(out, q);
  auto check_apart_from_others = [&](const Placed& written) {
    for (const Placed& other : others) check_apart(written, other);
    for (const Placed& other : per_head) {
      if (other.address != nullptr) check_apart(written, other);
    }
  };
  check_apart_from_others(out);
  if (arguments.lse == nullptr) return;
  if (is_freed(arguments.lse, device)) refuse_address("lse", arguments.lse, device);
  const Placed lse{"lse", arguments.lse, spans_.lse};
  check_apart(lse, out);
  check_apart(lse, q);
  check_apart_from_others(lse);
}

bool Launch::run(const RunArguments& arguments) {
  if (plan_ != place_->plan()) bind();
  const PlanSizes& sizes = plan_->sizes();
  const PlanLayout& layout = plan_->layout();
  check(arguments);
  if (sizes.num_items == 0) return false;

  ForwardParams forward = forward_;
  ForwardSegment& segment = forward.segments[0];
  segment.q.data = const_cast<void*>(arguments.q);
  segment.k.data = arguments.k;
  segment.v.data = arguments.v;
  segment.o.data = arguments.o;
  segment.lse.data = arguments.lse;
  segment.lse.scale = arguments.lse_scale;
  segment.extras = arguments.extras;
  segment.partial_o = layout.partial_o.in(arguments.float_workspace);
  segment.partial_lse = layout.partial_lse.in(arguments.float_workspace);
  segment.sm_scale = arguments.sm_scale;
  segment.out_scale = arguments.out_scale;
  const LaunchTarget target{
      .device = plan_->device(), .stream = arguments.stream, .num_threads = arguments.num_threads};
  check_launch(services_->launch_forward(plan_->kernel(), forward, sizes.num_ctas, target),
               plan_->kernel().id);
  const bool captured = services_->is_capturing(target);
  if (sizes.num_merges == 0) return captured;

  CombineParams combine = combine_;
  combine.o.data = segment.o.data;
  combine.lse = segment.lse;
  combine.partial_o = segment.partial_o;
  combine.partial_lse = segment.partial_lse;
  combine.sinks = arguments.extras.sinks;
  check_launch(services_->combine(combine, target), "combine");
  return captured;
}

}  // namespace preflash
