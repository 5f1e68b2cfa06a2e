// fa3's kernel of two segments against float64: a prefill beside a decode batch, with tensors,
// layouts, page sizes, scales and masks of their own, and either side first. Exits with 0, with 1
// on a mismatch, with 77 where no GPU runs the kernel.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check_support.h"
#include "kernels/sm90/forward_launch.cuh"
#include "planner/planner.h"

namespace preflash {
namespace {

struct Two {
  static constexpr char kId[] = "sm90_bf16_d128_two";
  static constexpr Variant kVariant = {.family = Family::kSm90,
                                       .q_dtype = DType::kBFloat16,
                                       .kv_dtype = DType::kBFloat16,
                                       .head_dim_qk = 128,
                                       .head_dim_vo = 128,
                                       .segments = Segments::kTwo};
  static constexpr TileShape kTile = {.m = 128, .n = 128, .stages = 2, .warps = 12};
  static constexpr TileShape kSecondTile = kTile;
};

}  // namespace
}  // namespace preflash

namespace check {
namespace {

using Element = __nv_bfloat16;

enum class Layout { kNhd, kHnd };

struct Lengths {
  int qo, kv;
};

// One segment's shapes and options in a case. page_size 0: ragged.
struct SideCase {
  std::vector<Lengths> requests;
  int page_size = 16;
  int num_qo_heads = 8;
  int num_kv_heads = 2;
  int head_dim = 128;
  bool causal = false;
  int window_left = -1;
  int fixed_split_size = 0;
  Layout layout = Layout::kNhd;
  float sm_scale = 0.0883f;
  float out_scale = 1.0f;
};

// A segment's lengths and tensors. Rows, pages and slots that no request owns hold NaN.
class Side {
 public:
  explicit Side(const SideCase& c)
      : c_(c), lengths_(c), q_(lengths_.tokens * c.num_qo_heads * c.head_dim, Element(kNan)) {
    set_strides();
    k_.assign(lengths_.pages * stride_page_, Element(kNan));
    v_ = k_;
    fill_owned();
    device_q_.emplace(q_);
    device_k_.emplace(k_);
    device_v_.emplace(v_);
    device_pages_.emplace(lengths_.page_indices);
    o_.emplace(q_.size());
    lse_.emplace(lengths_.tokens * c.num_qo_heads);
  }

  SegmentProblem problem() const {
    SegmentProblem problem;
    problem.num_qo_heads = c_.num_qo_heads;
    problem.num_kv_heads = c_.num_kv_heads;
    problem.head_dim_qk = problem.head_dim_vo = c_.head_dim;
    problem.q_dtype = problem.kv_dtype = problem.o_dtype = DType::kBFloat16;
    problem.causal = c_.causal;
    problem.window_left = c_.window_left;
    problem.split.fixed_split_size = c_.fixed_split_size;
    problem.qo_indptr = lengths_.qo_indptr;
    problem.kv_indptr = lengths_.kv_indptr;
    problem.last_page_len = lengths_.last_page_len;
    problem.page_size = c_.page_size;
    return problem;
  }

  ForwardSegment segment() {
    ForwardSegment segment;
    static_cast<AttentionOptions&>(segment) = problem();
    const int64_t stride = int64_t{c_.num_qo_heads} * c_.head_dim;
    segment.q = {device_q_->data(), stride, c_.head_dim, lengths_.tokens};
    segment.o = {o_->data(), stride, c_.head_dim, lengths_.tokens};
    segment.k = {device_k_->data(), lengths_.pages > 1 ? stride_page_ : 0,
                 stride_token_,     stride_head_,
                 lengths_.pages,    lengths_.page_tokens};
    segment.v = segment.k;
    segment.v.data = device_v_->data();
    segment.lse = {lse_->data(), c_.num_qo_heads, 1, 1.0f};
    segment.page_indices = c_.page_size > 0 ? device_pages_->data() : nullptr;
    segment.page_size = std::max(c_.page_size, 1);
    segment.group_size = c_.num_qo_heads / c_.num_kv_heads;
    segment.sm_scale = c_.sm_scale;
    segment.out_scale = c_.out_scale;
    return segment;
  }

