// The hot path: what happens between Python's run() and the kernel.
#include "core/launch.h"

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/trace.h"
#include "preflash/types.h"

namespace preflash {
namespace {

// A view of storage that was freed lies at its offset from null. Nothing is ever mapped so low: on
// a GPU below 4 GiB, in a process below the smallest address of a program.
bool is_freed(const void* address, int device) {
  const std::uintptr_t lowest = std::uintptr_t{1} << (device == kCpuDevice ? 22 : 32);
  return reinterpret_cast<std::uintptr_t>(address) < lowest;
}

// How errors call a tensor.
struct TensorName {
  const char* side;  // of a launch that has two; else empty
  const char* name;

  std::string text() const { return std::string(side) + name; }
};

// A launch of two is a prefill beside decode.
const char* side_of(int segment, int num_segments) {
  if (num_segments == 1) return "";
  return segment == 0 ? "prefill side's " : "decode side's ";
}

[[noreturn]] void refuse_address(const TensorName& name, const void* address, int device) {
  if (is_freed(address, device)) {
    throw std::invalid_argument(
        name.text() +
        " has no memory behind it (a FakeTensor, or storage that was freed): pass a tensor with "
        "data");
  }
  throw std::invalid_argument(
      name.text() + " starts at an address that is " +
      std::to_string(reinterpret_cast<std::uintptr_t>(address) % 16) +
      " past a multiple of 16 bytes; kernels load 16 bytes at a time: make a contiguous copy");
}

// An address that a kernel will read or write `bytes` from.
void check_address(const TensorName& name, const void* address, std::int64_t bytes, int device) {
  if (bytes == 0) return;
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0 || is_freed(address, device)) {
    refuse_address(name, address, device);
  }
}

// A tensor with its name, and where it lies in this run.
struct Placed {
  TensorName name;
  const void* address;
  const MemorySpan& span;
};

void check_apart(const Placed& written, const Placed& other) {
  if (!may_overlap(written.address, written.span, other.address, other.span)) return;
  const std::string name = written.name.text();
  throw std::invalid_argument(name + " shares memory with " + other.name.text() +
                              ", which would be overwritten while it is in use: give " + name +
                              " memory of its own");
}

// A piece of one.
struct alignas(64) FloatWorkspace {
  std::byte bytes[64];
};

// Contiguous rows of a copy, [token, head, head_dim].
KvTensor copy_of(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim) {
  return {.stride_token = tokens > 1 ? heads * head_dim : 0,
          .stride_head = heads > 1 ? head_dim : 0,
          .num_tokens = tokens};
}

RowTensor rows_of(const KvTensor& copy) {
  return {.stride_token = copy.stride_token,
          .stride_head = copy.stride_head,
          .num_tokens = copy.num_tokens};
}

KvTensor page_of(const RowTensor& rows) {
  return {.stride_token = rows.stride_token,
          .stride_head = rows.stride_head,
          .num_tokens = rows.num_tokens};
}

}  // namespace

Launch::Launch(std::shared_ptr<const DevicePlan> place, const PerSegment<RunTensors>& tensors)
    : place_(std::move(place)), tensors_(tensors), services_(&services_of(place_->device())) {
  bind();
}

void Launch::bind() {
  if (place_->plan() == nullptr) throw std::logic_error("a launch of a place without a plan");
  plan_ = place_->plan();
  if (tensors_.size() != plan_->segments().size()) {
    throw std::invalid_argument("the plan has " + std::to_string(plan_->segments().size()) +
                                " segments, the launch tensors of " +
                                std::to_string(tensors_.size()));
  }
  forward_ = place_->params();
  for (int s = 0; s < tensors_.size(); ++s) bind_segment(s);
  if (plan_->staged()) bind_copies();
}

