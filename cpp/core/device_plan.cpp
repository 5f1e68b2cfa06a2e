#include "core/device_plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace preflash {

namespace {

// The page indices that go to their place in the plan's memory by themselves.
PerSegment<ArrayCopy> pinned_arrays_of(const Plan& plan, void* memory) {
  PerSegment<ArrayCopy> arrays;
  for (const PlannedSegment& segment : plan.segments()) {
    PinnedArray* const pinned = segment.batch->pinned_page_indices();
    if (pinned == nullptr) continue;
    arrays.add({.from = pinned,
                .to = static_cast<std::byte*>(memory) + segment.page_indices_offset,
                .bytes = segment.batch->page_indices().size_bytes()});
  }
  return arrays;
}

// Stages a copy behind the others; one whose destination follows that of the last is part of it,
// because each transfer takes the host several microseconds. Where an allocation may begin it is
// not: no transfer goes over the end of one.
void append(std::vector<StagedCopy>* parts, const HostCopy& copy) {
  constexpr std::uintptr_t kAllocationAlignment = 256;
  StagedCopy& last = parts->back();
  const bool follows = static_cast<std::byte*>(last.to) + last.bytes == copy.to;
  if (follows && reinterpret_cast<std::uintptr_t>(copy.to) % kAllocationAlignment != 0) {
    last.bytes += copy.bytes;
  } else {
    parts->push_back({.begin = last.begin + last.bytes, .to = copy.to, .bytes = copy.bytes});
  }
}

}  // namespace

Uploader::Uploader(int device)
    : device_(device),
      services_(&services_of(device)),
      uploader_(services_->uploader_create(device)),
      page_memory_(device) {
  if (uploader_ == nullptr) throw std::runtime_error("no pinned memory for plan uploads");
}

Uploader::~Uploader() { services_->uploader_destroy(uploader_); }

DevicePlan::DevicePlan(std::shared_ptr<const Uploader> uploader, void* memory,
                       std::int64_t capacity)
    : uploader_(std::move(uploader)),
      memory_(memory),
      capacity_(capacity),
      claim_(uploader_->device()) {}

void DevicePlan::write(std::shared_ptr<const Plan> plan, const Upload& upload) {
  const std::int64_t bytes = plan->int_bytes();
  if (capacity_ < bytes) {
    throw std::invalid_argument("int_workspace_buffer holds " + std::to_string(capacity_) +
                                " bytes; this plan needs " + std::to_string(bytes));
  }
  if (memory_ == nullptr && bytes > 0) {
    throw std::invalid_argument(
        "int_workspace_buffer has no memory behind it (a FakeTensor, or storage that was freed)");
  }
  PerSegment<const std::int32_t*> page_indices = upload.page_indices;
  for (int s = 0; s < plan->segments().size(); ++s) {
    const PlannedSegment& segment = plan->segments()[s];
    if (segment.batch->page_size() > 0 && page_indices[s] == nullptr) {
      page_indices[s] = reinterpret_cast<const std::int32_t*>(static_cast<std::byte*>(memory_) +
                                                              segment.page_indices_offset);
    }
  }
  if (plan_ != nullptr && plan_->graph_safe() &&
      !(plan->launches_like(*plan_) && page_indices == page_indices_)) {
    throw std::logic_error(std::string("a CUDA graph may hold a launch of ") + plan_->kernel().id +
                           " from this place: a plan of " + plan->kernel().id +
                           " that launches otherwise needs another place");
  }
  const DeviceServices& services = services_of(device());
  const auto lock = uploader_->lock();
  void* staging = nullptr;
  const std::int64_t image_bytes = plan->image_bytes();
  std::vector<StagedCopy> parts = {{.to = memory_, .bytes = static_cast<std::size_t>(image_bytes)}};
  for (const HostCopy& copy : upload.copies) append(&parts, copy);
  const std::size_t staged = parts.back().begin + parts.back().bytes;
  check_launch(services.uploader_acquire(uploader_->get(), staged, &staging), "plan staging");
  plan->write(staging);
  auto* next = static_cast<std::byte*>(staging) + image_bytes;
  for (const HostCopy& copy : upload.copies) {
    if (copy.bytes > 0) std::memcpy(next, copy.from, copy.bytes);
    next += copy.bytes;
  }
  claim_.take(memory_, bytes);
  check_launch(services.uploader_submit(uploader_->get(), parts, pinned_arrays_of(*plan, memory_),
                                        upload.stream),
               "plan upload");
  page_indices_ = page_indices;
  for (int s = 0; s < page_indices_.size(); ++s) {
    page_indices_are_callers_[s] = upload.page_indices[s] != nullptr;
  }
  plan_ = std::move(plan);
  find_all_mask_tiles(upload);
}

