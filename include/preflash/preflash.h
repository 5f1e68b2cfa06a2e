// clang-format off
/* preflash: flash attention for LLM inference, compiled ahead of time. C11.
 *
 *   preflash_segment segment = PREFLASH_SEGMENT_INIT;      heads, dtypes, masking, lengths, pages
 *   preflash_sizes(device, backend, &segment, 1, &sizes);  how much memory a plan takes
 *   preflash_plan_create(device, &plan);                   once
 *   preflash_plan_batch(plan, backend, &segment, 1, ...);  each step: makes and uploads a work list
 *   preflash_run(plan, &tensors, 1, ...);                  each layer: launches
 *   preflash_plan_destroy(plan);
 *
 * Memory and streams are the caller's, as void*: addresses of the plan's device, and a CUstream (or
 * cudaStream_t). preflash allocates no device memory; on the host a plan holds its batch and, for a
 * GPU, pinned memory for the upload. No call waits for the GPU, but for an upload of the same plan
 * that is still on its way. A work list may be written again when the runs that read it are done, or
 * on their stream.
 *
 * The structs that a call takes begin with their size, which an INIT macro sets: later releases
 * append members, of which 0 means what this release does. (preflash_tensor does not grow.)
 *
 * PREFLASH_INVALID_ARGUMENT and PREFLASH_NOT_COMPILED: nothing has changed. After PREFLASH_FAILED in
 * preflash_plan_batch() plan again before the next run.
 *
 * Threads: different plans may be used at the same time. Calls with one plan must come one after the
 * other. preflash_last_error() is the calling thread's.
 */
// clang-format on
#ifndef PREFLASH_PREFLASH_H
#define PREFLASH_PREFLASH_H

#include <stddef.h>
#include <stdint.h>

#if defined(PREFLASH_BUILDS_LIBRARY)
#define PREFLASH_API __attribute__((visibility("default")))
#else
#define PREFLASH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a function changes or goes; new functions and appended members leave it as it is. */
#define PREFLASH_ABI_VERSION 1

typedef enum preflash_status {
  PREFLASH_OK = 0,
  PREFLASH_INVALID_ARGUMENT = 1, /* an argument is wrong */
  PREFLASH_NOT_COMPILED = 2,     /* no kernel that is here serves the options */
  PREFLASH_FAILED = 3            /* the driver failed, or memory is short */
} preflash_status;

/* Enums are passed and stored as int32_t, so that a value that is none of theirs is refused. */
typedef enum preflash_backend {
  PREFLASH_AUTO = 0, /* the fastest that serves the options on the device */
  PREFLASH_CPU = 1,
  PREFLASH_FA2 = 2, /* SM80 and later */
  PREFLASH_FA3 = 3  /* SM90 */
} preflash_backend;

typedef enum preflash_dtype {
  PREFLASH_FLOAT32 = 0, /* on the CPU alone */
  PREFLASH_FLOAT16 = 1,
  PREFLASH_BFLOAT16 = 2,
  PREFLASH_FLOAT8_E4M3 = 3,
  PREFLASH_FLOAT8_E5M2 = 4
} preflash_dtype;

typedef enum preflash_position {
  PREFLASH_POSITION_NONE = 0,
  PREFLASH_ROPE = 1, /* rotates q and k; form of Llama (arXiv 2104.09864) */
  PREFLASH_ALIBI = 2 /* adds a bias (arXiv 2108.12409) */
} preflash_position;

/* One batch of requests with the same options. Lengths are on the host and are copied; arrays on
 * the device are read by every run, at these addresses. */
typedef struct preflash_segment {
  size_t size;

  /* Options. head_dim: multiples of 8. */
  int32_t num_qo_heads;
  int32_t num_kv_heads; /* divides num_qo_heads */
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t q_dtype;     /* a preflash_dtype */
  int32_t kv_dtype;    /* q_dtype, or 8 bits beside wider queries */
  int32_t o_dtype;     /* q_dtype; for e4m3 queries also float16 or bfloat16 */
  int32_t causal;      /* 0 or 1: the last query of a request sees all of its keys */
  int32_t custom_mask; /* 0 or 1: a run brings bits; not with causal or kv_lens */
  int32_t window_left; /* keys that a query sees before its own; -1: all */
  float soft_cap;      /* c: logit = c * tanh(logit / c); 0: off */
  int32_t position;    /* a preflash_position */
  double rope_scale;
  double rope_theta;
  int32_t batch_invariant; /* 0 or 1: the bits of a request depend on the request alone */

  /* Lengths, on the host. Request i has rows [qo_indptr[i], qo_indptr[i + 1]) of q and, of k and v,
   * those of kv_indptr: tokens, or with pages entries of page_indices. */
  int32_t num_requests;
  const int32_t* qo_indptr;     /* [num_requests + 1] */
  const int32_t* kv_indptr;     /* [num_requests + 1] */
  int32_t page_size;            /* tokens; 0: no pages */
  const int32_t* last_page_len; /* [num_requests], tokens on each request's last page */

  /* On the device. */
  const int32_t* page_indices; /* pages of the requests, unchecked on a GPU; or a block table */
  int64_t block_table_stride; /* > 0: page_indices is [num_requests, this], its rows from entry 0 */
  const int32_t* kv_lens;     /* [num_requests]: the numbers of keys at the time of a run, of which
                                 the lengths are upper bounds; NULL: the lengths are exact */
  int32_t graph_max_rows;     /* rows of q of any later batch of the same num_requests that replays
                                 a CUDA graph of the runs; 0: no graph. Not with custom_mask. A
                                 captured run has as many rows of q at least */
  int32_t reserved;           /* 0 */
} preflash_segment;

