// Checks libpreflash_kernels_common against double-precision host references on one or more GPUs.
// Every output is poisoned first and every allocation exact, so that compute-sanitizer sees a stray
// access. Exits with 0, with 1 on a mismatch, with 77 where there is no GPU.
//
// Longer than other files, because it is one program: a check of each service of the library.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -Icpp/include -Icpp -o services_check
//        tests/cpp/services_check.cu cpp/cuda/*.cpp cpp/kernels/{combine,common,prepass}/*.cu
#include <cuda.h>

#include <array>
#include <thread>

#include "check_support.h"
#include "combine_run.h"

namespace {

using namespace check;

template <class T>
void check_combine(const CombineCase& c) {
  const CombineInputs in = make_inputs(c);
  const int num_merges = static_cast<int>(in.merges.size());
  const CombineRun<T> got(c, in, num_merges), again(c, in, num_merges), alone(c, in, 1);
  expect(same_bits(got.o, again.o) && same_bits(got.lse, again.lse), "combine: two runs differ");

  std::vector<char> o_written(got.o.size()), lse_written(got.lse.size());
  for (int m = 0; m < num_merges; ++m) {
    const MergeItem& merge = in.merges[m];
    const RequestInfo& request = in.requests[merge.request];
    const int rows = rows_of(c, in, merge);
    for (int row = 0; row < rows; ++row) {
      std::vector<const float*> values;
      std::vector<double> chunk_lse;  // above `shift`, which a double's sum with them may hide
      double shift = 0.0;
      for (int chunk = 0; chunk < merge.num_chunks; ++chunk) {
        std::size_t at = std::size_t(merge.first_row) + chunk * rows + row;
        const PartialLse& lse = in.partial_lse[at];
        values.push_back(&in.partial_o[at * c.head_dim]);
        chunk_lse.push_back(lse.low);
        if (!std::isinf(lse.low)) shift = lse.high;
      }
      Merged expected = merge_reference(values, chunk_lse, c.head_dim);
      expected.lse += shift;
      const int packed = merge.row_begin + row;
      const int64_t token = request.qo_begin + packed / c.group_size;
      const int64_t head = merge.kv_head * c.group_size + packed % c.group_size;
      for (int d = 0; d < c.head_dim; ++d) {
        const int64_t at = got.o_at(token, head) + d;
        const T o = got.o[at];
        o_written[at] = 1;
        expect(std::isinf(expected.lse) ? float(o) == 0.0f : close(o, expected.value[d]),
               "combine: o " + std::to_string(float(o)));
        expect(m > 0 || std::memcmp(&o, &alone.o[at], sizeof(T)) == 0, "combine: batch matters");
      }
      if (!c.with_lse) continue;
      const int64_t at = got.lse_at(token, head);
      lse_written[at] = 1;
      expect(close_lse(got.lse[at], expected.lse * c.lse_scale),
             "combine: lse " + std::to_string(got.lse[at]));
    }
  }
  for (std::size_t i = 0; i < o_written.size(); ++i) {
    expect(o_written[i] || is_poison(got.o[i]), "combine: wrote o of nobody");
  }
  for (std::size_t i = 0; i < lse_written.size(); ++i) {
    expect(lse_written[i] || is_poison(got.lse[i]), "combine: wrote lse of nobody");
  }
}

enum class MergeForm { kPair, kInPlace, kMany };

template <class T>
void check_merge_states(MergeForm form, int num_states, int num_tokens, int num_heads, int dim) {
  const bool pair = form != MergeForm::kMany;
  const std::size_t rows = std::size_t(num_tokens) * num_heads;
  // Values of T as float, [tokens, states, heads, dim]; empty states hold NaN.
  std::vector<float> s(rows * num_states), v(rows * num_states * dim);
  auto row_of = [&](int token, int state, int head) {
    return (std::size_t(token) * num_states + state) * num_heads + head;
  };
  for (std::size_t i = 0; i < s.size(); ++i) {
    s[i] = uniform(0, 2) == 0 ? -kInf : 3.0f * normal();
    for (int d = 0; d < dim; ++d) v[i * dim + d] = s[i] == -kInf ? kNan : float(T(normal()));
  }
  std::vector<T> v_in[2];
  std::vector<float> s_in[2];
  for (std::size_t i = 0; i < s.size(); ++i) {
    int side = pair ? i / num_heads % num_states : 0;
    s_in[side].push_back(s[i]);
    for (int d = 0; d < dim; ++d) v_in[side].push_back(T(v[i * dim + d]));
  }
  std::vector<uint8_t> keep(num_tokens, 1);
  if (form == MergeForm::kInPlace) {
    for (uint8_t& x : keep) x = uniform(0, 1) * 2;
  }
  DeviceArray<T> v0(v_in[0]), v1(v_in[1]), v_new(rows * dim);
  DeviceArray<float> s0(s_in[0]), s1(s_in[1]), s_new(rows);
  DeviceArray<uint8_t> mask(keep);
  const bool in_place = form == MergeForm::kInPlace;
  MergeStatesParams params;
  params.dtype = kDTypeOf<T>;
  params.v[0] = v0.data();
  params.s[0] = s0.data();
  if (pair) params.v[1] = v1.data(), params.s[1] = s1.data();
  params.v_out = in_place ? v0.data() : v_new.data();
  params.s_out = in_place ? s0.data() : s_new.data();
  params.token_mask = in_place ? mask.data() : nullptr;
  params.num_tokens = num_tokens;
  params.num_states = num_states;
  params.num_heads = num_heads;
  params.head_dim = dim;
  accept(services.merge_states(params, {.device = 0}));
  require(cudaDeviceSynchronize());
  std::vector<T> v_out = in_place ? v0.host() : v_new.host();
  std::vector<float> s_out = in_place ? s0.host() : s_new.host();

  for (std::size_t row = 0; row < rows; ++row) {
    int token = row / num_heads, head = row % num_heads;
    std::vector<const float*> values;
    std::vector<double> weights;
    int num_present = 0, present = 0;
    for (int i = 0; i < num_states; ++i) {
      values.push_back(&v[row_of(token, i, head) * dim]);
      weights.push_back(s[row_of(token, i, head)]);
      if (weights[i] != -kInf) ++num_present, present = i;
    }
    if (!keep[token]) num_present = 1, present = 0;  // the row as it was
    Merged expected = merge_reference(values, weights, dim);
    const bool exact = num_present == 1;
    expect(exact ? s_out[row] == weights[present] : close_lse(s_out[row], expected.lse),
           "merge_states: s " + std::to_string(s_out[row]));
    for (int d = 0; d < dim; ++d) {
      T got = v_out[row * dim + d], same = T(values[present][d]);
      bool ok = exact              ? std::memcmp(&got, &same, sizeof(T)) == 0
                : num_present == 0 ? float(got) == 0.0f
                                   : close(got, expected.value[d]);
      expect(ok, "merge_states: v " + std::to_string(float(got)));
    }
  }
}

void check_pack_bits(const std::vector<int>& lengths, int first_element, bool little) {
  std::vector<int64_t> in_begin{first_element}, out_begin{3};
  for (int length : lengths) {
    in_begin.push_back(in_begin.back() + length);
    out_begin.push_back(out_begin.back() + (length + 7) / 8);
  }
  std::vector<uint8_t> x(in_begin.back()), expected(out_begin.back() + 5, kPoison);
  for (uint8_t& element : x) element = uniform(0, 1) * uniform(1, 255);
  std::fill(expected.begin() + out_begin.front(), expected.begin() + out_begin.back(), uint8_t{0});
  for (std::size_t segment = 0; segment < lengths.size(); ++segment) {
    for (int i = 0; i < lengths[segment]; ++i) {
      if (x[in_begin[segment] + i] == 0) continue;
      expected[out_begin[segment] + i / 8] |= little ? 1 << i % 8 : 128 >> i % 8;
    }
  }
  DeviceArray<uint8_t> device_x(x), packed(expected.size());
  DeviceArray<int64_t> device_in(in_begin), device_out(out_begin);
  PackBitsParams params;
  params.x = device_x.data();
  params.packed = packed.data();
  params.in_begin = device_in.data();
  params.out_begin = device_out.data();
  params.num_segments = static_cast<int32_t>(lengths.size());
  params.little = little;
  accept(services.pack_bits(params, {.device = 0}));
  require(cudaDeviceSynchronize());
  expect(packed.host() == expected, "pack_bits: " + std::to_string(lengths.size()) + " segments");
}

// One mask whose requests have tiles of every kind.
struct MaskCase {
  MaskTilesShape shape;
  std::vector<std::pair<int, int>> lengths;  // of queries and keys
};

void check_mask_tiles(const MaskCase& c) {
  const MaskTilesShape& shape = c.shape;
  std::vector<RequestInfo> requests;
  std::vector<int64_t> begin{0};
  int64_t bytes = 3;  // the first one begins in the middle of a word
  for (auto [queries, keys] : c.lengths) {
    requests.push_back({.qo_len = queries, .kv_len = keys, .mask_begin = bytes});
    bytes += (int64_t{queries} * keys + 7) / 8;
    begin.push_back(begin.back() + shape.words(requests.back()));
  }
  std::vector<uint8_t> bits(bytes + 8, 0xff);  // what nobody owns would make other words
  std::vector<uint32_t> expected(begin.back() + 1, 0);
  std::memset(&expected.back(), kPoison, sizeof(uint32_t));
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const auto [queries, keys] = c.lengths[r];
    const int64_t row_words = shape.row_words(requests[r]);
    for (int64_t row = 0; row < shape.num_rows(requests[r]); ++row) {
      const int first = row * shape.rows_per_tile / shape.group_size;
      const int last =
          std::min<int64_t>(((row + 1) * shape.rows_per_tile - 1) / shape.group_size, queries - 1);
      for (int tile = 0; tile * shape.tile_keys < keys; ++tile) {
        const int kind = uniform(0, 4);
        bool some = false, all = true;
        const int end = std::min(keys, (tile + 1) * shape.tile_keys);
        for (int token = first; token <= last; ++token) {
          // A token that two rows share has what the first of them has drawn.
          const bool drawn = row > 0 && token * shape.group_size < row * shape.rows_per_tile;
          for (int key = tile * shape.tile_keys; key < end; ++key) {
            const int64_t bit = int64_t{token} * keys + key;
            uint8_t& byte = bits[requests[r].mask_begin + bit / 8];
            bool keep = kind == 0 ? false : kind == 1 ? true : uniform(0, 3) == 0;
            if (kind == 3) keep = token == last && key == end - 1;
            if (kind == 4) keep = token != first || key != end - 1;
            if (drawn) keep = byte >> bit % 8 & 1;
            byte = static_cast<uint8_t>(keep ? byte | 1 << bit % 8 : byte & ~(1 << bit % 8));
            some |= keep;
            all &= keep;
          }
        }
        const uint32_t kept = some ? (all ? 3 : 1) : 0;
        expected[begin[r] + row * row_words + tile / 16] |= kept << tile % 16 * 2;
      }
    }
  }
  DeviceArray<RequestInfo> device_requests(requests);
  DeviceArray<int64_t> device_begin(begin);
  DeviceArray<uint8_t> device_bits(bits);
  DeviceArray<uint32_t> words(expected.size());
  accept(services.mask_tiles({.shape = shape,
                              .requests = device_requests.data(),
                              .mask_tiles_begin = device_begin.data(),
                              .mask_bits = device_bits.data(),
                              .words = words.data(),
                              .num_requests = static_cast<int32_t>(requests.size())},
                             {.device = 0}));
  require(cudaDeviceSynchronize());
  expect(words.host() == expected, "mask_tiles: tiles of " + std::to_string(shape.rows_per_tile) +
                                       " rows and " + std::to_string(shape.tile_keys) + " keys");
  int64_t tokens = 0;
  for (auto [queries, keys] : c.lengths) tokens += queries;
  expect(begin.back() <= shape.most_words(std::ssize(c.lengths), tokens, bytes),
         "mask_tiles: more words than a CUDA graph's plan reserves");
}

