// The planner as tests see it: `preflash_harness.planner`.
#include "planner/planner.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/prepass.h"
#include "harness/harness.h"
#include "registry/matrix.h"

namespace py = pybind11;

namespace preflash {
namespace {

constexpr std::size_t kCanaryBytes = 64;
constexpr char kCanary = '\xA5';

// Arrays that a segment's problem points to, and its kernel.
struct CaseSegment {
  std::vector<std::int32_t> qo_indptr;
  std::vector<std::int32_t> kv_indptr;
  std::vector<std::int32_t> last_page_len;
  std::vector<std::int64_t> mask_indptr;
  ForwardKernel kernel;
};

struct Case {
  CaseSegment segments[kMaxSegments];
  Problem problem;
  DeviceFacts facts;
  PlannerOptions options;

  SegmentKernels kernels() const {
    SegmentKernels kernels;
    for (int s = 0; s < problem.segments.size(); ++s) kernels.add(&segments[s].kernel);
    return kernels;
  }
  Planner planner() const {
    validate(problem);
    return {problem, facts, kernels(), options};
  }
};

// Takes keyword arguments one by one, so that a misspelled one is an error and not ignored.
class Keywords {
 public:
  explicit Keywords(const py::dict& given) : left_(given.attr("copy")()) {}

  template <class T>
  T take(const char* name, T otherwise) {
    if (!left_.contains(name)) return otherwise;
    T value = py::cast<T>(left_[name]);
    PyDict_DelItemString(left_.ptr(), name);
    return value;
  }

  void finish() const {
    if (!left_.empty()) {
      throw py::type_error("unknown arguments: " + py::cast<std::string>(py::str(left_)));
    }
  }

