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

// 64-byte block of the private float workspace.
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
  if (plan_->has_prepass()) bind_copies();
}

void Launch::bind_copies() {
  const PlannedSegment& planned = plan_->segments()[0];
  const AttentionOptions& options = planned.options;
  const PrepassForm& form = *planned.prepass;
  ForwardSegment& segment = forward_.segments[0];
  prepass_ = place_->prepass_params();

  const KvTensor k = copy_of(form.num_keys(), options.num_kv_heads, options.head_dim_qk);
  const KvTensor v = copy_of(form.num_keys(), options.num_kv_heads, options.head_dim_vo);
  prepass_.k = {.from = segment.k,
                .from_dtype = options.kv_dtype,
                .to = rows_of(k),
                .num_heads = options.num_kv_heads,
                .head_dim = options.head_dim_qk,
                .position = options.position};
  prepass_.v = {.from = segment.v,
                .from_dtype = options.kv_dtype,
                .to = rows_of(v),
                .num_heads = options.num_kv_heads,
                .head_dim = options.head_dim_vo};
  segment.k = k;
  if (form.v() == PrepassPlace::kWorkspace) {
    segment.v = v;
  } else {
    segment.v.num_tokens -= prepass_.kv_begin;
  }
  if (form.q() == PrepassPlace::kCaller) return;
  RowTensor q = segment.o;
  if (form.q() == PrepassPlace::kWorkspace) {
    q = rows_of(copy_of(planned.batch->qo_end(), options.num_qo_heads, options.head_dim_qk));
  }
  prepass_.q = {.from = page_of(segment.q),
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
  // Rows behind the last request are padding. Unknown are the last row of a launch that a CUDA
  // graph may replay for a longer plan, and that of lengths on the device.
  if (!plan_->graph_safe() && !planned.batch->lengths_are_upper_bounds())
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
  combine.grid = kernel.query_grid(index, options);
  combine.head_dim_vo = segment.head_dim_vo;

  spans_[index] = spans_of(segment, options);
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
    if (given.extras.kv_lens != nullptr) segment.extras.kv_lens -= plan_->first_request(s);
    if (given.skip_factor > 0.0f) segment.skip_factor = given.skip_factor;
    segment.sm_scale = given.sm_scale;
    segment.out_scale = given.out_scale;
  }
  if (Trace* trace = Trace::of_this_thread()) forward.records = trace->take(*plan_);
  const LaunchTarget target{
      .device = plan_->device(), .stream = arguments.stream, .num_threads = arguments.num_threads};
  for (int s = 0; s < arguments.segments.size(); ++s) {
    if (place_->uses_mask_tiles(s)) find_mask_tiles(s, forward.segments[s], target);
  }
  if (plan_->has_prepass()) run_prepass(arguments, forward.segments[0], target);
  bool captured = false;
  for (const PlannedRound& round : plan_->rounds()) {
    captured = start_round(round, arguments.float_workspace, forward, target);
    if (forward.records != nullptr) {
      forward.records += std::int64_t{forward.num_items} * plan_->kernel().ctas_per_item;
    }
  }
  return captured;
}

bool Launch::start_round(const PlannedRound& round, void* float_workspace, ForwardParams& forward,
                         const LaunchTarget& target) const {
  place_->set_items(round, forward);
  const int num_segments = plan_->segments().size();
  for (int s = 0; s < num_segments; ++s) {
    const SegmentLayout& layout = round.planner.layout().segments[s];
    forward.segments[s].partial_o = layout.partial_o.in(float_workspace);
    forward.segments[s].partial_lse = layout.partial_lse.in(float_workspace);
  }
  const PlanSizes& sizes = round.planner.sizes();
  check_launch(services_->launch_forward(plan_->kernel(), forward, sizes.num_ctas, target),
               plan_->kernel().id);
  const bool captured = services_->is_capturing(target);
  // One launch for each segment that was split, because rows and dtype may differ.
  for (int s = 0; s < num_segments; ++s) {
    if (sizes.segments[s].num_merges > 0) combine(round, s, forward.segments[s], target);
  }
  return captured;
}

void Launch::find_mask_tiles(int index, ForwardSegment& segment, const LaunchTarget& target) const {
  RunExtras& extras = segment.extras;
  const bool brought = extras.mask_tiles != nullptr;
  if (extras.mask_bits == nullptr) {
    throw std::logic_error(std::string(plan_->kernel().id) + ": a run without the plan's mask");
  }
  if (!brought) extras.mask_tiles = place_->mask_tiles(index);
  if (!brought && place_->has_mask_tiles(index)) return;
  place_->find_mask_tiles(index, extras, target);
}

void Launch::run_prepass(const RunArguments& arguments, ForwardSegment& segment,
                         const LaunchTarget& target) const {
  const SegmentArguments& given = arguments.segments[0];
  const RunExtras& extras = given.extras;
  if (extras.scale_q != nullptr || extras.scale_k != nullptr || extras.scale_v != nullptr) {
    throw std::logic_error(
        "factors of heads are for kernels that convert on load: plan with Prepass::kNever");
  }
  const PlannedSegment& planned = plan_->segments()[0];
  const PrepassForm& form = *planned.prepass;
  auto* copies = static_cast<std::byte*>(arguments.float_workspace) + planned.copies_offset;
  PrepassParams params = prepass_;
  params.k.from.data = given.k;
  params.k.to.data = copies;
  segment.k.data = copies;
  params.v.from.data = given.v;
  if (form.v() == PrepassPlace::kWorkspace) {
    params.v.to.data = copies + form.v_offset();
    segment.v.data = params.v.to.data;
  } else {
    segment.v.data = static_cast<const std::byte*>(given.v) +
                     params.kv_begin * segment.v.stride_token * size_of(planned.options.kv_dtype);
  }
  if (form.q() != PrepassPlace::kCaller) {
    params.q.from.data = given.q;
    params.q.to.data =
        form.q() == PrepassPlace::kOut ? given.o : static_cast<void*>(copies + form.q_offset());
    segment.q.data = params.q.to.data;
  }
  check_launch(services_->prepass(params, target), "the pre-pass");
}

void Launch::combine(const PlannedRound& round, int index, const ForwardSegment& segment,
                     const LaunchTarget& target) const {
  CombineParams combine = combine_[index];
  place_->set_merges(round, index, combine);
  combine.o.data = segment.o.data;
  combine.lse = segment.lse;
  combine.partial_o = segment.partial_o;
  combine.partial_lse = segment.partial_lse;
  combine.extras = segment.extras;
  check_launch(services_->combine(combine, target), "combine");
}

}  // namespace preflash
