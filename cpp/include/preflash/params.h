// Parameters of kernel launches, on the GPU and on the CPU alike. Strides are in elements; the last
// dimension is always contiguous. Every offset is formed in 64 bits.
#pragma once

#include <cstdint>

#include "preflash/item_record.h"
#include "preflash/options.h"
#include "preflash/plan.h"
#include "preflash/variant.h"

namespace preflash {

// [token, head, head_dim]
struct RowTensor {
  void* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
  std::int64_t num_tokens = 0;  // of the whole tensor
};

// Paged: [page, token in page, head, head_dim] in whatever order the strides say. Ragged: one page
// that holds every token. The stride of a dimension of one element means nothing; it is 0.
struct KvTensor {
  const void* data = nullptr;
  std::int64_t stride_page = 0;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
  std::int64_t num_pages = 1;
  std::int64_t num_tokens = 0;  // of one page: ragged, of the whole tensor
};

// Form in which a kernel returns a row's softmax statistics.
enum class LseForm : std::uint8_t {
  kLogSum,  // one number: the log-sum-exp of all logits
  // Two adjacent numbers of those of keys: the largest logit, and the sum of exp(logit - largest);
  // -inf and 0 for a row that keeps no key. A bias counts its distances from key 0 there. The keys
  // must not be split.
  kMaxAndSum,
};

// [token, head]; base-2 logarithms, or logits in base 2, times `scale` (ln 2 gives natural ones).
// data may be null.
struct LseTensor {
  float* data = nullptr;
  std::int64_t stride_token = 0;
  std::int64_t stride_head = 0;
  float scale = 1.0f;
  LseForm form = LseForm::kLogSum;

  PREFLASH_HD constexpr int values() const { return form == LseForm::kMaxAndSum ? 2 : 1; }
};

// Optional inputs of a run besides q, k and v. All addresses are of the launch's device; null:
// absent.
struct RunExtras {
  // Packed custom mask, little bit order. 4-byte aligned, since kernels read words, and at least 8
  // readable bytes follow the last request's bits.
  const std::uint8_t* mask_bits = nullptr;
  // Mask tiles (mask_tiles.h), for kernels that read them. A run with a mask of its own brings
  // memory for them, which the launch fills; null: the tiles of the plan.
  std::uint32_t* mask_tiles = nullptr;
  // [num_qo_heads], natural logarithms: one more logit of every row of a head, not scaled, whose
  // key has no value. It counts once, however the keys are split, and in the LSE.
  const float* sinks = nullptr;
  // fp8 operands: each element is multiplied by the scale of its head.
  const float* scale_q = nullptr;  // [num_qo_heads]
  const float* scale_k = nullptr;  // [num_kv_heads]
  const float* scale_v = nullptr;  // [num_kv_heads]
  // [requests of the batch]: keys of each request at the time of the run, where the plan has upper
  // bounds (Batch::use_kv_upper_bounds()). Kernels index it by the launch's requests. Null: as
  // planned.
  const std::int32_t* kv_lens = nullptr;
};

enum class Heads : std::uint8_t { kQuery, kKeyValue };

// An alias, because nvcc adds parentheses to a member of such a type, of which g++ warns.
using HeadTensorField = const float* RunExtras::*;

// The tensors of a run that hold one float32 for each head, as the binding takes them and a launch
// keeps its outputs apart from them. cpp/variants/options.toml has their rules for Python.
struct HeadTensor {
  const char* name;
  HeadTensorField address;
  Heads heads;
};
inline constexpr HeadTensor kHeadTensors[] = {
    {"sinks", &RunExtras::sinks, Heads::kQuery},
    {"scale_q", &RunExtras::scale_q, Heads::kQuery},
    {"scale_k", &RunExtras::scale_k, Heads::kKeyValue},
    {"scale_v", &RunExtras::scale_v, Heads::kKeyValue},
};

// Everything that the requests of one segment have in common. A prefill and a decode batch that run
// side by side in one launch are two segments.
struct ForwardSegment : AttentionOptions {
  RowTensor q;  // [qo tokens, num_qo_heads, head_dim_qk]
  KvTensor k;
  KvTensor v;
  RowTensor o;    // [qo tokens, num_qo_heads, head_dim_vo]
  LseTensor lse;  // [qo tokens, num_qo_heads]

  const std::int32_t* page_indices = nullptr;  // null: ragged
  std::int32_t page_size = 1;

  RunExtras extras;
  const std::int64_t* mask_tiles_begin = nullptr;  // [requests]: each one's first word
  // Outputs of the items that have a partial_row.
  float* partial_o = nullptr;         // [partial rows, head_dim_vo]
  PartialLse* partial_lse = nullptr;  // [partial rows]

  ChunkOrigin chunk_origin;
  std::int32_t group_size = 1;  // gqa_ratio()
  float sm_scale = 1.0f;        // q_scale and k_scale folded in
  float out_scale = 1.0f;       // v_scale
};

// One launch: one work list over the requests of its segments.
struct ForwardParams {
  // The plan, resolved to addresses.
  const RequestInfo* requests = nullptr;  // of all segments; a request names its own
  const WorkItem* items = nullptr;
  const std::int32_t* cta_begin = nullptr;  // null: CTA or cluster i runs item i
  std::int32_t num_items = 0;