// clang-format off
#define PREFLASH_SEGMENT_INIT                                                            \
  {sizeof(preflash_segment), 0, 0, 0, 0,                                                 \
   PREFLASH_BFLOAT16, PREFLASH_BFLOAT16, PREFLASH_BFLOAT16, 1, 0, -1, 0.0f,              \
   PREFLASH_POSITION_NONE, 1.0, 10000.0, 0, 0, NULL, NULL, 0, NULL, NULL, 0, NULL, 0, 0}
// clang-format on

/* Bytes that a plan takes at most. */
typedef struct preflash_memory {
  size_t size;
  size_t int_bytes;   /* the work list, of one plan */
  size_t float_bytes; /* partial results, of one run: plans of one stream may share it. With less,
                         keys are split less. */
} preflash_memory;

#define PREFLASH_MEMORY_INIT {sizeof(preflash_memory), 0, 0}

/* [token, head, head_dim], or [page, token, head, head_dim] in any order of the first three.
 * Strides are in elements, multiples of 16 bytes; the last dimension is contiguous. */
typedef struct preflash_tensor {
  void* data; /* aligned to 16 bytes */
  int64_t stride_page;
  int64_t stride_token;
  int64_t stride_head;
  int64_t num_pages;  /* 1 without pages */
  int64_t num_tokens; /* of a page; without pages of the tensor */
} preflash_tensor;

/* One layer of a segment. */
typedef struct preflash_tensors {
  size_t size;
  preflash_tensor q;
  preflash_tensor k;
  preflash_tensor v;
  preflash_tensor out; /* as many rows as q; may be q itself, but not on fa3 above head_dim 256 */
  float* lse;          /* base-2 log-sum-exp; NULL: not wanted */
  int64_t lse_stride_token;
  int64_t lse_stride_head;
  float sm_scale;     /* of the logits, scales of 8-bit q and k included */
  float out_scale;    /* of the output: the scale of an 8-bit v */
  const float* sinks; /* [num_qo_heads] or NULL: one more logit of each head, without a value */
  const uint8_t* mask_bits; /* of custom_mask: one bit for each pair of query and key, little end
                               first, each request from a byte on; 8 readable bytes behind them */
} preflash_tensors;

#define PREFLASH_TENSOR_INIT {NULL, 0, 0, 0, 1, 0}
#define PREFLASH_TENSORS_INIT \
  {sizeof(preflash_tensors),  \
   PREFLASH_TENSOR_INIT,      \
   PREFLASH_TENSOR_INIT,      \
   PREFLASH_TENSOR_INIT,      \
   PREFLASH_TENSOR_INIT,      \
   NULL,                      \
   0,                         \
   0,                         \
   1.0f,                      \
   1.0f,                      \
   NULL,                      \
   NULL}

typedef struct preflash_plan preflash_plan;

PREFLASH_API int preflash_abi_version(void);
PREFLASH_API const char* preflash_version(void);

/* What the last call of this thread that did not return PREFLASH_OK says, one sentence; valid until
 * the next such call. */
PREFLASH_API const char* preflash_last_error(void);

/* Where libpreflash_kernels_*.so are; by default beside this library. Before anything else. */
PREFLASH_API preflash_status preflash_set_kernel_directory(const char* directory);

/* The kernel that a backend has for the options of one segment, or of two in one launch: *variant
 * is its name, valid as long as the process. PREFLASH_NOT_COMPILED: preflash_last_error() says why
 * not. Lengths are not looked at: a plan may take a sibling of the kernel with other tiles. device:
 * ordinal of a GPU, or -1 for the CPU. */
PREFLASH_API preflash_status preflash_find_variant(int device, int32_t backend,
                                                   const preflash_segment* segments,
                                                   int num_segments, const char** variant);

/* Bytes for plans of these segments and lengths. */
PREFLASH_API preflash_status preflash_sizes(int device, int32_t backend,
                                            const preflash_segment* segments, int num_segments,
                                            preflash_memory* memory);

PREFLASH_API preflash_status preflash_plan_create(int device, preflash_plan** plan);
PREFLASH_API void preflash_plan_destroy(preflash_plan* plan);

/* Threads of runs on the CPU; by default as many as cores. */
PREFLASH_API preflash_status preflash_plan_set_num_threads(preflash_plan* plan, int num_threads);

/* Plans a batch, or two of which one launch computes both, such as a prefill beside decode. Writes
 * the work list to int_memory, on the stream: runs on it come behind. int_memory (aligned to 16
 * bytes) stays the plan's until another is given; a CUDA graph of the runs needs the same one in
 * every plan. float_bytes: of the memory that runs will bring. An error leaves the last plan, one
 * of the copy to the device leaves none. */
PREFLASH_API preflash_status preflash_plan_batch(preflash_plan* plan, int32_t backend,
                                                 const preflash_segment* segments, int num_segments,
                                                 void* int_memory, size_t int_bytes,
                                                 size_t float_bytes, void* stream);

/* The name of the planned kernel, valid until the next plan; NULL before preflash_plan_batch(). */
PREFLASH_API const char* preflash_plan_variant(const preflash_plan* plan);

/* Computes one layer: out = softmax(sm_scale * q k^T) v, for each planned segment. float_memory:
 * aligned to 16 bytes, float_bytes as planned at least; not read before it is written. May be
 * captured into a CUDA graph. */
PREFLASH_API preflash_status preflash_run(preflash_plan* plan, const preflash_tensors* tensors,
                                          int num_segments, void* float_memory, size_t float_bytes,
                                          void* stream);

#ifdef __cplusplus
}
#endif

#endif /* PREFLASH_PREFLASH_H */