void DevicePlan::find_all_mask_tiles(const Upload& upload) {
  const DeviceServices& services = services_of(device());
  const LaunchTarget target{.device = device(), .stream = upload.stream};
  bool any = false;
  for (int s = 0; s < plan_->segments().size(); ++s) {
    has_mask_tiles_[s] = uses_mask_tiles(s) && upload.mask_bits[s] != nullptr;
    any |= has_mask_tiles_[s];
  }
  if (!any) return;
  // NOTE: the mask may be an earlier plan's, which wrote it on another stream before its own copy.
  join(upload.stream);
  for (int s = 0; s < plan_->segments().size(); ++s) {
    if (!has_mask_tiles_[s]) continue;
    find_mask_tiles(s, {.mask_bits = upload.mask_bits[s], .mask_tiles = mask_tiles(s)}, target);
  }
  // A run on another stream comes behind them, too.
  check_launch(services.uploader_extend(uploader_->get(), upload.stream), "plan upload");
}

void DevicePlan::find_mask_tiles(int segment, const RunExtras& mask,
                                 const LaunchTarget& target) const {
  const PlannedSegment& planned = plan_->segments()[segment];
  const QueryGrid grid = planned.kernel->query_grid(segment, planned.options);
  const MaskTilesParams params{
      .shape = {.rows_per_tile = grid.rows_per_tile,
                .tile_keys = planned.kernel->tile_of(segment).n,
                .group_size = grid.group_size},
      .requests = plan_->layout().requests.in(memory_) + plan_->first_request(segment),
      .mask_tiles_begin = plan_->layout().segments[segment].mask_tiles_begin.in(memory_),
      .mask_bits = mask.mask_bits,
      .words = mask.mask_tiles,
      .num_requests = planned.batch->num_requests()};
  check_launch(services_of(device()).mask_tiles(params, target),
               "finding full and empty tiles of the mask");
}

void DevicePlan::set_lengths(RequestLengths lengths, const LaunchTarget& target) const {
  const Batch& batch = *plan_->segments()[0].batch;
  if (plan_->segments().size() != 1 || !batch.lengths_are_upper_bounds()) {
    throw std::logic_error("lengths from the device are for a plan that was made for bounds");
  }
  lengths.requests = plan_->layout().requests.in(memory_);
  lengths.num_requests = batch.num_requests();
  lengths.max_qo_len = static_cast<std::int32_t>(batch.max_qo_len());
  lengths.max_kv_len = static_cast<std::int32_t>(batch.max_kv_len());
  check_launch(services_of(device()).set_lengths(lengths, target), "setting lengths");
}

void DevicePlan::arrive_before(void* stream) const {
  const auto lock = uploader_->lock();
  join(stream);
}

void DevicePlan::join(void* stream) const {
  check_launch(services_of(device()).uploader_join(uploader_->get(), stream), "plan upload");
}

ForwardParams DevicePlan::params() const {
  ForwardParams params;
  params.requests = plan_->layout().requests.in(memory_);
  set_items(plan_->rounds()[0], params);
  params.num_segments = plan_->segments().size();
  for (int s = 0; s < params.num_segments; ++s) {
    const PlannedSegment& planned = plan_->segments()[s];
    ForwardSegment& segment = params.segments[s];
    static_cast<AttentionOptions&>(segment) = planned.kernel_options();
    segment.group_size = segment.gqa_ratio();
    segment.chunk_origin = planned.kernel->chunk_origin(s, segment);
    if (planned.prepass == nullptr) {
      segment.page_indices = page_indices_[s];
      segment.page_size = std::max(planned.batch->page_size(), 1);
    }
    segment.mask_tiles_begin = plan_->layout().segments[s].mask_tiles_begin.in(memory_);
    params.kernels[s] = planned.kernel;
  }
  return params;
}

void DevicePlan::set_items(const PlannedRound& round, ForwardParams& params) const {
  void* image = static_cast<std::byte*>(memory_) + round.image_offset;
  params.items = round.planner.layout().items.in(image);
  params.cta_begin = round.planner.layout().cta_begin.in(image);
  params.num_items = round.planner.sizes().num_items;
}

void DevicePlan::set_merges(const PlannedRound& round, int segment, CombineParams& params) const {
  void* image = static_cast<std::byte*>(memory_) + round.image_offset;
  params.merges = round.planner.layout().segments[segment].merges.in(image);
  params.num_merges = round.planner.sizes().segments[segment].num_merges;
}

PrepassParams DevicePlan::prepass_params() const {
  const PlannedSegment& planned = plan_->segments()[0];
  const Batch& batch = *planned.batch;
  const PrepassForm& form = *planned.prepass;
  PrepassParams params;
  params.to_dtype = form.options().kv_dtype;
  params.rope = planned.options.rope;
  params.requests = plan_->layout().requests.in(memory_);
  params.num_requests = form.num_requests();
  params.qo_begin = batch.qo_begin();
  params.num_queries = std::int64_t{batch.qo_end()} - batch.qo_begin();
  params.num_keys = form.num_keys();
  if (batch.page_size() == 0) {
    params.kv_begin = batch.kv_begin();
    return params;
  }
  params.page_indices = page_indices_[0];
  params.page_begin = Offset<std::int32_t>{planned.page_begin_offset}.in(memory_);
  params.page_size = batch.page_size();
  return params;
}

}  // namespace preflash