 private:
  py::dict left_;
};

Family family_of(const std::string& name) {
  for (Family family : kFamilies) {
    if (name == name_of(family)) return family;
  }
  throw std::invalid_argument("family = " + name);
}

Schedule schedule_of(const std::string& name) {
  if (name == "auto") return Schedule::kAuto;
  if (name == "persistent") return Schedule::kPersistent;
  if (name == "one_per_item") return Schedule::kOnePerItem;
  throw std::invalid_argument("schedule = " + name);
}

void fill_segment(Keywords& given, CaseSegment& out, SegmentProblem& problem) {
  out.qo_indptr = given.take("qo_indptr", std::vector<std::int32_t>{0});
  out.kv_indptr = given.take("kv_indptr", std::vector<std::int32_t>{0});
  out.last_page_len = given.take("last_page_len", std::vector<std::int32_t>{});
  auto mask_indptr = given.take<std::optional<std::vector<std::int64_t>>>("mask_indptr", {});
  problem.qo_indptr = out.qo_indptr;
  problem.kv_indptr = out.kv_indptr;
  problem.last_page_len = out.last_page_len;
  if (mask_indptr.has_value()) {
    out.mask_indptr = *mask_indptr;
    problem.mask_indptr = out.mask_indptr;
  }
  problem.mask = given.take("custom_mask", mask_indptr.has_value()) ? Mask::kCustom : Mask::kBounds;
  problem.page_size = given.take("page_size", 0);
  problem.lengths_are_upper_bounds = given.take("lengths_are_upper_bounds", false);
  problem.num_qo_heads = given.take("num_qo_heads", 1);
  problem.num_kv_heads = given.take("num_kv_heads", 1);
  problem.head_dim_qk = given.take("head_dim_qk", 128);
  problem.head_dim_vo = given.take("head_dim_vo", problem.head_dim_qk);
  problem.causal = given.take("causal", false);
  problem.window_left = given.take("window_left", -1);
  problem.chunk_size = given.take("chunk_size", 0);
  problem.position = given.take("position", Position::kNone);
  problem.kv_dtype = given.take("kv_dtype", DType::kFloat16);
  problem.q_dtype = given.take("q_dtype", DType::kFloat16);
  problem.o_dtype = given.take("o_dtype", DType::kFloat16);
  problem.prepass = given.take("prepass", Prepass::kAuto);
  problem.split.fixed_split_size = given.take("fixed_split_size", 0);
  problem.split.disable = given.take("disable_split_kv", false);
  problem.graph_max_rows = given.take("graph_max_rows", 0);
  problem.graph_mask_bytes = given.take("graph_mask_bytes", std::int64_t{0});
  out.kernel.aligns_query_tiles = given.take("aligns_query_tiles", false);
  if (given.take("mask_tiles", false)) out.kernel.mask_tile_use = MaskTileUse::kUsed;
  out.kernel.variant.position = problem.position;
  out.kernel.variant.mask = problem.mask;
  out.kernel.variant.head_dim_qk = problem.head_dim_qk;
  out.kernel.variant.head_dim_vo = problem.head_dim_vo;
  out.kernel.tile.m = given.take("tile_m", 128);
  out.kernel.tile.n = given.take("tile_n", 64);
  out.kernel.tile.ctas_per_sm = given.take("ctas_per_sm", 2);
  out.kernel.ctas_per_item = given.take("ctas_per_item", 1);
}

// Fills `out` in place: its problem points into it. Two segments are given as a list of two dicts,
// one as keywords beside those of the launch.
void fill_case(const py::kwargs& kwargs, Case& out) {
  Keywords given(kwargs);
  const Family family = family_of(given.take("family", std::string("sm80")));
  out.problem.float_workspace_bytes =
      given.take("float_workspace_bytes", std::int64_t{128} * 1024 * 1024);
  out.facts.num_sms = given.take("num_sms", 132);
  out.facts.l2_bytes = given.take("l2_bytes", std::int64_t{0});
  out.options.first_tile = given.take("first_tile", std::int64_t{0});
  out.options.schedule = schedule_of(given.take("schedule", std::string("auto")));
  const auto segments = given.take("segments", std::vector<py::dict>{});
  if (segments.empty()) fill_segment(given, out.segments[0], out.problem.segments.add({}));
  given.finish();
  for (const py::dict& segment : segments) {
    Keywords of_segment(segment);
    SegmentProblem& problem = out.problem.segments.add({});
    fill_segment(of_segment, out.segments[out.problem.segments.size() - 1], problem);
    of_segment.finish();
  }
  for (CaseSegment& segment : out.segments) {
    segment.kernel.variant.family = family;
    segment.kernel.traits = traits_of(family);
  }
}

// Lists have one entry for each segment.
py::dict layout_dict(const PlanLayout& layout, int num_segments) {
  py::list segments;
  for (const SegmentLayout& segment : std::span(layout.segments).first(num_segments)) {
    py::dict out;
    out["merges"] = segment.merges.bytes;
    out["partial_o"] = segment.partial_o.bytes;
    out["partial_lse"] = segment.partial_lse.bytes;
    out["mask_tiles_begin"] = segment.mask_tiles_begin.bytes;
    out["mask_tiles"] = segment.mask_tiles.bytes;
    segments.append(out);
  }
  py::dict out;
  out["requests"] = layout.requests.bytes;
  out["items"] = layout.items.bytes;
  out["cta_begin"] = layout.cta_begin.bytes;
  out["segments"] = segments;
  out["int_bytes"] = layout.int_bytes;
  out["float_bytes"] = layout.float_bytes;
  return out;
}

py::dict sizes_dict(const PlanSizes& sizes, int num_segments) {
  py::list segments;
  int num_partial_rows = 0;
  for (const SegmentSizes& segment : std::span(sizes.segments).first(num_segments)) {
    py::dict out;
    out["num_merges"] = segment.num_merges;
    out["num_partial_rows"] = segment.num_partial_rows;
    out["num_mask_tile_words"] = segment.num_mask_tile_words;
    segments.append(out);
    num_partial_rows += segment.num_partial_rows;
  }
  py::dict out;
  out["num_requests"] = sizes.num_requests;
  out["num_items"] = sizes.num_items;
  out["num_ctas"] = sizes.num_ctas;
  out["num_merges"] = sizes.num_merges();
  out["num_partial_rows"] = num_partial_rows;
  out["segments"] = segments;
  out["num_kv_tiles"] = sizes.num_kv_tiles;
  out["makespan_kv_tiles"] = sizes.makespan_kv_tiles;
  return out;
}

// The int workspace as a kernel would find it, followed by canary bytes that nobody may touch.
py::dict plan(const py::kwargs& kwargs) {
  Case given;
  fill_case(kwargs, given);
  const Planner planner = given.planner();
  std::string image(planner.layout().int_bytes + kCanaryBytes, kCanary);
  planner.write(image.data());
  py::dict out;
  const int num_segments = given.problem.segments.size();
  out["sizes"] = sizes_dict(planner.sizes(), num_segments);
  out["layout"] = layout_dict(planner.layout(), num_segments);
  out["image"] = py::bytes(image);
  out["end_tile"] = planner.is_last() ? py::object(py::none()) : py::int_(planner.end_tile());
  return out;
}

// Makes and writes a plan that may be too large to return.
void write_plan(const py::kwargs& kwargs) {
  Case given;
  fill_case(kwargs, given);
  const Planner planner = given.planner();
  std::vector<std::byte> image(planner.layout().int_bytes);
  planner.write(image.data());
}

std::string tile_class(const py::kwargs& kwargs) {
  Case given;
  fill_case(kwargs, given);
  return std::string(
      name_of(choose_tile_class(given.problem.segments[0], given.segments[0].kernel.traits)));
}

// multiplies_8_bits: whether the kernel does, rather than dequantise or rotate on load.
bool prefers(bool multiplies_8_bits, const py::kwargs& kwargs) {
  Case given;
  fill_case(kwargs, given);
  const SegmentProblem& problem = given.problem.segments[0];
  // One kernel stands for both: the facts that count of either are no facts of the other.
  ForwardKernel kernel = given.segments[0].kernel;
  kernel.variant.load = multiplies_8_bits ? Load::kDirect : Load::kConverted;
  if (multiplies_8_bits) kernel.variant.q_dtype = problem.q_dtype;
  kernel.variant.head_dim_qk = problem.head_dim_qk;
  return prefers_prepass(problem, kernel);
}

void check(const py::kwargs& kwargs) {
  Case given;
  fill_case(kwargs, given);
  validate(given.problem);
}

MaskBounds bounds_from(Keywords& given) {
  return {.qo_len = given.take("qo_len", 0),
          .kv_len = given.take("kv_len", 0),
          .window_left = given.take("window_left", -1),
          .causal = given.take("causal", false),
          .chunk_size = given.take("chunk_size", 0)};
}

// {begin, full_begin, full_end, end} for tokens [first, last] and keys [key_begin, key_end).
std::vector<int> tiles_of(const py::kwargs& kwargs) {
  Keywords given(kwargs);
  const MaskBounds bounds = bounds_from(given);
  const RowSpan rows{given.take("first", 0), given.take("last", 0)};
  const KeySpan keys{given.take("key_begin", 0), given.take("key_end", bounds.kv_len)};
  const int tile_n = given.take("tile_n", 64);
  const Mask mask = given.take("custom_mask", false) ? Mask::kCustom : Mask::kBounds;
  given.finish();
  const TileRange range = touched_tiles(bounds, rows, keys, tile_n, mask);
  return {range.begin, range.full_begin, range.full_end, range.end};
}

// keeps[row][key] of one request.
std::vector<std::vector<bool>> keeps(const py::kwargs& kwargs) {
  Keywords given(kwargs);
  const MaskBounds bounds = bounds_from(given);
  given.finish();
  std::vector<std::vector<bool>> kept(bounds.qo_len, std::vector<bool>(bounds.kv_len));
  for (int row = 0; row < bounds.qo_len; ++row) {
    for (int key = 0; key < bounds.kv_len; ++key) kept[row][key] = bounds.keeps(row, key);
  }
  return kept;
}

}  // namespace

void bind_planner(py::module_& module) {
  py::module_ m = module.def_submodule("planner", "The planner on its own, for tests.");
  m.def("plan", &plan);
  m.def("write_plan", &write_plan);
  m.def("tile_class", &tile_class);
  m.def("validate", &check);
  m.def("prefers_prepass", &prefers, py::arg("multiplies_8_bits") = false);
  m.def("touched_tiles", &tiles_of);
  m.def("keeps", &keeps);
}

}  // namespace preflash