  // Compares what the kernel wrote with float64; what no request owns must still be poison.
  void check(const std::string& name) const {
    const std::vector<Element> o = o_->host();
    const std::vector<float> lse = lse_->host();
    std::vector<char> owned(lengths_.tokens, 0);
    for (int r = 0; r < std::ssize(c_.requests); ++r) {
      std::vector<std::thread> threads;
      std::vector<int> bad(c_.num_qo_heads, 0);
      for (int head = 0; head < c_.num_qo_heads; ++head) {
        threads.emplace_back([&, r, head] {
          for (int i = 0; i < c_.requests[r].qo; ++i)
            bad[head] += !row_is_right(o, lse, r, i, head);
        });
      }
      for (std::thread& thread : threads) thread.join();
      expect(std::accumulate(bad.begin(), bad.end(), 0) == 0,
             name + ", request " + std::to_string(r));
      std::fill_n(owned.begin() + lengths_.qo_indptr[r], c_.requests[r].qo, 1);
    }
    const int64_t row = int64_t{c_.num_qo_heads} * c_.head_dim;
    for (int64_t token = 0; token < lengths_.tokens; ++token) {
      if (owned[token]) continue;
      expect(std::all_of(&o[token * row], &o[token * row] + row, is_poison<Element>),
             name + ": a row that no request owns was written");
    }
  }

 private:
  struct Indices {
    std::vector<int32_t> qo_indptr = {3};
    std::vector<int32_t> kv_indptr;
    std::vector<int32_t> last_page_len;
    std::vector<int32_t> page_indices;
    int64_t tokens, pages, page_tokens;

    explicit Indices(const SideCase& c) : kv_indptr{c.page_size > 0 ? 2 : 5} {
      for (const Lengths& request : c.requests) {
        qo_indptr.push_back(qo_indptr.back() + request.qo);
        int units = c.page_size > 0 ? (request.kv + c.page_size - 1) / c.page_size : request.kv;
        kv_indptr.push_back(kv_indptr.back() + units);
        if (c.page_size == 0) continue;
        last_page_len.push_back(units > 0 ? request.kv - (units - 1) * c.page_size : c.page_size);
      }
      tokens = qo_indptr.back() + 5;
      pages = c.page_size > 0 ? kv_indptr.back() + 6 : 1;
      page_tokens = c.page_size > 0 ? c.page_size : kv_indptr.back() + 7;
      page_indices.resize(pages);
      std::iota(page_indices.begin(), page_indices.end(), 0);
      std::shuffle(page_indices.begin(), page_indices.end(), rng);
    }
  };

  void set_strides() {
    const bool heads_first = c_.layout == Layout::kHnd;
    stride_token_ = heads_first ? c_.head_dim : int64_t{c_.num_kv_heads} * c_.head_dim;
    stride_head_ = heads_first ? lengths_.page_tokens * c_.head_dim : c_.head_dim;
    stride_page_ = lengths_.page_tokens * c_.num_kv_heads * c_.head_dim;
  }
  int64_t kv_offset(int request, int key, int head) const {
    const int64_t begin = lengths_.kv_indptr[request];
    if (c_.page_size == 0) return (begin + key) * stride_token_ + head * stride_head_;
    return lengths_.page_indices[begin + key / c_.page_size] * stride_page_ +
           key % c_.page_size * stride_token_ + head * stride_head_;
  }
  int64_t q_offset(int request, int i, int head) const {
    const int64_t token = lengths_.qo_indptr[request] + i;
    return (token * c_.num_qo_heads + head) * c_.head_dim;
  }
  void fill_owned() {
    for (int r = 0; r < std::ssize(c_.requests); ++r) {
      const int64_t rows = int64_t{c_.requests[r].qo} * c_.num_qo_heads;
      std::generate_n(&q_[q_offset(r, 0, 0)], rows * c_.head_dim, [] { return Element(normal()); });
      for (int key = 0; key < c_.requests[r].kv; ++key) {
        for (int head = 0; head < c_.num_kv_heads; ++head) {
          const int64_t at = kv_offset(r, key, head);
          std::generate_n(&k_[at], c_.head_dim, [] { return Element(normal()); });
          std::generate_n(&v_[at], c_.head_dim, [] { return Element(normal()); });
        }
      }
    }
  }

