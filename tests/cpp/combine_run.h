// Split-KV partials as the forward kernels leave them, and one run of combine over them.
#pragma once

#include <algorithm>
#include <vector>

#include "check_support.h"

namespace check {

struct CombineCase {
  int tile_m, group_size, num_kv_heads, head_dim, max_chunks;
  std::vector<int> qo_lens;
  bool with_lse = true;
  float lse_scale = 1.0f;
  TileRows rows = TileRows::kFull;

  int tile_rows() const { return rows_per_tile(rows, tile_m, group_size); }
};

// The work of one case: everything that the kernel reads, on the host.
struct CombineInputs {
  std::vector<RequestInfo> requests;
  std::vector<MergeItem> merges;
  std::vector<float> partial_o;
  std::vector<PartialLse> partial_lse;
  int num_tokens = 1;  // token 0 belongs to nobody
};

// Number of rows of the tile that `merge` merges.
inline int rows_of(const CombineCase& c, const CombineInputs& in, const MergeItem& merge) {
  int left = in.requests[merge.request].qo_len * c.group_size - merge.row_begin;
  return std::min(left, c.tile_rows());
}

// Partial rows that nobody owns hold NaN.
inline CombineInputs make_inputs(const CombineCase& c) {
  CombineInputs in;
  int num_rows = 1;  // row 0 belongs to nobody
  for (int length : c.qo_lens) {
    int rows = length * c.group_size;
    int request = static_cast<int>(in.requests.size());
    in.requests.push_back({.qo_begin = in.num_tokens, .qo_len = length});
    in.num_tokens += length + 1;  // a token between requests that nobody owns
    for (int row = 0; row < rows; row += c.tile_rows()) {
      for (int head = 0; head < c.num_kv_heads; ++head) {
        int chunks = uniform(2, c.max_chunks);
        in.merges.push_back({request, row, int16_t(head), int16_t(chunks), num_rows});
        num_rows += chunks * std::min(c.tile_rows(), rows - row) + 1;
      }
    }
  }
  std::shuffle(in.merges.begin(), in.merges.end(), rng);
  in.partial_o.assign(std::size_t(num_rows) * c.head_dim, kNan);
  in.partial_lse.assign(num_rows, {kNan, kNan});
  for (const MergeItem& merge : in.merges) {
    int rows = rows_of(c, in, merge);
    for (int row = 0; row < rows; ++row) {
      bool all_empty = uniform(0, 9) == 0;
      const float shifts[] = {0.0f, 0.0f, 0.0f, -2.5e5f, 3e9f, -1e30f};
      float shift = shifts[uniform(0, 5)];
      for (int chunk = 0; chunk < merge.num_chunks; ++chunk) {
        std::size_t at = std::size_t(merge.first_row) + chunk * rows + row;
        bool empty = all_empty || uniform(0, 4) == 0;
        in.partial_lse[at] = empty ? PartialLse{0.0f, -kInf} : PartialLse{shift, 4.0f * normal()};
        for (int d = 0; d < c.head_dim; ++d) {
          in.partial_o[at * c.head_dim + d] = empty ? 0.0f : normal();
        }
      }
    }
  }
  return in;
}

// One case on the device, and its outputs: o strided and with gaps, lse [head, token].
template <class T>
class CombineRun {
 public:
  CombineRun(const CombineCase& c, const CombineInputs& in, int num_merges)
      : num_heads_(c.num_kv_heads * c.group_size),
        num_tokens_(in.num_tokens),
        stride_head_(c.head_dim + 8),
        stride_token_(num_heads_ * stride_head_ + 16) {
    DeviceArray<RequestInfo> requests(in.requests);
    DeviceArray<MergeItem> merges(in.merges);
    DeviceArray<float> partial_o(in.partial_o);
    DeviceArray<PartialLse> partial_lse(in.partial_lse);
    DeviceArray<T> device_o(num_tokens_ * stride_token_);
    DeviceArray<float> device_lse(num_heads_ * num_tokens_);
    CombineParams params;
    params.o = {device_o.data(), stride_token_, stride_head_};
    params.lse = {c.with_lse ? device_lse.data() : nullptr, 1, num_tokens_, c.lse_scale};
    params.o_dtype = kDTypeOf<T>;
    params.requests = requests.data();
    params.merges = merges.data();
    params.num_merges = num_merges;
    params.partial_o = partial_o.data();
    params.partial_lse = partial_lse.data();
    params.tile_rows = c.tile_rows();
    params.group_size = c.group_size;
    params.head_dim_vo = c.head_dim;
    accept(services.combine(params, {.device = 0}));
    require(cudaDeviceSynchronize());
    o = device_o.host();
    lse = device_lse.host();
  }
  int64_t o_at(int64_t token, int64_t head) const {
    return token * stride_token_ + head * stride_head_;
  }
  int64_t lse_at(int64_t token, int64_t head) const { return head * num_tokens_ + token; }

  std::vector<T> o;
  std::vector<float> lse;

 private:
  int64_t num_heads_, num_tokens_, stride_head_, stride_token_;
};

}  // namespace check