void Launch::bind_copies() {
  const PlannedSegment& planned = plan_->segments()[0];
  const AttentionOptions& options = planned.options;
  const StagedForm& form = *planned.staged;
  ForwardSegment& segment = forward_.segments[0];
  stage_ = place_->stage_params();

  const KvTensor k = copy_of(form.num_keys(), options.num_kv_heads, options.head_dim_qk);
  const KvTensor v = copy_of(form.num_keys(), options.num_kv_heads, options.head_dim_vo);
  stage_.k = {.from = segment.k,
              .from_dtype = options.kv_dtype,
              .to = rows_of(k),
              .num_heads = options.num_kv_heads,
              .head_dim = options.head_dim_qk,
              .position = options.position};
  stage_.v = {.from = segment.v,
              .from_dtype = options.kv_dtype,
              .to = rows_of(v),
              .num_heads = options.num_kv_heads,
              .head_dim = options.head_dim_vo};
  segment.k = k;
  if (form.v() == StagedPlace::kWorkspace) {
    segment.v = v;
  } else {
    segment.v.num_tokens -= stage_.kv_begin;
  }
  if (form.kernel_rotates_q()) {
    segment.position = options.position;
    segment.rope = options.rope;
  }
  if (form.q() == StagedPlace::kCaller) return;
  RowTensor q = segment.o;
  if (form.q() == StagedPlace::kWorkspace) {
    q = rows_of(copy_of(planned.batch->qo_end(), options.num_qo_heads, options.head_dim_qk));
  }
  stage_.q = {.from = page_of(segment.q),
              .from_dtype = options.q_dtype,
              .to = q,
              .num_heads = options.num_qo_heads,
              .head_dim = options.head_dim_qk,
              .position = options.position};
  segment.q = q;
}

void Launch::bind_segment(int index) {
  const PlannedSegment& planned = plan_->segments()[index];
  const RunTensors& tensors = tensors_[index];
  ForwardSegment& segment = forward_.segments[index];
  segment.q = tensors.q;
  // Rows behind the last request are padding. A CUDA graph may replay this launch for a plan whose
  // last request ends later, and where the device has the lengths nobody here knows the last row.
  if (!plan_->graph_safe() && !planned.batch->are_bounds())
    segment.q.num_tokens = planned.batch->qo_end();
  segment.k = tensors.k;
  segment.v = tensors.v;
  segment.o = tensors.o;
  segment.o.num_tokens = segment.q.num_tokens;
  segment.lse = tensors.lse;
  if (tensors.lse.form == LseForm::kMaxAndSum && plan_->sizes().segments[index].num_merges > 0) {
    throw std::logic_error("maxima and sums of rows whose keys are split: plan without a split");
  }

  const AttentionOptions& options = planned.options;
  const ForwardKernel& kernel = *planned.kernel;
  CombineParams& combine = combine_[index];
  combine.o = segment.o;
  combine.lse = tensors.lse;
  combine.o_dtype = options.o_dtype;
  combine.requests = forward_.requests;
  combine.merges = place_->merges(index);
  combine.num_merges = plan_->sizes().segments[index].num_merges;
  combine.tile_rows =
      rows_per_tile(kernel.traits.tile_rows, kernel.tile_of(index).m, segment.group_size);
  combine.group_size = segment.group_size;
  combine.head_dim_vo = segment.head_dim_vo;

  spans_[index] = spans_of(segment, options);
}

void Launch::check(const RunArguments& arguments) const {
  const int num_segments = arguments.segments.size();
  if (num_segments != tensors_.size()) {
    throw std::invalid_argument("the launch has " + std::to_string(tensors_.size()) +
                                " segments, the run brings arguments of " +
                                std::to_string(num_segments));
  }
  for (int s = 0; s < num_segments; ++s) {
    check_addresses(s, arguments);
    check_inputs(s, arguments);
  }
  for (int s = 0; s < num_segments; ++s) {
    for (int other = 0; other < num_segments; ++other) check_outputs(s, other, arguments);
  }
}

void Launch::check_addresses(int index, const RunArguments& arguments) const {
  const int device = plan_->device();
  const SegmentArguments& segment = arguments.segments[index];
  const TensorSpans& spans = spans_[index];
  const char* side = side_of(index, arguments.segments.size());
  check_address({side, "q"}, segment.q, spans.q.extent(), device);
  check_address({side, "k"}, segment.k, spans.k.extent(), device);
  check_address({side, "v"}, segment.v, spans.v.extent(), device);
  check_address({side, "out"}, segment.o, spans.o.extent(), device);
  check_address({"", "float_workspace_buffer"}, arguments.float_workspace, plan_->float_bytes(),
                device);
  if (segment.lse != nullptr && is_freed(segment.lse, device)) {
    refuse_address({side, "lse"}, segment.lse, device);
  }
}

