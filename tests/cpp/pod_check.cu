// Prefill beside decode on a GPU: kernels of two segments against float64, in the planner's order
// and under its persistent schedule, and the time of one launch beside that of two. Exits with 0,
// with 1 on a mismatch.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -Icpp/include -Icpp -I$GENERATED
//        -o pod_check tests/cpp/pod_check.cu cpp/planner/*.cpp cpp/kernels/combine/combine.cu
//        $OBJECTS_OF_THE_KERNELS
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/combine/combine.h"
#include "planner/planner.h"

namespace preflash {
ForwardKernel preflash_entry_sm80_bf16_d128_two();
ForwardKernel preflash_entry_sm80_bf16_d128_custom_two();
ForwardKernel preflash_entry_sm80_bf16_d128();
ForwardKernel preflash_entry_sm80_bf16_d128_decode();
#ifdef POD_CHECK_SM90
ForwardKernel preflash_entry_sm90_bf16_d128();
#endif
}  // namespace preflash

namespace {

using namespace preflash;
using Bf16 = __nv_bfloat16;

constexpr int kDim = 128;
std::mt19937 rng(7);
int num_failures = 0;

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
struct DeviceArray {
  T* data = nullptr;
  std::size_t count = 0;
  explicit DeviceArray(std::size_t n) : count(n) {
    require(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)), "cudaMalloc");
    require(cudaMemset(data, 0xFF, n * sizeof(T)), "cudaMemset");  // NaN in every dtype
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    require(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  std::vector<T> host() const {
    std::vector<T> values(count);
    require(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return values;
  }
};

struct SideShape {
  std::vector<int> qo_lens;
  std::vector<int> kv_lens;
  bool causal = false;
  bool masked = false;
  int page_size = 16;
  int window_left = -1;
};

// One segment's lengths and tensors: paged, with NaN wherever no request owns a slot.
struct Side {
  SideShape shape;
  int heads_q, heads_kv;
  std::vector<std::int32_t> qo_indptr{0}, page_indptr{0}, last_page, pages;
  std::vector<std::int64_t> mask_indptr{0};
  std::vector<std::uint8_t> mask;
  std::unique_ptr<DeviceArray<Bf16>> q, k, v, o;
  std::unique_ptr<DeviceArray<float>> lse, partial_o;
  std::unique_ptr<DeviceArray<PartialLse>> partial_lse;
  std::unique_ptr<DeviceArray<std::int32_t>> page_list;
  std::unique_ptr<DeviceArray<std::uint8_t>> mask_bits;
  std::vector<Bf16> host_q, host_k, host_v;

  Side(const SideShape& s, int hq, int hkv) : shape(s), heads_q(hq), heads_kv(hkv) {
    for (std::size_t i = 0; i < s.qo_lens.size(); ++i) {
      const int num_pages = (s.kv_lens[i] + s.page_size - 1) / s.page_size;
      qo_indptr.push_back(qo_indptr.back() + s.qo_lens[i]);
      page_indptr.push_back(page_indptr.back() + num_pages);
      last_page.push_back(num_pages ? (s.kv_lens[i] - 1) % s.page_size + 1 : 1);
      const std::int64_t bits = std::int64_t{s.qo_lens[i]} * s.kv_lens[i];
      mask_indptr.push_back(mask_indptr.back() + (bits + 7) / 8);
    }
    pages.resize(page_indptr.back());
    std::iota(pages.begin(), pages.end(), 1);
    std::shuffle(pages.begin(), pages.end(), rng);
  }

  std::size_t row_of(int request, int key) const {
    const int page = pages[page_indptr[request] + key / shape.page_size];
    return std::size_t(page) * shape.page_size + key % shape.page_size;
  }

  void allocate(bool with_values) {
    const std::size_t rows = std::size_t(pages.size() + 2) * shape.page_size;
    const std::size_t kv = rows * heads_kv * kDim, nq = std::size_t(qo_indptr.back()) * heads_q;
    if (with_values) {
      std::normal_distribution<float> normal;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      host_k.assign(kv, __float2bfloat16(nan));
      host_v = host_k;
      host_q.resize(nq * kDim);
      for (Bf16& x : host_q) x = __float2bfloat16(normal(rng));
      for (std::size_t i = 0; i < shape.kv_lens.size(); ++i) {
        for (int key = 0; key < shape.kv_lens[i]; ++key) {
          for (int d = 0; d < heads_kv * kDim; ++d) {
            const std::size_t at = row_of(i, key) * heads_kv * kDim + d;
            host_k[at] = __float2bfloat16(normal(rng));
            host_v[at] = __float2bfloat16(normal(rng));
          }
        }
      }
      q = std::make_unique<DeviceArray<Bf16>>(host_q);
      k = std::make_unique<DeviceArray<Bf16>>(host_k);
      v = std::make_unique<DeviceArray<Bf16>>(host_v);
    } else {
      q = std::make_unique<DeviceArray<Bf16>>(nq * kDim);
      k = std::make_unique<DeviceArray<Bf16>>(kv);
      v = std::make_unique<DeviceArray<Bf16>>(kv);
      // Random bits of about one, quickly.
      std::vector<Bf16> noise(1 << 22);
      std::normal_distribution<float> normal;
      for (Bf16& x : noise) x = __float2bfloat16(normal(rng));
      for (auto* array : {q.get(), k.get(), v.get()}) {
        for (std::size_t at = 0; at < array->count; at += noise.size()) {
          const std::size_t n = std::min(noise.size(), array->count - at);
          require(cudaMemcpy(array->data + at, noise.data(), n * 2, cudaMemcpyHostToDevice), "");
        }
      }
    }
    mask.assign(mask_indptr.back() + 16, 0);
    for (std::uint8_t& byte : mask) byte = rng() & rng() ? rng() : 0;
    mask_bits = std::make_unique<DeviceArray<std::uint8_t>>(mask);
    o = std::make_unique<DeviceArray<Bf16>>(nq * kDim);
    lse = std::make_unique<DeviceArray<float>>(nq);
    page_list = std::make_unique<DeviceArray<std::int32_t>>(pages);
  }

  void describe(SegmentProblem& problem) const {
    problem.num_qo_heads = heads_q;
    problem.num_kv_heads = heads_kv;
    problem.head_dim_qk = problem.head_dim_vo = kDim;
    problem.q_dtype = problem.kv_dtype = problem.o_dtype = DType::kBFloat16;
    problem.causal = shape.causal;
    problem.window_left = shape.window_left;
    problem.qo_indptr = qo_indptr;
    problem.kv_indptr = page_indptr;
    problem.last_page_len = last_page;
    problem.page_size = shape.page_size;
    if (shape.masked) {
      problem.mask = Mask::kCustom;
      problem.mask_indptr = mask_indptr;
    }
  }

  void fill(ForwardSegment& segment) const {
    const std::int64_t row = kDim, token = heads_q * kDim;
    segment.q = {q->data, token, row, qo_indptr.back()};
    segment.o = {o->data, token, row, qo_indptr.back()};
    segment.lse = {lse->data, heads_q, 1, 1.0f};
    const std::int64_t kv_token = heads_kv * kDim, page = kv_token * shape.page_size;
    const std::int64_t num_pages = std::int64_t(pages.size()) + 2;
    segment.k = {k->data, page, kv_token, kDim, num_pages, shape.page_size};
    segment.v = {v->data, page, kv_token, kDim, num_pages, shape.page_size};
    segment.page_indices = page_list->data;
    segment.page_size = shape.page_size;
    segment.group_size = heads_q / heads_kv;
    segment.sm_scale = 1.0f / std::sqrt(float(kDim));
    if (shape.masked) segment.extras.mask_bits = mask_bits->data;
  }

  bool kept(int request, int row, int key) const {
    const int delta = shape.kv_lens[request] - shape.qo_lens[request];
    if (shape.causal && !shape.masked && key > row + delta) return false;
    if (shape.window_left >= 0 && key < row + delta - shape.window_left) return false;
    if (!shape.masked) return true;
    const std::int64_t bit = std::int64_t{row} * shape.kv_lens[request] + key;
    return mask[mask_indptr[request] + bit / 8] >> (bit % 8) & 1;
  }

  void check(const std::string& what) const {
    const std::vector<Bf16> out = o->host();
    const std::vector<float> got_lse = lse->host();
    const int group = heads_q / heads_kv;
    double worst = 0.0, worst_lse = 0.0;
    for (std::size_t i = 0; i < shape.qo_lens.size(); ++i) {
      for (int row = 0; row < shape.qo_lens[i]; ++row) {
        for (int head = 0; head < heads_q; ++head) {
          const std::size_t at = (std::size_t(qo_indptr[i]) + row) * heads_q + head;
          std::vector<double> logits(shape.kv_lens[i], -INFINITY), sum(kDim, 0.0);
          double largest = -INFINITY, total = 0.0;
          for (int key = 0; key < shape.kv_lens[i]; ++key) {
            if (!kept(i, row, key)) continue;
            const Bf16* a = &host_q[at * kDim];
            const Bf16* b = &host_k[(row_of(i, key) * heads_kv + head / group) * kDim];
            double dot = 0.0;
            for (int d = 0; d < kDim; ++d) {
              dot += double(__bfloat162float(a[d])) * __bfloat162float(b[d]);
            }
            largest = std::max(largest, logits[key] = dot / std::sqrt(double(kDim)));
          }
          for (int key = 0; key < shape.kv_lens[i]; ++key) {
            if (std::isinf(logits[key])) continue;
            const double p = std::exp(logits[key] - largest);
            const Bf16* b = &host_v[(row_of(i, key) * heads_kv + head / group) * kDim];
            total += p;
            for (int d = 0; d < kDim; ++d) sum[d] += p * __bfloat162float(b[d]);
          }
          const double expected_lse =
              total > 0 ? (largest + std::log(total)) / std::log(2.0) : -INFINITY;
          const float lse_here = got_lse[at];
          if (std::isinf(expected_lse)) {
            if (lse_here != -INFINITY) worst_lse = INFINITY;
          } else {
            const double off = std::abs(lse_here - expected_lse);
            worst_lse = off <= 1e9 ? std::max(worst_lse, off) : INFINITY;
          }
          for (int d = 0; d < kDim; ++d) {
            const double expected = total > 0 ? sum[d] / total : 0.0;
            const double off = std::abs(__bfloat162float(out[at * kDim + d]) - expected);
            worst = off <= 1e9 ? std::max(worst, off) : INFINITY;
          }
        }
      }
    }
    const bool ok = worst < 0.03 && worst_lse < 1e-3;
    if (!ok) ++num_failures;
    std::printf("%s %s: out %.4f, lse %.6f\n", ok ? "ok    " : "FAILED", what.c_str(), worst,
                worst_lse);
  }
};

// A plan of one or two sides, on the device.
struct Planned {
  std::vector<Side*> sides;
  ForwardKernel kernel;
  std::unique_ptr<Planner> planner;
  std::vector<char> image;
  std::unique_ptr<DeviceArray<char>> work;
  ForwardParams params;
  int num_ctas = 0;

  Planned(std::vector<Side*> given, const ForwardKernel& of, Schedule schedule = Schedule::kAuto)
      : sides(std::move(given)), kernel(of) {
    cudaDeviceProp properties;
    require(cudaGetDeviceProperties(&properties, 0), "properties");
    DeviceFacts facts;
    facts.device = 0;
    facts.compute_capability = 90;
    facts.num_sms = properties.multiProcessorCount;
    facts.smem_per_block = int(properties.sharedMemPerBlockOptin);
    facts.smem_per_sm = int(properties.sharedMemPerMultiprocessor);
    facts.l2_bytes = properties.l2CacheSize;
    Problem problem;
    problem.float_workspace_bytes = 128 << 20;
    SegmentKernels kernels;
    for (Side* side : sides) {
      side->describe(problem.segments.add({}));
      kernels.add(&kernel);
    }
    planner = std::make_unique<Planner>(problem, facts, kernels, PlannerOptions{schedule});
    image.resize(planner->layout().int_bytes);
    planner->write(image.data());
    work = std::make_unique<DeviceArray<char>>(image);
    const PlanLayout& layout = planner->layout();
    params.requests = layout.requests.in(work->data);
    params.items = layout.items.in(work->data);
    params.cta_begin = layout.cta_begin.in(work->data);
    params.num_items = planner->sizes().num_items;
    params.num_segments = int(sides.size());
    for (std::size_t s = 0; s < sides.size(); ++s) {
      ForwardSegment& segment = params.segments[s];
      static_cast<AttentionOptions&>(segment) = problem.segments[int(s)];
      sides[s]->fill(segment);
      const int rows = planner->sizes().segments[s].num_partial_rows;
      sides[s]->partial_o = std::make_unique<DeviceArray<float>>(std::size_t(rows) * kDim);
      sides[s]->partial_lse = std::make_unique<DeviceArray<PartialLse>>(rows);
      segment.partial_o = sides[s]->partial_o->data;
      segment.partial_lse = sides[s]->partial_lse->data;
    }
    num_ctas = planner->sizes().num_ctas;
  }

  void launch(cudaStream_t stream) {
    LaunchError error = kernel.launch(params, num_ctas, {.device = 0, .stream = stream});
    if (error != nullptr) {
      std::printf("%s: %s\n", kernel.id, error);
      std::exit(1);
    }
    for (std::size_t s = 0; s < sides.size(); ++s) {
      const int merges = planner->sizes().segments[s].num_merges;
      if (merges == 0) continue;
      const ForwardSegment& segment = params.segments[s];
      CombineParams combine;
      combine.o = segment.o;
      combine.lse = segment.lse;
      combine.o_dtype = DType::kBFloat16;
      combine.requests = params.requests;
      combine.merges = planner->layout().segments[s].merges.in(work->data);
      combine.num_merges = merges;
      combine.partial_o = segment.partial_o;
      combine.partial_lse = segment.partial_lse;
      combine.tile_rows =
          rows_per_tile(kernel.traits.tile_rows, kernel.tile_of(int(s)).m, segment.group_size);
      combine.group_size = segment.group_size;
      combine.head_dim_vo = kDim;
      require(launch_combine(combine, 132, stream), "combine");
    }
  }

  bool is_decode(const WorkItem& item) const {
    return planner->layout().requests.in(const_cast<char*>(image.data()))[item.request].segment;
  }
  // Items in another order, of one CTA each.
  void reorder(const std::function<void(std::vector<WorkItem>&)>& change) {
    WorkItem* items = planner->layout().items.in(image.data());
    std::vector<WorkItem> list(items, items + params.num_items);
    change(list);
    std::copy(list.begin(), list.end(), items);
    require(cudaMemcpy(work->data, image.data(), image.size(), cudaMemcpyHostToDevice), "copy");
  }
};

void check_pair(const std::string& what, const SideShape& prefill, const SideShape& decode,
                int heads_q, int heads_kv) {
  Side p(prefill, heads_q, heads_kv), d(decode, heads_q, heads_kv);
  p.allocate(true);
  d.allocate(true);
  const ForwardKernel kernel = prefill.masked ? preflash_entry_sm80_bf16_d128_custom_two()
                                              : preflash_entry_sm80_bf16_d128_two();
  for (Schedule schedule : {Schedule::kAuto, Schedule::kPersistent}) {
    for (Side* side : {&p, &d}) {
      require(cudaMemset(side->o->data, 0xFF, side->o->count * 2), "");
      require(cudaMemset(side->lse->data, 0xFF, side->lse->count * 4), "");
    }
    Planned planned({&p, &d}, kernel, schedule);
    planned.launch(nullptr);
    require(cudaDeviceSynchronize(), what.c_str());
    const char* how = schedule == Schedule::kAuto ? ", an item each" : ", persistent";
    p.check(what + how + ", prefill");
    d.check(what + how + ", decode");
  }
}

// ---- Time ---------------------------------------------------------------------------------------

struct Contender {
  std::string name;
  std::function<void(cudaStream_t)> launch;
  cudaGraphExec_t graph = nullptr;
  std::vector<float> times = {};
};

void capture(Contender& one, cudaStream_t stream, int repeats) {
  one.launch(stream);
  require(cudaStreamSynchronize(stream), one.name.c_str());
  cudaGraph_t graph;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < repeats; ++i) one.launch(stream);
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&one.graph, graph, 0), "instantiate");
}

