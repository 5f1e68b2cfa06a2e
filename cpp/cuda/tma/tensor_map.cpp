#include "cuda/tma/tensor_map.h"

#include <numeric>

#include "cuda/driver_function.h"

namespace preflash {
namespace {

constexpr int kBoxRowBytes = 128;  // of the swizzle

using Encode = decltype(&cuTensorMapEncodeTiled);

constexpr char kNoEncoder[] = "the CUDA driver has no cuTensorMapEncodeTiled: it is too old";

Encode encoder() {
  static const Encode found = [] {
    Encode encode = nullptr;
    find_driver_function("cuTensorMapEncodeTiled", &encode);
    return encode;
  }();
  return found;
}

template <int kRank>
struct TensorShape {
  cuuint64_t dims[kRank];
  cuuint64_t stride_bytes[kRank - 1];
  cuuint32_t box[kRank];
};

// A dimension of size 1 may have any stride; TMA requires a multiple of 16 bytes.
cuuint64_t stride_bytes(DType dtype, std::int64_t elements, std::int64_t size) {
  return size > 1 ? static_cast<cuuint64_t>(elements * size_of(dtype)) : 16;
}

cuuint32_t box_columns(DType dtype) { return kBoxRowBytes / size_of(dtype); }

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

template <int kRank>
const char* encode(Encode function, DType dtype, const void* base, const TensorShape<kRank>& shape,
                   CUtensorMap& map) {
  cuuint32_t ones[kRank];
  for (cuuint32_t& one : ones) one = 1;
  CUresult result = function(&map, data_type(dtype), kRank, const_cast<void*>(base), shape.dims,
                             shape.stride_bytes, shape.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr
                                : "TMA refuses the strides of q, k or v: all but the last must be "
                                  "multiples of 16 bytes below 2^40, and the data 16-byte aligned";
}

const char* encode_kv(Encode function, const ForwardSegment& params, const KvTensor& tensor,
                      int head_dim, int box_rows, CUtensorMap& map) {
  const DType dtype = params.kv_dtype;
  const cuuint64_t stride_token = stride_bytes(dtype, tensor.stride_token, tensor.num_tokens);
  const TensorShape<5> shape{
      .dims = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(box_rows),
               static_cast<cuuint64_t>(tensor.num_tokens),
               static_cast<cuuint64_t>(params.num_kv_heads),
               static_cast<cuuint64_t>(tensor.num_pages)},
      .stride_bytes = {stride_token, stride_token,
                       stride_bytes(dtype, tensor.stride_head, params.num_kv_heads),
                       stride_bytes(dtype, tensor.stride_page, tensor.num_pages)},
      .box = {box_columns(dtype), static_cast<cuuint32_t>(box_rows), 1, 1, 1}};
  return encode(function, dtype, tensor.data, shape, map);
}

const char* encode_q(Encode function, const ForwardSegment& params, const BoxShape& box,
                     CUtensorMap& map) {
  const DType dtype = params.q_dtype;
  const std::int64_t group = params.group_size;
  const TensorShape<4> shape{
      .dims = {static_cast<cuuint64_t>(params.head_dim_qk), static_cast<cuuint64_t>(group),
               static_cast<cuuint64_t>(params.q.num_tokens),
               static_cast<cuuint64_t>(params.num_kv_heads)},
      .stride_bytes = {stride_bytes(dtype, params.q.stride_head, group),
                       stride_bytes(dtype, params.q.stride_token, params.q.num_tokens),
                       stride_bytes(dtype, params.q.stride_head * group, params.num_kv_heads)},
      .box = {box_columns(dtype), static_cast<cuuint32_t>(box.q_heads),
              static_cast<cuuint32_t>(box.q_tokens), 1}};
  return encode(function, dtype, params.q.data, shape, map);
}

}  // namespace

BoxShape box_shape(const ForwardSegment& params, int tile_m, int tile_n) {
  constexpr int kSwizzleRows = 8;      // a box must begin where the swizzle pattern begins
  constexpr int kMostSingleRows = 16;  // of a box that is loaded row by row
  BoxShape box;
  if (params.group_size <= tile_m) {
    box.q_heads = params.group_size;
    box.q_tokens = tile_m / params.group_size;
  }
  if (params.page_indices == nullptr) {
    box.kv_rows = tile_n;
  } else if (params.page_size % kSwizzleRows == 0) {
    box.kv_rows = std::gcd(params.page_size, tile_n);
  }
  if (!params.split.is_invariant()) {
    box.tail_rows = box.kv_rows;
  } else if (box.kv_rows > 0) {
    box.kv_rows = std::gcd(box.kv_rows, kMostSingleRows);
  }
  return box;
}

const char* encode_q_map(const ForwardSegment& params, const BoxShape& box, TensorMaps& maps) {
  if (encoder() == nullptr) return kNoEncoder;
  if (params.q.num_tokens == 0) return nullptr;
  return encode_q(encoder(), params, box, maps.q);
}

const char* encode_kv_maps(const ForwardSegment& params, const BoxShape& box, TensorMaps& maps) {
  const Encode function = encoder();
  if (function == nullptr) return kNoEncoder;
  // Without keys there is nothing to load, and TMA refuses an empty tensor.
  if (box.kv_rows == 0 || params.k.num_tokens == 0 || params.k.num_pages == 0) return nullptr;
  auto encode = [&](int box_rows, CUtensorMap& k, CUtensorMap& v) {
    const char* error = encode_kv(function, params, params.k, params.head_dim_qk, box_rows, k);
    return error ? error : encode_kv(function, params, params.v, params.head_dim_vo, box_rows, v);
  };
  const char* error = encode(box.kv_rows, maps.k.boxes, maps.v.boxes);
  return error != nullptr || box.tail_rows > 0 ? error : encode(1, maps.k.row, maps.v.row);
}

}  // namespace preflash