void Launch::check_inputs(int index, const RunArguments& arguments) const {
  if (arguments.float_workspace == nullptr) return;
  const MemorySpan bytes = span_of_bytes(plan_->float_bytes());
  const Placed partials{{"", "float_workspace_buffer"}, arguments.float_workspace, bytes};
  const SegmentArguments& segment = arguments.segments[index];
  const TensorSpans& spans = spans_[index];
  const char* side = side_of(index, arguments.segments.size());
  check_apart(partials, {{side, "q"}, segment.q, spans.q});
  check_apart(partials, {{side, "k"}, segment.k, spans.k});
  check_apart(partials, {{side, "v"}, segment.v, spans.v});
}

void Launch::check_outputs(int index, int other_index, const RunArguments& arguments) const {
  const int num_segments = arguments.segments.size();
  const SegmentArguments& segment = arguments.segments[index];
  const SegmentArguments& other = arguments.segments[other_index];
  const TensorSpans& spans = spans_[other_index];
  const char* own_side = side_of(index, num_segments);
  const char* side = side_of(other_index, num_segments);
  const bool same = index == other_index;

  const MemorySpan partials = span_of_bytes(plan_->float_bytes());
  const MemorySpan work_list = span_of_bytes(plan_->int_bytes());
  const Placed read[] = {
      {{side, "k"}, other.k, spans.k},
      {{side, "v"}, other.v, spans.v},
      {{"", "float_workspace_buffer"}, arguments.float_workspace, partials},
      {{"", "int_workspace_buffer"}, place_->memory(), work_list},
  };
  const Placed q{{side, "q"}, other.q, spans.q};
  const Placed others_out{{side, "out"}, other.o, spans.o};
  auto check_apart_from_read = [&](const Placed& written) {
    for (const Placed& one : read) {
      if (one.address != nullptr) check_apart(written, one);
    }
    for (const HeadTensor& tensor : kHeadTensors) {
      const float* address = other.extras.*tensor.address;
      if (address == nullptr) continue;
      check_apart(written, {{side, tensor.name}, address, spans.of(tensor)});
    }
  };
  const Placed out{{own_side, "out"}, segment.o, spans_[index].o};
  // q itself may be written to where an item has one CTA: that has read the item's rows of q, which
  // nobody else reads, before it writes the same rows of out.
  const bool in_place = same && segment.o == segment.q && spans.o == spans.q;
  if (!in_place || plan_->kernel().ctas_per_item > 1) check_apart(out, q);
  check_apart_from_read(out);
  if (index < other_index) check_apart(out, others_out);
  if (segment.lse == nullptr) return;
  const Placed lse{{own_side, "lse"}, segment.lse, spans_[index].lse};
  check_apart(lse, others_out);
  check_apart(lse, q);
  check_apart_from_read(lse);
  if (index < other_index && other.lse != nullptr) {
    check_apart(lse, {{side, "lse"}, other.lse, spans.lse});
  }
}

bool Launch::run(const RunArguments& arguments) {
  if (plan_ != place_->plan()) bind();
  check(arguments);
  if (plan_->sizes().num_ctas == 0) return false;
  const Uploader::Running running(place_->wrapper());
  if (running.alone() || plan_->device() != kCpuDevice || plan_->float_bytes() == 0) {
    return start(arguments);
  }
  RunArguments own = arguments;
  const std::int64_t pieces = ceil_div(plan_->float_bytes(), std::int64_t{sizeof(FloatWorkspace)});
  const std::unique_ptr<FloatWorkspace[]> workspace(new FloatWorkspace[pieces]);
  own.float_workspace = workspace.get();
  return start(own);
}