  std::int32_t num_segments = 1;
  ForwardSegment segments[kMaxSegments];
  // Kernels that the segments were planned for; only the host reads them.
  const ForwardKernel* kernels[kMaxSegments] = {};
  // Not null: item i's record goes to [i * ctas_per_item + part of its columns].
  ItemRecord* records = nullptr;
};

// Writes the lengths that are on the device into a plan's requests: the plan was made for longer
// ones. Lengths past `max_` or the tensors are cut off.
struct RequestLengths {
  RequestInfo* requests = nullptr;          // [num_requests]
  const std::int32_t* qo_indptr = nullptr;  // [num_requests + 1]
  const std::int32_t* kv_indptr = nullptr;  // [num_requests + 1]; null: paged
  const std::int32_t* kv_lens = nullptr;    // [num_requests]
  std::int32_t table_stride = 0;            // paged: entries of a request in the page table
  std::int32_t num_requests = 0;
  std::int32_t max_qo_len = 0;
  std::int32_t max_kv_len = 0;
  std::int64_t qo_tokens = 0;  // of q
  std::int64_t kv_tokens = 0;  // of k and v; paged: of the pages of one row of the table
};

// Rows of one operand that are copied, dequantised or rotated, before the kernel reads them.
struct PrepassOperand {
  KvTensor from;  // q: one page
  DType from_dtype = DType::kFloat16;
  RowTensor to;  // data null: the operand stays where it is. May be `from` itself, row by row.
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
  Position position = Position::kNone;  // kRope: rotated
};

// The pre-pass of a plan with copies (core/prepass.h). The copies of k and v are ragged
// and begin with the first request's first key, as the requests say.
struct PrepassParams {
  PrepassOperand q;
  PrepassOperand k;
  PrepassOperand v;
  DType to_dtype = DType::kFloat16;
  RopeOptions rope;

  const RequestInfo* requests = nullptr;  // [num_requests]; kv_begin counts rows of the copies
  std::int32_t num_requests = 0;
  std::int32_t qo_begin = 0;  // of the first request
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
  std::int64_t kv_begin = 0;  // ragged: the row of the first request's first key

  const std::int32_t* page_indices = nullptr;  // null: ragged
  const std::int32_t* page_begin = nullptr;    // [num_requests], entries of page_indices
  std::int32_t page_size = 1;
};

struct CombineParams {
  RowTensor o;
  LseTensor lse;
  DType o_dtype = DType::kFloat16;
  const RequestInfo* requests = nullptr;
  const MergeItem* merges = nullptr;
  std::int32_t num_merges = 0;
  const float* partial_o = nullptr;         // [num_partial_rows, head_dim_vo]
  const PartialLse* partial_lse = nullptr;  // [num_partial_rows]
  RunExtras extras = {};                    // of the segment
  QueryGrid grid = {};
  std::int32_t head_dim_vo = 0;
};

// merge_states: v [tokens, num_states, heads, head_dim], s [tokens, num_states, heads],
// all contiguous. Weights are 2^s. merge_state is the case of two separate inputs.
struct MergeStatesParams {
  DType dtype = DType::kFloat16;
  const void* v[2] = {nullptr, nullptr};  // v[1] == null: num_states states inside v[0]
  const float* s[2] = {nullptr, nullptr};
  void* v_out = nullptr;                     // [tokens, heads, head_dim]
  float* s_out = nullptr;                    // [tokens, heads]
  const std::uint8_t* token_mask = nullptr;  // [tokens]; zero leaves v_out and s_out as they are
  std::int64_t num_tokens = 0;
  std::int32_t num_states = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
};

// Bits of segment i, x[in_begin[i], in_begin[i + 1]), start at byte out_begin[i].
struct PackBitsParams {
  const std::uint8_t* x = nullptr;  // bool or uint8; non-zero is one
  std::uint8_t* packed = nullptr;
  const std::int64_t* in_begin = nullptr;   // [num_segments + 1]
  const std::int64_t* out_begin = nullptr;  // [num_segments + 1]
  std::int32_t num_segments = 0;
  bool little = true;
};

enum class IndexWidth : std::int32_t { k32 = 4, k64 = 8 };  // bytes

// An array of indices as the caller has it.
struct IndexArray {
  const void* data = nullptr;
  std::int64_t count = 0;
  std::int64_t stride = 1;  // elements
  IndexWidth width = IndexWidth::k32;
};

// The new rows of K or of V, and the pool that they go into. Strides in bytes.
struct AppendedRows {
  const std::uint8_t* rows = nullptr;  // [tokens, num_heads, row_bytes]
  std::uint8_t* pool = nullptr;        // [pages, page_size, num_heads, row_bytes]
  std::int64_t rows_token = 0;
  std::int64_t rows_head = 0;
  std::int64_t pool_page = 0;
  std::int64_t pool_slot = 0;
  std::int64_t pool_head = 0;
  std::int32_t num_heads = 0;
  std::int32_t row_bytes = 0;
};

// append_paged_kv_cache: rows of tokens into the slots that a page table has for them.
struct AppendParams {
  AppendedRows k = {};
  AppendedRows v = {};
  IndexArray batch_indices = {};  // [tokens]; below 0: padding
  IndexArray positions = {};      // [tokens]
  IndexArray page_indices = {};   // [pages in use], or the memory of a block table
  IndexArray page_indptr = {};    // [requests + 1]; of a block table it counts the pages alone
  // Entries of a block table's row, and from one row to the next; 0: page_indices is a list.
  std::int64_t table_width = 0;
  std::int64_t table_stride = 0;
  std::int64_t num_tokens = 0;
  std::int64_t num_pages = 0;  // of the pools
  std::int32_t page_size = 0;
};

}  // namespace preflash