void time_mix(const std::string& name, const SideShape& prefill, const SideShape& decode) {
  Side p(prefill, 32, 8), d(decode, 32, 8);
  p.allocate(false);
  d.allocate(false);
  const ForwardKernel two = preflash_entry_sm80_bf16_d128_two();
  Planned p80({&p}, preflash_entry_sm80_bf16_d128());
  Planned d80({&d}, preflash_entry_sm80_bf16_d128_decode());
  std::vector<std::unique_ptr<Planned>> kept;
  auto plan = [&](Schedule schedule = Schedule::kAuto) -> Planned& {
    kept.push_back(std::make_unique<Planned>(std::vector<Side*>{&p, &d}, two, schedule));
    return *kept.back();
  };
  Planned& planned = plan();
  Planned& persistent = plan(Schedule::kPersistent);
  Planned& decode_first = plan();
  decode_first.reorder([&](std::vector<WorkItem>& items) {
    std::stable_partition(items.begin(), items.end(),
                          [&](const WorkItem& item) { return decode_first.is_decode(item); });
  });
  Planned& prefill_first = plan();
  prefill_first.reorder([&](std::vector<WorkItem>& items) {
    std::stable_partition(items.begin(), items.end(),
                          [&](const WorkItem& item) { return !prefill_first.is_decode(item); });
  });
  std::vector<Contender> all;
  all.push_back({"P fa2", [&](cudaStream_t s) { p80.launch(s); }});
  all.push_back({"D fa2", [&](cudaStream_t s) { d80.launch(s); }});
#ifdef POD_CHECK_SM90
  Planned p90({&p}, preflash_entry_sm90_bf16_d128());
  Planned d90({&d}, preflash_entry_sm90_bf16_d128());
  all.push_back({"P fa3", [&](cudaStream_t s) { p90.launch(s); }});
  all.push_back({"D fa3", [&](cudaStream_t s) { d90.launch(s); }});
#endif
  all.push_back({"as planned", [&](cudaStream_t s) { planned.launch(s); }});
  all.push_back({"persistent", [&](cudaStream_t s) { persistent.launch(s); }});
  all.push_back({"decode first", [&](cudaStream_t s) { decode_first.launch(s); }});
  all.push_back({"prefill first", [&](cudaStream_t s) { prefill_first.launch(s); }});

  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "stream");
  constexpr int kRepeats = 4;
  for (Contender& one : all) capture(one, stream, kRepeats);
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  for (int round = 0; round < 9; ++round) {
    for (Contender& one : all) {
      require(cudaGraphLaunch(all[0].graph, stream), "graph");  // the clock of a busy GPU
      require(cudaEventRecord(begin, stream), "event");
      require(cudaGraphLaunch(one.graph, stream), "graph");
      require(cudaEventRecord(end, stream), "event");
      require(cudaEventSynchronize(end), one.name.c_str());
      float ms = 0.0f;
      require(cudaEventElapsedTime(&ms, begin, end), "time");
      one.times.push_back(ms / kRepeats);
    }
  }
  std::printf("%s:", name.c_str());
  for (Contender& one : all) {
    std::nth_element(one.times.begin(), one.times.begin() + 4, one.times.end());
    std::printf("  %s %.3f", one.name.c_str(), one.times[4]);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void time_mixes(const std::vector<int>& page_sizes) {
  struct Mix {
    int prefills, prefill, decodes, decode;
  };
  for (int page_size : page_sizes) {
    for (const Mix& m : {Mix{2, 2048, 128, 2048}, Mix{1, 2048, 128, 2048}, Mix{1, 4096, 128, 4096},
                         Mix{1, 4096, 128, 8192}, Mix{1, 512, 64, 8192}, Mix{1, 8192, 32, 1024}}) {
      SideShape p{std::vector<int>(m.prefills, m.prefill), std::vector<int>(m.prefills, m.prefill),
                  true, false, page_size};
      SideShape d{std::vector<int>(m.decodes, 1), std::vector<int>(m.decodes, m.decode), false,
                  false, page_size};
      time_mix("P " + std::to_string(m.prefills) + "x" + std::to_string(m.prefill) + " + D " +
                   std::to_string(m.decodes) + "x" + std::to_string(m.decode) + ", page " +
                   std::to_string(page_size),
               p, d);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool only_check = argc > 1 && std::string(argv[1]) == "check";
  const bool tiny = argc > 1 && std::string(argv[1]) == "tiny";
  const SideShape decode{{1, 1, 1, 1, 1}, {90, 0, 17, 1, 1333}};
  if (tiny) {
    check_pair("tiny", {{37}, {70}, true}, {{1, 1}, {33, 130}}, 4, 1);
    return num_failures != 0;
  }
  if (argc > 1 && std::string(argv[1]) == "time") return time_mixes({16}), 0;
  check_pair("causal", {{150, 0, 3}, {333, 20, 3}, true}, decode, 8, 2);
  check_pair("more rows than keys", {{150, 9}, {33, 0}, true}, decode, 8, 2);
  check_pair("window, page 1", {{150}, {333}, false, false, 1, 40},
             {{1, 1, 1}, {900, 30, 64}, false, false, 1, 100}, 6, 1);
  check_pair("masked", {{150, 20}, {333, 70}, false, true}, decode, 8, 2);
  check_pair("short chunks", {{20}, {4000}, true}, {{1, 1}, {9000, 65}}, 4, 1);
  check_pair("decode of several rows", {{300}, {300}, true}, {{4, 0, 2}, {700, 9, 200}, true}, 8,
             2);
  if (!only_check) time_mixes({16, 1});
  std::printf("%d failures\n", num_failures);
  return num_failures != 0;
}