  // The logits of a row, -inf where it keeps no key.
  std::vector<double> logits(int request, int i, int head) const {
    const auto [qo, kv] = c_.requests[request];
    const int last = c_.causal ? i + kv - qo : kv - 1;
    const int first = c_.window_left >= 0 ? i + kv - qo - c_.window_left : 0;
    std::vector<double> logits(kv, -INFINITY);
    const Element* q = &q_[q_offset(request, i, head)];
    for (int key = std::max(first, 0); key <= std::min(last, kv - 1); ++key) {
      const Element* k = &k_[kv_offset(request, key, head / group())];
      double dot = 0.0;
      for (int d = 0; d < c_.head_dim; ++d) dot += double(float(q[d])) * double(float(k[d]));
      logits[key] = dot * c_.sm_scale;
    }
    return logits;
  }
  // One rounding of each weight to bfloat16, and one of the result.
  bool row_is_right(const std::vector<Element>& o, const std::vector<float>& lse, int request,
                    int i, int head) const {
    const std::vector<double> x = logits(request, i, head);
    double largest = -INFINITY, sum = 0.0;
    for (double logit : x) largest = std::max(largest, logit);
    std::vector<double> out(c_.head_dim, 0.0), size(c_.head_dim, 0.0);
    for (int key = 0; key < std::ssize(x); ++key) {
      if (std::isinf(x[key])) continue;
      const double weight = std::exp(x[key] - largest);
      const Element* v = &v_[kv_offset(request, key, head / group())];
      sum += weight;
      for (int d = 0; d < c_.head_dim; ++d) {
        out[d] += weight * double(float(v[d]));
        size[d] += weight * std::abs(double(float(v[d])));
      }
    }
    const double expected_lse = sum > 0.0 ? (largest + std::log(sum)) / std::log(2.0) : -INFINITY;
    const float got_lse = lse[q_offset(request, i, head) / c_.head_dim];
    bool right = std::isinf(expected_lse)
                     ? got_lse == float(expected_lse)
                     : std::abs(got_lse - expected_lse) <= 3e-5 + 1e-6 * std::abs(expected_lse);
    for (int d = 0; d < c_.head_dim; ++d) {
      const double scale = sum > 0.0 ? c_.out_scale / sum : 0.0;
      const double bound = 1.1 * kHalfUlp<Element> * scale * (size[d] + std::abs(out[d])) + 2e-5;
      const double got = float(o[q_offset(request, i, head) + d]);
      right = right && std::abs(got - out[d] * scale) <= bound;
    }
    return right;
  }
  int group() const { return c_.num_qo_heads / c_.num_kv_heads; }