// Tokens of two requests into pages of 3 tokens, heads apart by more than their bytes; one token is
// padding, one has no place in the table, and one only in the next request's page.
void check_append(int row_bytes) {
  constexpr int kTokens = 7, kHeads = 2, kPageSize = 3, kPages = 4;
  const int head_stride = row_bytes + 5;
  const std::vector<int> requests{0, 0, -1, 1, 1, 0, 0}, positions{3, 4, 0, 0, 1, 8, 99};
  const std::vector<int> indices{2, 0, 3}, indptr{0, 2, 3};
  std::vector<uint8_t> rows(kTokens * kHeads * head_stride);
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(uniform(0, 255));
  std::vector<uint8_t> expected(kPages * kPageSize * kHeads * head_stride, kPoison);
  for (int token = 0; token < kTokens; ++token) {
    if (requests[token] < 0 || positions[token] > 5) continue;
    const int page = indices[indptr[requests[token]] + positions[token] / kPageSize];
    for (int head = 0; head < kHeads; ++head) {
      const int slot = page * kPageSize + positions[token] % kPageSize;
      std::copy_n(rows.begin() + (token * kHeads + head) * head_stride, row_bytes,
                  expected.begin() + (slot * kHeads + head) * head_stride);
    }
  }
  DeviceArray<uint8_t> device_rows(rows), k(std::vector<uint8_t>(expected.size(), kPoison)),
      v(k.host());
  DeviceArray<int> device_requests(requests), device_positions(positions);
  DeviceArray<int> device_indices(indices), device_indptr(indptr);
  const auto array = [](DeviceArray<int>& values, std::size_t count) {
    return IndexArray{.data = values.data(), .count = static_cast<int64_t>(count)};
  };
  AppendParams params{.batch_indices = array(device_requests, requests.size()),
                      .positions = array(device_positions, positions.size()),
                      .page_indices = array(device_indices, indices.size()),
                      .page_indptr = array(device_indptr, indptr.size()),
                      .num_tokens = kTokens,
                      .num_pages = kPages,
                      .page_size = kPageSize};
  params.k = {.rows = device_rows.data(),
              .pool = k.data(),
              .rows_token = kHeads * head_stride,
              .rows_head = head_stride,
              .pool_page = kPageSize * kHeads * head_stride,
              .pool_slot = kHeads * head_stride,
              .pool_head = head_stride,
              .num_heads = kHeads,
              .row_bytes = row_bytes};
  params.v = params.k;
  params.v.pool = v.data();
  accept(services.append_paged_kv(params, {.device = 0}));
  require(cudaDeviceSynchronize());
  const std::string name = "append_paged_kv: rows of " + std::to_string(row_bytes) + " bytes";
  expect(k.host() == expected && v.host() == expected, name);
}

