// Checks what no public call shows of the services of libpreflash_kernels_common: devices, pinned
// memory under capture, each bit of mask tiles. Tests of the Python API cover the rest.
// Outputs are poisoned and allocations exact, so that compute-sanitizer sees a stray access.
// Exits with 0, with 1 on a mismatch, with 77 where there is no GPU.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -Icpp/include -Icpp -o services_check
//        tests/cpp/services_check.cu cpp/cuda/*.cpp cpp/kernels/{combine,common,prepass}/*.cu
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "preflash/device_services.h"

extern "C" const preflash::DeviceServices* preflash_device_services();

namespace {

using namespace preflash;
using std::int32_t, std::int64_t, std::uint32_t, std::uint8_t;

constexpr unsigned char kPoison = 0xAB;

const DeviceServices& services = *preflash_device_services();
std::mt19937 rng(20240607);
int num_failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok && ++num_failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}
void accept(LaunchError error) {
  if (error == nullptr) return;
  std::printf("refused: %s\n", error);
  std::exit(1);
}
bool says(LaunchError error, const char* text) { return error && std::strstr(error, text); }
int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    require(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)));
    require(cudaMemset(data_, kPoison, count * sizeof(T)));
    require(cudaDeviceSynchronize());  // other streams write next
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    require(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* data() { return data_; }
  std::vector<T> host() const {
    std::vector<T> host(count_);
    require(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

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

LaunchError submit(PlanUploader* uploader, DeviceArray<uint8_t>& to, std::size_t bytes,
                   PinnedArray* array, cudaStream_t stream) {
  const StagedCopy whole{.to = to.data(), .bytes = bytes};
  PerSegment<ArrayCopy> arrays;
  arrays.add({.from = array, .to = to.data() + bytes, .bytes = bytes});
  return services.uploader_submit(uploader, {&whole, 1}, arrays, stream);
}

// A capture refuses uploads, and survives growing, querying and freeing pinned memory.
void check_captures() {
  constexpr std::size_t kFirst = 64, kLarger = 4 << 20;
  PlanUploader* uploader = services.uploader_create(0);
  DeviceArray<uint8_t> target(2 * kLarger);
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  PinnedArray *array = nullptr, *another = nullptr;
  void* host = nullptr;
  accept(services.pinned_create(0, kLarger, &array, &host));
  expect(says(submit(uploader, target, kFirst, array, stream), "acquire"), "submit, no acquire");
  accept(services.uploader_acquire(uploader, kFirst, &host));
  accept(submit(uploader, target, kFirst, array, stream));
  require(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  expect(services.pinned_is_free(array), "pinned: busy under capture");
  accept(services.pinned_create(0, kLarger, &another, &host));
  accept(services.uploader_acquire(uploader, kLarger, &host));
  expect(says(submit(uploader, target, kLarger, array, stream), "captured"), "captured submit");
  for (PinnedArray* one : {array, another}) services.pinned_destroy(one);
  services.uploader_destroy(uploader);
  expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "uploader: broke the capture");
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
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
  bad.grid.rows_per_tile = 64;
  accept(services.combine(bad, {.device = 0}));  // no merges
  bad.grid.rows_per_tile = 0;
  expect(says(services.combine(bad, {.device = 0}), "rows_per_tile 0"), "combine: no rows");
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
  check_captures();
  std::printf("devices, captures: done\n");
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
  std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