  SideCase c_;
  Indices lengths_;
  int64_t stride_page_, stride_token_, stride_head_;
  std::vector<Element> q_, k_, v_;
  std::optional<DeviceArray<Element>> device_q_, device_k_, device_v_, o_;
  std::optional<DeviceArray<int32_t>> device_pages_;
  std::optional<DeviceArray<float>> lse_;
};

CombineParams combine_of(const ForwardSegment& segment, const ForwardKernel& kernel) {
  CombineParams combine;
  combine.o = segment.o;
  combine.lse = segment.lse;
  combine.o_dtype = segment.o_dtype;
  combine.partial_o = segment.partial_o;
  combine.partial_lse = segment.partial_lse;
  combine.tile_rows = rows_per_tile(kernel.traits.tile_rows, kernel.tile.m, segment.group_size);
  combine.group_size = segment.group_size;
  combine.head_dim_vo = segment.head_dim_vo;
  return combine;
}

// One launch of both, and what was split merged.
void run(Side& first, Side& second, const DeviceFacts& facts) {
  const ForwardKernel kernel = sm90::forward_kernel_entry<Two>();
  Problem problem;
  SegmentKernels kernels;
  for (const Side* side : {&first, &second}) {
    problem.segments.add(side->problem());
    kernels.add(&kernel);
  }
  problem.float_workspace_bytes = std::int64_t{64} << 20;
  validate(problem);
  Planner planner(problem, facts, kernels);
  std::vector<uint8_t> image(planner.layout().int_bytes);
  planner.write(image.data());
  DeviceArray<uint8_t> ints(image);
  DeviceArray<uint8_t> floats(std::max<int64_t>(planner.layout().float_bytes, 16));

  ForwardParams params;
  params.requests = planner.layout().requests.in(ints.data());
  params.items = planner.layout().items.in(ints.data());
  params.cta_begin = planner.layout().cta_begin.in(ints.data());
  params.num_items = planner.sizes().num_items;
  params.num_segments = 2;
  Side* sides[] = {&first, &second};
  for (int s = 0; s < 2; ++s) {
    const SegmentLayout& layout = planner.layout().segments[s];
    params.segments[s] = sides[s]->segment();
    params.segments[s].partial_o = layout.partial_o.in(floats.data());
    params.segments[s].partial_lse = layout.partial_lse.in(floats.data());
  }
  const LaunchTarget target{.device = 0};
  if (planner.sizes().num_ctas > 0) {
    accept(kernel.launch(params, planner.sizes().num_ctas, target));
  }
  for (int s = 0; s < 2; ++s) {
    if (planner.sizes().segments[s].num_merges == 0) continue;
    CombineParams combine = combine_of(params.segments[s], kernel);
    combine.requests = params.requests;
    combine.merges = planner.layout().segments[s].merges.in(ints.data());
    combine.num_merges = planner.sizes().segments[s].num_merges;
    accept(services.combine(combine, target));
  }
  require(cudaDeviceSynchronize());
}

std::vector<Lengths> decode_of(int count, int shortest, int longest) {
  std::vector<Lengths> requests(count);
  for (Lengths& request : requests) request = {1, uniform(shortest, longest)};
  return requests;
}

struct Case {
  const char* name;
  SideCase prefill;
  SideCase decode;
};

std::vector<Case> cases() {
  return {
      {"ragged and pages of 16",
       {.requests = {{301, 777}}, .page_size = 0, .causal = true},
       {.requests = decode_of(33, 0, 900)}},
      {"pages of 16 and ragged, windows",
       {.requests = {{129, 130}, {64, 515}}, .causal = true},
       {.requests = decode_of(17, 1, 700), .page_size = 0, .window_left = 100}},
      {"pages of 1 and of 16, HND",
       {.requests = {{200, 333}, {0, 10}, {5, 0}}, .page_size = 1, .causal = true},
       {.requests = decode_of(21, 0, 600), .layout = Layout::kHnd}},
      {"ragged and pages of 1",
       {.requests = {{255, 255}}, .page_size = 0},
       {.requests = decode_of(40, 0, 500), .page_size = 1, .window_left = 33}},
      {"pages of 5 and of 24",
       {.requests = {{150, 99}}, .page_size = 5, .causal = true},
       {.requests = decode_of(9, 1, 1200), .page_size = 24}},
      {"both split",
       {.requests = {{260, 1300}},
        .page_size = 8,
        .causal = true,
        .window_left = 300,
        .fixed_split_size = 256},
       {.requests = decode_of(11, 100, 2500), .page_size = 64, .fixed_split_size = 384}},
      {"other heads and scales",
       {.requests = {{100, 300}},
        .page_size = 0,
        .num_qo_heads = 6,
        .num_kv_heads = 6,
        .head_dim = 96,
        .causal = true,
        .sm_scale = 0.05f,
        .out_scale = 2.0f},
       {.requests = decode_of(13, 10, 800),
        .page_size = 32,
        .num_qo_heads = 15,
        .num_kv_heads = 3,
        .sm_scale = -0.1f,
        .out_scale = 0.5f}},
      {"no decode", {.requests = {{111, 222}}, .page_size = 0, .causal = true}, {.requests = {}}},
      {"no keys", {.requests = {{0, 0}}, .page_size = 0}, {.requests = {{1, 0}, {0, 0}, {1, 0}}}},
      {"decode that the planner splits",
       {.requests = {{70, 70}}, .page_size = 0, .causal = true},
       {.requests = {{1, 9000}, {1, 30}}}},
      {"lists that begin late",
       {.requests = {{512, 512}, {77, 300}}, .causal = true},
       {.requests = decode_of(900, 1, 128)}},
      {"groups above a tile's rows",
       {.requests = {{20, 65}}, .num_qo_heads = 130, .num_kv_heads = 1, .causal = true},
       {.requests = {{1, 300}, {4, 200}}, .page_size = 1, .num_qo_heads = 40, .num_kv_heads = 1}},
  };
}

}  // namespace
}  // namespace check

int main() {
  using namespace check;
  DeviceFacts facts;
  if (services.device_count() == 0 || services.query(0, &facts) != nullptr ||
      facts.compute_capability != 90) {
    std::printf("no GPU that runs fa3: nothing was checked\n");
    return 77;
  }
  for (const Case& c : cases()) {
    for (bool decode_first : {false, true}) {
      Side prefill(c.prefill), decode(c.decode);
      run(decode_first ? decode : prefill, decode_first ? prefill : decode, facts);
      const std::string name = std::string(c.name) + (decode_first ? ", decode first" : "");
      prefill.check(name + ": prefill");
      decode.check(name + ": decode");
    }
  }
  std::printf("two segments: %zu cases, %d failures\n", cases().size(), num_failures);
  return num_failures > 0;
}