__global__ void spin(long long cycles) {
  for (long long begin = clock64(); clock64() - begin < cycles;) {
  }
}

LaunchError submit_whole(PlanUploader* uploader, void* to, std::size_t bytes, cudaStream_t stream,
                         const PerSegment<ArrayCopy>& arrays = {}) {
  const StagedCopy whole{.to = to, .bytes = bytes};
  return services.uploader_submit(uploader, {&whole, 1}, arrays, stream);
}

// Eight plans in a row while the stream is busy: each must arrive as it was when it was submitted.
void check_uploader() {
  PlanUploader* uploader = services.uploader_create(0);
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  constexpr std::size_t kSizes[] = {1, 16, 70000, 64, 300001, 300001, 5, 1 << 20};
  DeviceArray<uint8_t> target(8 << 20);
  void* host = nullptr;
  expect(says(submit_whole(uploader, target.data(), 16, stream), "acquire"),
         "uploader: submit without acquire");
  spin<<<1, 1, 0, stream>>>(20'000'000);
  for (int plan = 0; plan < 8; ++plan) {
    accept(services.uploader_acquire(uploader, kSizes[plan], &host));
    std::memset(host, plan + 1, kSizes[plan]);
    const std::size_t half = kSizes[plan] / 2;
    uint8_t* to = target.data() + (plan << 20);
    const std::array<StagedCopy, 2> parts = {
        {{.to = to, .bytes = half},
         {.begin = half, .to = to + half, .bytes = kSizes[plan] - half}}};
    accept(services.uploader_submit(uploader, parts, {}, stream));
  }
  // Another stream waits for the copies on the device, the host for none of them.
  cudaStream_t other;
  require(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  spin<<<1, 1, 0, stream>>>(20'000'000);
  accept(services.uploader_acquire(uploader, 16, &host));
  std::memset(host, 9, 16);
  accept(submit_whole(uploader, target.data(), 16, stream));
  accept(services.uploader_join(uploader, other));
  expect(cudaStreamQuery(other) == cudaErrorNotReady, "uploader: join does not order the stream");
  require(cudaStreamSynchronize(other));
  cudaStreamDestroy(other);
  std::vector<uint8_t> got = target.host();
  for (int plan = 0; plan < 8; ++plan) {
    for (std::size_t i = 0; i < 1 << 20; ++i) {
      int expected = i < kSizes[plan] ? plan + 1 : kPoison;
      if (plan == 0 && i < 16) expected = 9;  // the copy that `other` waited for
      expect(got[(plan << 20) + i] == expected, "uploader: plan " + std::to_string(plan));
    }
  }
  // Under capture: a clear refusal, and the capture survives even though the staging has to grow.
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  accept(services.uploader_acquire(uploader, 4 << 20, &host));
  expect(says(submit_whole(uploader, target.data(), 4 << 20, stream), "captured"),
         "uploader: submit under capture");
  services.uploader_destroy(uploader);
  expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "uploader: broke the capture");
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Arrays that go by themselves: with their plan, busy for as long as any stream copies them, and
// neither created nor freed at a capture's expense.
void check_pinned_arrays() {
  PlanUploader* uploader = services.uploader_create(0);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  constexpr std::size_t kBytes = 300001;
  PinnedArray* arrays[2] = {};
  for (int i = 0; i < 2; ++i) {
    void* host = nullptr;
    accept(services.pinned_create(0, kBytes, &arrays[i], &host));
    expect(services.pinned_is_free(arrays[i]), "pinned: a new array is busy");
    std::memset(host, i + 1, kBytes);
  }
  DeviceArray<uint8_t> plans(2 << 20), lists(4 << 20);
  auto submit = [&](int plan, cudaStream_t stream) {
    void* host = nullptr;
    accept(services.uploader_acquire(uploader, 64, &host));
    std::memset(host, 7 + plan, 64);
    PerSegment<ArrayCopy> copies;
    for (int i = 0; i < 2; ++i) {
      copies.add(
          {.from = arrays[i], .to = lists.data() + ((2 * plan + i) << 20), .bytes = kBytes - plan});
    }
    accept(submit_whole(uploader, plans.data() + (plan << 20), 64, stream, copies));
  };
  spin<<<1, 1, 0, streams[0]>>>(40'000'000);
  submit(0, streams[0]);
  submit(1, streams[1]);  // which has nothing else to do
  for (PinnedArray* array : arrays) {
    expect(!services.pinned_is_free(array), "pinned: free while the first stream has not copied");
  }
  for (cudaStream_t stream : streams) require(cudaStreamSynchronize(stream));
  for (PinnedArray* array : arrays) {
    expect(services.pinned_is_free(array), "pinned: busy for ever");
  }
  const std::vector<uint8_t> got_plans = plans.host(), got_lists = lists.host();
  for (int plan = 0; plan < 2; ++plan) {
    expect(got_plans[plan << 20] == 7 + plan && got_plans[(plan << 20) + 63] == 7 + plan,
           "pinned: the plan beside");
    for (int i = 0; i < 2; ++i) {
      const uint8_t* list = &got_lists[(2 * plan + i) << 20];
      for (std::size_t at = 0; at < 1 << 20; ++at) {
        expect(list[at] == (at < kBytes - plan ? i + 1 : kPoison), "pinned: array");
      }
    }
  }
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal));
  PinnedArray* another = nullptr;
  void* host = nullptr;
  accept(services.pinned_create(0, kBytes, &another, &host));
  expect(services.pinned_is_free(arrays[0]), "pinned: busy under capture");
  for (PinnedArray* array : {another, arrays[0], arrays[1]}) services.pinned_destroy(array);
  expect(cudaStreamEndCapture(streams[0], &graph) == cudaSuccess, "pinned: broke the capture");
  if (graph != nullptr) cudaGraphDestroy(graph);
  services.uploader_destroy(uploader);
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

