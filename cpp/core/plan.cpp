#include "core/plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "planner/message.h"
#include "registry/matrix.h"
#include "registry/registry.h"

namespace preflash {
namespace {

constexpr std::int64_t kAlignment = 16;

constexpr std::int64_t round_up(std::int64_t bytes, std::int64_t alignment = kAlignment) {
  return ceil_div(bytes, alignment) * alignment;
}

bool fits(const ForwardKernel& kernel, const DeviceFacts& facts) {
  return facts.smem_per_block == 0 || kernel.smem_bytes <= facts.smem_per_block;
}

void check_architecture(Family family, const DeviceFacts& facts) {
  if (facts.compute_capability == 0) return;
  FoundLibrary found = Registry::instance().library(family);
  if (found.table == nullptr) return;  // find() says what is missing and what would work
  const std::string_view list = found.table->architectures;
  if (compiled_for(list, facts.compute_capability)) return;
  throw NotCompiledError(
      "backend \"" + std::string(backend_of(family)) + "\": its kernels were compiled for sm " +
      std::string(list) + "; device " + std::to_string(facts.device) + " (" + facts.name +
      ") is sm " + std::to_string(facts.compute_capability) +
      ". What would work: a build with PREFLASH_ARCHS=" + std::to_string(facts.compute_capability) +
      ", or backend \"cpu\"");
}

std::string too_large(const ForwardKernel& kernel, const DeviceFacts& facts) {
  return std::string(kernel.id) + " needs " + std::to_string(kernel.smem_bytes) +
         " bytes of shared memory; device " + std::to_string(facts.device) + " (" + facts.name +
         ") gives a block " + std::to_string(facts.smem_per_block) +
         ". What would work: a build with kernels of tile class \"compact\", or a smaller head_dim";
}

// The kernel that quantises queries of 16 bits, if the options allow it and one serves them; or
// null.
const ForwardKernel* find_quantizing_kernel(Family family, SegmentProblem problem,
                                            const DeviceFacts& facts) {
  const bool from_16_bits = size_of(problem.q_dtype) == 2;
  if (!problem.quantizes_q || !from_16_bits || problem.kv_dtype != DType::kFloat8E4M3) {
    return nullptr;
  }
  problem.q_dtype = DType::kFloat8E4M3;  // what they become
  const TileClass tile_class = choose_tile_class(problem, traits_of(family));
  const ForwardKernel* kernel =
      Registry::instance().find(variant_of(problem, family, tile_class)).kernel;
  return kernel != nullptr && kernel->quantizes_q && fits(*kernel, facts) ? kernel : nullptr;
}

// The wanted tile class, or a smaller one where the device's shared memory ends before.
FoundKernel find_kernel(Family family, const SegmentProblem& problem, const DeviceFacts& facts) {
  if (const ForwardKernel* kernel = find_quantizing_kernel(family, problem, facts)) {
    return {.kernel = kernel};
  }
  TileClass wanted = choose_tile_class(problem, traits_of(family));
  FoundKernel found;
  for (TileClass tile_class : {wanted, TileClass::kDecode, TileClass::kCompact}) {
    found = Registry::instance().find(variant_of(problem, family, tile_class));
    if (found.kernel == nullptr) return found;
    if (fits(*found.kernel, facts)) return found;
  }
  return {.error = too_large(*found.kernel, facts)};
}

const ForwardKernel* require_kernel(const FoundKernel& found) {
  if (found.kernel == nullptr) throw NotCompiledError(found.error);
  return found.kernel;
}

// The one kernel that is compiled for both segments.
const ForwardKernel* find_joint_kernel(Family family, const Problem& problem,
                                       const DeviceFacts& facts) {
  FoundKernel found = Registry::instance().find_joint(variant_of(problem.segments[0], family),
                                                      variant_of(problem.segments[1], family));
  require_kernel(found);
  if (!fits(*found.kernel, facts)) throw NotCompiledError(too_large(*found.kernel, facts));
  return found.kernel;
}

SegmentKernels find_kernels(Family family, const Problem& problem, const DeviceFacts& facts) {
  SegmentKernels kernels;
  if (problem.segments.size() > 1 && traits_of(family).segments == OptionChoice::kCompiled) {
    const ForwardKernel* kernel = find_joint_kernel(family, problem, facts);
    kernels.add(kernel);
    kernels.add(kernel);
    return kernels;
  }
  for (const SegmentProblem& segment : problem.segments) {
    kernels.add(require_kernel(find_kernel(family, segment, facts)));
  }
  return kernels;
}

bool is_joint(const SegmentKernels& kernels) {
  return kernels[0]->variant.segments == Segments::kTwo;
}

std::string joint_id(const SegmentKernels& kernels) {
  if (is_joint(kernels)) return kernels[0]->id;
  std::string id;
  for (const ForwardKernel* kernel : kernels)
    id += (id.empty() ? "" : "+") + std::string(kernel->id);
  return id;
}

// Kernel that runs all segments: that of the only segment, the one for both, or both in one launch.
ForwardKernel joint_kernel(const SegmentKernels& kernels, const char* id) {
  if (kernels.size() == 1 || is_joint(kernels)) return *kernels[0];
  FoundLaunch found = Registry::instance().find_launch(kernels);
  if (found.launch == nullptr) throw NotCompiledError(found.error);
  ForwardKernel joint;
  joint.id = id;
  joint.launch = found.launch;
  joint.tracing = kernels[0]->tracing;
  return joint;
}

// The copies for the only segment, if they pay and fit; null: its kernel reads the caller's
// tensors.
std::shared_ptr<const PrepassForm> plan_prepass(Family family, const PlanRequest& request,
                                                const Problem& problem, const DeviceFacts& facts) {
  const SegmentProblem& segment = problem.segments[0];
  // Copies are laid out by plan()'s lengths, and a graph's launches outlive these.
  if (request.graph_max_rows > 0 || segment.lengths_are_upper_bounds) return nullptr;
  const std::optional<AttentionOptions> options = prepass_options(segment);
  if (segment.prepass == Prepass::kNever || !options) return nullptr;
  const FoundKernel converting = find_kernel(family, segment, facts);
  if (converting.kernel == nullptr || !prefers_prepass(segment, *converting.kernel)) {
    return nullptr;
  }
  SegmentProblem described = segment;
  static_cast<AttentionOptions&>(described) = *options;
  const FoundKernel ordinary = find_kernel(family, described, facts);
  if (ordinary.kernel == nullptr || !has_prepass_rows(segment)) return nullptr;
  auto form = std::make_shared<const PrepassForm>(segment, *options, *ordinary.kernel);
  return form->bytes() <= problem.float_workspace_bytes ? form : nullptr;
}

// The spans point into the batches.
Problem describe(const PerSegment<PlanRequest>& requests, std::int64_t float_workspace_bytes) {
  Problem problem;
  problem.float_workspace_bytes = float_workspace_bytes;
  for (const PlanRequest& request : requests) {
    SegmentProblem& segment = problem.segments.add({});
    static_cast<AttentionOptions&>(segment) = request.options;
    request.batch->describe(&segment);
    segment.graph_max_rows = request.graph_max_rows;
    segment.graph_mask_bytes = request.graph_mask_bytes;
  }
  return problem;
}

}  // namespace

Plan::Choice Plan::choose(Family family, int device, const PerSegment<PlanRequest>& requests,
                          std::int64_t float_workspace_bytes) {
  const DeviceFacts& facts = facts_of(device);
  Choice choice{.kernels = {}, .problem = describe(requests, float_workspace_bytes), .prepass = {}};
  Problem& problem = choice.problem;
  validate(problem);
  check_architecture(family, facts);
  if (problem.segments.size() == 1)
    choice.prepass = plan_prepass(family, requests[0], problem, facts);
  if (choice.prepass == nullptr) {
    choice.kernels = find_kernels(family, problem, facts);
    return choice;
  }
  choice.kernels = SegmentKernels(&choice.prepass->kernel());
  problem.segments = choice.prepass->problem_of_kernel(problem.segments[0]);
  const std::int64_t room = float_workspace_bytes - choice.prepass->bytes();
  problem.float_workspace_bytes = room / kCopyAlignment * kCopyAlignment;
  problem.copy_bytes = float_workspace_bytes - problem.float_workspace_bytes;
  return choice;
}

Plan::Plan(Family family, int device, const PerSegment<PlanRequest>& requests,
           std::int64_t float_workspace_bytes)
    : Plan(device, requests, choose(family, device, requests, float_workspace_bytes)) {}

Plan::Plan(int device, const PerSegment<PlanRequest>& requests, const Choice& choice)
    : device_(device),
      kernels_(choice.kernels),
      id_((choice.prepass != nullptr ? "prepass+" : "") + joint_id(kernels_)),
      kernel_(joint_kernel(kernels_, id_.c_str())),
      rounds_(plan_rounds(device, choice)),
      graph_safe_(choice.problem.segments[0].graph_max_rows > 0),
      int_bytes_(rounds_.back().image_offset + rounds_.back().planner.layout().int_bytes),
      image_bytes_(int_bytes_),
      float_bytes_(0) {
  for (const PlannedRound& round : rounds_) {
    float_bytes_ = std::max(float_bytes_, round.planner.layout().float_bytes);
  }
  for (int s = 0; s < kernels_.size(); ++s) {
    segments_.add(
        {.options = requests[s].options, .batch = requests[s].batch, .kernel = kernels_[s]});
  }
  if (choice.prepass != nullptr) place_copies(choice.prepass);
  place_page_indices();
}

std::vector<PlannedRound> Plan::plan_rounds(int device, const Choice& choice) {
  std::vector<PlannedRound> rounds;
  PlannerOptions options;
  std::int64_t image_offset = 0;
  do {
    rounds.push_back({.planner = {choice.problem, facts_of(device), choice.kernels, options},
                      .image_offset = image_offset});
    image_offset = round_up(image_offset + rounds.back().planner.layout().int_bytes);
    options.first_tile = rounds.back().planner.end_tile();
  } while (!rounds.back().planner.is_last());
  return rounds;
}

PlanSizes Plan::total_sizes() const {
  PlanSizes total = sizes();
  for (std::size_t r = 1; r < rounds_.size(); ++r) {
    const PlanSizes& round = rounds_[r].planner.sizes();
    total.num_items += round.num_items;
    total.num_kv_tiles += round.num_kv_tiles;
    total.makespan_kv_tiles += round.makespan_kv_tiles;
    for (int s = 0; s < segments_.size(); ++s) {
      total.segments[s].num_merges += round.segments[s].num_merges;
    }
  }
  return total;
}

int Plan::first_request(int segment) const {
  int first = 0;
  for (int s = 0; s < segment; ++s) first += segments_[s].batch->num_requests();
  return first;
}

void Plan::place_copies(const std::shared_ptr<const PrepassForm>& prepass) {
  PlannedSegment& segment = segments_[0];
  segment.prepass = prepass;
  segment.copies_offset = round_up(float_bytes_, kCopyAlignment);
  float_bytes_ = segment.copies_offset + prepass->bytes();
  if (segment.batch->page_size() == 0) return;
  segment.page_begin_offset = round_up(int_bytes_);
  int_bytes_ = segment.page_begin_offset + prepass->num_requests() * std::int64_t{4};
}

// The pages that write() copies first, then those with an upload of their own. The bytes of both
// together are the same either way.
void Plan::place_page_indices() {
  auto place = [this](PlannedSegment& segment) {
    segment.page_indices_offset = round_up(int_bytes_);
    const auto bytes = static_cast<std::int64_t>(segment.batch->page_indices().size_bytes());
    int_bytes_ = round_up(segment.page_indices_offset + bytes);
  };
  for (PlannedSegment& segment : segments_) {
    if (segment.batch->pinned_page_indices() == nullptr) place(segment);
  }
  image_bytes_ = int_bytes_;
  for (PlannedSegment& segment : segments_) {
    if (segment.batch->pinned_page_indices() != nullptr) place(segment);
  }
}

bool Plan::launches_like(const Plan& other) const {
  if (rounds_.size() > 1 || other.rounds_.size() > 1) return false;
  if (segments_.size() != other.segments_.size() || !(layout() == other.layout()) ||
      sizes().num_ctas != other.sizes().num_ctas) {
    return false;
  }
  for (int s = 0; s < segments_.size(); ++s) {
    const PlannedSegment& one = segments_[s];
    const PlannedSegment& another = other.segments_[s];
    if (one.kernel != another.kernel || !(one.options == another.options) ||
        one.batch->page_size() != another.batch->page_size() ||
        sizes().segments[s].num_merges != other.sizes().segments[s].num_merges) {
      return false;
    }
  }
  return true;
}

void Plan::write(void* image) const {
  for (const PlannedRound& round : rounds_) {
    round.planner.write(static_cast<std::byte*>(image) + round.image_offset);
  }
  for (const PlannedSegment& segment : segments_) {
    auto copy = [&](std::int64_t offset, std::span<const std::int32_t> values) {
      if (values.empty()) return;
      std::memcpy(static_cast<std::byte*>(image) + offset, values.data(), values.size_bytes());
    };
    if (segment.batch->pinned_page_indices() == nullptr) {
      copy(segment.page_indices_offset, segment.batch->page_indices());
    }
    if (segment.prepass == nullptr || segment.batch->page_size() == 0) continue;
    copy(segment.page_begin_offset,
         segment.batch->page_begin().first(segment.prepass->num_requests()));
  }
}

}  // namespace preflash
