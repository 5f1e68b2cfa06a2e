#include "core/plan.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>

#include "registry/registry.h"

namespace preflash {
namespace {

constexpr std::int64_t kAlignment = 16;

constexpr std::int64_t round_up(std::int64_t bytes) {
  return ceil_div(bytes, kAlignment) * kAlignment;
}

bool fits(const ForwardKernel& kernel, const DeviceFacts& facts) {
  return facts.smem_per_block == 0 || kernel.smem_bytes <= facts.smem_per_block;
}

// A library of machine code runs on its own generation only, from the minor version that it was
// built for; PTX ("90+PTX") on everything later; code of a feature set ("90a") nowhere else.
void check_architecture(Family family, const DeviceFacts& facts) {
  if (facts.compute_capability == 0) return;
  FoundLibrary found = Registry::instance().library(family);
  if (found.table == nullptr) return;  // find() says what is missing and what would work
  const std::string_view list = found.table->architectures;
  for (std::size_t begin = 0; begin < list.size();) {
    std::size_t end = std::min(list.find(';', begin), list.size());
    std::string_view name = list.substr(begin, end - begin);
    int built_for = 0;
    std::from_chars(name.data(), name.data() + name.size(), built_for);
    bool ptx = name.find("PTX") != std::string_view::npos;
    bool nowhere_else = name.back() == 'a';
    bool same_generation = built_for / 10 == facts.compute_capability / 10;
    if (built_for == facts.compute_capability) return;
    if (built_for < facts.compute_capability && !nowhere_else && (same_generation || ptx)) return;
    begin = end + 1;
  }
  throw NotCompiledError(
      "backend \"" + std::string(backend_of(family)) + "\": its kernels were compiled for sm " +
      std::string(list) + "; device " + std::to_string(facts.device) + " (" + facts.name +
      ") is sm " + std::to_string(facts.compute_capability) +
      ". What would work: a build with PREFLASH_ARCHS=" + std::to_string(facts.compute_capability) +
      ", or backend \"cpu\"");
}

[[noreturn]] void refuse_size(const ForwardKernel& kernel, const DeviceFacts& facts) {
  throw NotCompiledError(std::string(kernel.id) + " needs " + std::to_string(kernel.smem_bytes) +
                         " bytes of shared memory; device " + std::to_string(facts.device) + " (" +
                         facts.name + ") gives a block " + std::to_string(facts.smem_per_block) +
                         ". What would work: a smaller head_dim");
}

// The wanted tile class, or the smaller one where the device's shared memory ends before.
const ForwardKernel* find_kernel(Family family, const SegmentProblem& problem,
                                 const DeviceFacts& facts) {
  TileClass wanted = choose_tile_class(problem, traits_of(family));
  const ForwardKernel* kernel = nullptr;
  for (TileClass tile_class : {wanted, TileClass::kDecode}) {
    FoundKernel found = Registry::instance().find(variant_of(problem, family, tile_class));
    if (found.kernel == nullptr) throw NotCompiledError(found.error);
    kernel = found.kernel;
    if (fits(*kernel, facts)) return kernel;
  }
  refuse_size(*kernel, facts);
}

// The one kernel that is compiled for both segments.
const ForwardKernel* find_joint_kernel(Family family, const Problem& problem,
                                       const DeviceFacts& facts) {
  FoundKernel found = Registry::instance().find_joint(variant_of(problem.segments[0], family),
                                                      variant_of(problem.segments[1], family));
  if (found.kernel == nullptr) throw NotCompiledError(found.error);
  if (!fits(*found.kernel, facts)) refuse_size(*found.kernel, facts);
  return found.kernel;
}

SegmentKernels find_kernels(Family family, const Problem& problem, const DeviceFacts& facts) {
  validate(problem);
  check_architecture(family, facts);
  SegmentKernels kernels;
  if (problem.segments.size() > 1 && traits_of(family).segments == OptionChoice::kCompiled) {
    const ForwardKernel* kernel = find_joint_kernel(family, problem, facts);
    kernels.add(kernel);
    kernels.add(kernel);
    return kernels;
  }
  for (const SegmentProblem& segment : problem.segments) {
    kernels.add(find_kernel(family, segment, facts));
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

// What runs all segments: the kernel of the one or of both, or both kernels as one launch.
ForwardKernel joint_kernel(const SegmentKernels& kernels, const char* id) {
  if (kernels.size() == 1 || is_joint(kernels)) return *kernels[0];
  FoundLaunch found = Registry::instance().find_launch(kernels);
  if (found.launch == nullptr) throw NotCompiledError(found.error);
  ForwardKernel joint;
  joint.id = id;
  joint.launch = found.launch;
  return joint;
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

Plan::Plan(Family family, int device, const PerSegment<PlanRequest>& requests,
           std::int64_t float_workspace_bytes)
    : Plan(family, device, requests, describe(requests, float_workspace_bytes)) {}

Plan::Plan(Family family, int device, const PerSegment<PlanRequest>& requests,
           const Problem& problem)
    : device_(device),
      kernels_(find_kernels(family, problem, facts_of(device))),
      id_(joint_id(kernels_)),
      kernel_(joint_kernel(kernels_, id_.c_str())),
      planner_(problem, facts_of(device), kernels_),
      graph_safe_(problem.segments[0].graph_max_rows > 0),
      int_bytes_(layout().int_bytes) {
  for (int s = 0; s < kernels_.size(); ++s) {
    const AttentionOptions& options = requests[s].options;
    const std::shared_ptr<const Batch>& batch = requests[s].batch;
    const std::int64_t offset = round_up(int_bytes_);
    segments_.add(
        {.options = options, .batch = batch, .kernel = kernels_[s], .page_indices_offset = offset});
    int_bytes_ = offset + static_cast<std::int64_t>(batch->page_indices().size_bytes());
  }
}

bool Plan::launches_like(const Plan& other) const {
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
  planner_.write(image);
  for (const PlannedSegment& segment : segments_) {
    std::span<const std::int32_t> pages = segment.batch->page_indices();
    if (pages.empty()) continue;
    std::memcpy(static_cast<std::byte*>(image) + segment.page_indices_offset, pages.data(),
                pages.size_bytes());
  }
}

}  // namespace preflash