int launched_ctas = 0, launched_device = -1;
LaunchError record_launch(const ForwardParams&, int num_ctas, const LaunchTarget&) {
  launched_ctas = num_ctas;
  require(cudaGetDevice(&launched_device));
  return nullptr;
}

using GetCurrentContext = CUresult (*)(CUcontext*);

GetCurrentContext find_get_current_context() {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  require(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &address, 12000, cudaEnableDefault,
                                           &found));
  return reinterpret_cast<GetCurrentContext>(address);
}

void check_devices(int count) {
  // Looked up here: no runtime function may touch the new thread besides the one under test.
  const GetCurrentContext get_current_context = find_get_current_context();
  ForwardKernel kernel;
  kernel.id = "recorder";
  kernel.launch = &record_launch;
  for (int device = 0; device < count; ++device) {
    DeviceFacts facts;
    accept(services.query(device, &facts));
    int num_sms = 0, major = 0, current = -1;
    require(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    expect(facts.num_sms == num_sms && facts.compute_capability / 10 == major, "query");
    expect(facts.device == device && facts.smem_per_block > 48 << 10 && facts.name[0], "query");
    require(cudaSetDevice(0));
    accept(services.launch_forward(kernel, {}, 7 + device, {.device = device}));
    expect(launched_ctas == 7 + device && launched_device == device, "launch_forward: device");
    require(cudaGetDevice(&current));
    expect(current == 0, "launch_forward: the caller's device changed");
    std::thread([&] {
      accept(services.launch_forward(kernel, {}, 1, {.device = device}));
      expect(launched_device == device, "launch_forward: device in a new thread");
      CUcontext context = nullptr;
      expect(get_current_context(&context) == CUDA_SUCCESS && context == nullptr,
             "launch_forward: left a device open in a new thread");
    }).join();
  }
  DeviceFacts facts;
  expect(says(services.query(count, &facts), "does not exist"), "query: missing device");
  accept(services.launch_forward(kernel, {}, 0, {.device = 0}));
  kernel.launch = nullptr;
  expect(says(services.launch_forward(kernel, {}, 1, {.device = 0}), "recorder"), "no launch");
  CombineParams bad;
  bad.o_dtype = DType::kFloat8E5M2;
  expect(says(services.combine(bad, {.device = 0}), "e5m2"), "combine: dtype");
  bad.o_dtype = DType::kFloat16;
  bad.head_dim_vo = 64;
  bad.tile_rows = 64;
  accept(services.combine(bad, {.device = 0}));  // no merges
  bad.tile_rows = 0;
  expect(says(services.combine(bad, {.device = 0}), "tile_rows 0"), "combine: no rows");
}

template <class T>
void check_dtype() {
  check_combine<T>({64, 4, 2, 128, 40, {1, 0, 3, 17}});  // decode: few rows of a tile
  check_combine<T>({16, 1, 1, 64, 2, {1}, false});       // the smallest, without lse
  check_combine<T>({16, 3, 2, 8, 70, {5, 11}});          // one warp's columns mostly empty
  check_combine<T>({128, 8, 1, 72, 17, {100}, true, float(M_LN2)});  // several tiles, odd head_dim
  check_combine<T>({64, 5, 3, 256, 9, {13, 2}});                     // four warps per row
  check_combine<T>({64, 4, 8, 192, 3, std::vector<int>(100, 2)});    // more tiles than CTA slots
  check_combine<T>(
      {128, 7, 2, 128, 6, {1, 40, 18}, true, 1.0f, TileRows::kTokenAligned});  // 126 rows a tile
  check_combine<T>({192, 5, 1, 64, 4, {77, 0, 38}, true, 1.0f, TileRows::kTokenAligned});
  check_combine<T>(
      {128, 131, 1, 64, 3, {2, 1}, true, 1.0f, TileRows::kTokenAligned});  // a group over a tile
  for (int dim : {5, 64, 96, 128, 264}) {
    check_merge_states<T>(MergeForm::kPair, 2, 37, 3, dim);
    check_merge_states<T>(MergeForm::kInPlace, 2, 129, 7, dim);
    for (int states : {1, 2, 11}) check_merge_states<T>(MergeForm::kMany, states, 19, 5, dim);
  }
  std::printf("combine, merge_states %s: done\n", std::string(name_of(kDTypeOf<T>)).c_str());
}

}  // namespace