bool Launch::start(const RunArguments& arguments) const {
  const PlanSizes& sizes = plan_->sizes();
  const PlanLayout& layout = plan_->layout();
  ForwardParams forward = forward_;
  for (int s = 0; s < arguments.segments.size(); ++s) {
    const SegmentArguments& given = arguments.segments[s];
    ForwardSegment& segment = forward.segments[s];
    segment.q.data = const_cast<void*>(given.q);
    segment.k.data = given.k;
    segment.v.data = given.v;
    segment.o.data = given.o;
    segment.lse.data = given.lse;
    segment.lse.scale = given.lse_scale;
    segment.extras = given.extras;
    segment.partial_o = layout.segments[s].partial_o.in(arguments.float_workspace);
    segment.partial_lse = layout.segments[s].partial_lse.in(arguments.float_workspace);
    segment.sm_scale = given.sm_scale;
    segment.out_scale = given.out_scale;
  }
  if (Trace* trace = Trace::of_this_thread()) forward.records = trace->take(*plan_);
  const LaunchTarget target{
      .device = plan_->device(), .stream = arguments.stream, .num_threads = arguments.num_threads};
  for (int s = 0; s < arguments.segments.size(); ++s) {
    if (place_->uses_classes(s)) class_mask(s, forward.segments[s], target);
  }
  if (plan_->staged()) stage(arguments, forward.segments[0], target);
  check_launch(services_->launch_forward(plan_->kernel(), forward, sizes.num_ctas, target),
               plan_->kernel().id);
  const bool captured = services_->is_capturing(target);
  // NOTE: one launch for each segment that was split, since its rows and dtype may be others.
  for (int s = 0; s < arguments.segments.size(); ++s) {
    if (sizes.segments[s].num_merges > 0) combine(s, forward.segments[s], target);
  }
  return captured;
}

void Launch::class_mask(int index, ForwardSegment& segment, const LaunchTarget& target) const {
  RunExtras& extras = segment.extras;
  const bool brought = extras.mask_classes != nullptr;
  if (extras.mask_bits == nullptr) {
    throw std::logic_error(std::string(plan_->kernel().id) + ": a run without the plan's mask");
  }
  if (!brought) extras.mask_classes = place_->mask_classes(index);
  if (!brought && place_->has_classes(index)) return;
  place_->class_mask(index, extras, target);
}

void Launch::stage(const RunArguments& arguments, ForwardSegment& segment,
                   const LaunchTarget& target) const {
  const SegmentArguments& given = arguments.segments[0];
  const RunExtras& extras = given.extras;
  if (extras.scale_q != nullptr || extras.scale_k != nullptr || extras.scale_v != nullptr) {
    throw std::logic_error(
        "factors of heads are for kernels that transform what arrives: plan "
        "with Staging::kNever");
  }
  const PlannedSegment& planned = plan_->segments()[0];
  const StagedForm& form = *planned.staged;
  auto* copies = static_cast<std::byte*>(arguments.float_workspace) + planned.copies_offset;
  StageParams params = stage_;
  params.k.from.data = given.k;
  params.k.to.data = copies;
  segment.k.data = copies;
  params.v.from.data = given.v;
  if (form.v() == StagedPlace::kWorkspace) {
    params.v.to.data = copies + form.v_offset();
    segment.v.data = params.v.to.data;
  } else {
    segment.v.data = static_cast<const std::byte*>(given.v) +
                     params.kv_begin * segment.v.stride_token * size_of(planned.options.kv_dtype);
  }
  if (form.q() != StagedPlace::kCaller) {
    params.q.from.data = given.q;
    params.q.to.data =
        form.q() == StagedPlace::kOut ? given.o : static_cast<void*>(copies + form.q_offset());
    segment.q.data = params.q.to.data;
  }
  check_launch(services_->stage(params, target), "staging");
}

void Launch::combine(int index, const ForwardSegment& segment, const LaunchTarget& target) const {
  CombineParams combine = combine_[index];
  combine.o.data = segment.o.data;
  combine.lse = segment.lse;
  combine.partial_o = segment.partial_o;
  combine.partial_lse = segment.partial_lse;
  combine.extras = segment.extras;
  check_launch(services_->combine(combine, target), "combine");
}

}  // namespace preflash