int main() {
  const int count = services.device_count();
  std::printf("preflash services, CUDA %s, %d devices\n", services.cuda_version, count);
  if (count == 0) {
    DeviceFacts facts;
    PackBitsParams bits;
    bits.num_segments = 1;
    bool refused = services.query(0, &facts) && services.pack_bits(bits, {.device = 0});
    services.uploader_destroy(services.uploader_create(0));
    return refused ? 77 : 1;
  }
  check_devices(count);
  check_uploader();
  check_pinned_arrays();
  std::printf("devices, uploader: done\n");
  for (bool little : {true, false}) {
    for (int length : {0, 1, 7, 8, 9, 64, 4099, 20'000'003}) check_pack_bits({length}, 0, little);
    check_pack_bits({5, 0, 0, 16, 1, 333, 8, 0, 40000, 24, 0}, 3, little);
    check_pack_bits(std::vector<int>(3000, 11), 0, little);
  }
  std::printf("pack_bits: done\n");
  for (int group : {1, 3, 4, 8, 300}) {
    const int rows = group > 128 ? 128 : 128 / group * group;
    for (int keys : {16, 48, 64, 96, 128}) {
      check_mask_tiles({{rows, keys, group}, {{300, 700}, {0, 5}, {1, 1}, {9, 0}, {33, 4096}}});
      check_mask_tiles({{rows, keys, group}, {{5, 70001}, {130, 2049}, {2, 31}}});
    }
  }
  MaskTilesParams unaligned{.shape = {.rows_per_tile = 64, .tile_keys = 24}, .num_requests = 1};
  expect(says(services.mask_tiles(unaligned, {.device = 0}), "tile_keys 24"),
         "mask_tiles: 24 keys");
  std::printf("mask_tiles: done\n");
  for (int row_bytes : {1, 11, 27, 128, 1000}) check_append(row_bytes);
  std::printf("append_paged_kv: done\n");
  check_dtype<__half>();
  check_dtype<__nv_bfloat16>();
  check_dtype<float>();
  std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
