/* Every row breaks one argument of a batch that is right: the call must return the row's status and
 * say the row's words; the batch as it was must then give the same result as before. */
#include <math.h>
#include <preflash/preflash.h>
#include <stdio.h>

#include "device.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, PAGE = 4, ROWS = 5, PAGES = 6 };

static const int32_t kQo[] = {0, 2, 5}, kKv[] = {0, 2, 5}, kLast[] = {3, 1};
static const int32_t kFalling[] = {0, 3, 2}, kNegative[] = {-1, 2, 5};
static const int32_t kNone[] = {0, 1}, kLong[] = {3, 9};

/* What a row may change. */
struct call {
  preflash_segment segment;
  preflash_tensors tensors;
  preflash_memory memory;
  preflash_backend backend;
  int device, num_segments, run_segments;
  void *ints, *floats;
  size_t int_bytes, float_bytes;
  const preflash_segment* segments;
  const preflash_tensors* run_tensors;
};

#define BAD PREFLASH_INVALID_ARGUMENT
#define ROWS_OF_SEGMENT(X)                                                                         \
  X(c->segment.size = 0, BAD, "INIT macro")                                                        \
  X(c->segment.size = (size_t)1 << 40, BAD, "INIT macro")                                          \
  X(c->segment.size = sizeof c->segment - 4, BAD, "INIT macro")                                    \
  X(c->segment.num_qo_heads = 0, BAD, "num_qo_heads = 0: must be at least 1")                      \
  X(c->segment.num_kv_heads = 0, BAD, "num_kv_heads = 0: must be in [1, 32767]")                   \
  X(c->segment.num_kv_heads = 3, BAD, "num_qo_heads = 4 is not a multiple of num_kv_heads = 3")    \
  X(c->segment.head_dim_qk = 0, BAD, "head_dim_qk = 0: must be a multiple of 8 from 8 to 512")     \
  X(c->segment.head_dim_qk = 12, BAD, "padded with zeros to 16 columns")                           \
  X(c->segment.head_dim_vo = 4096, BAD, "head_dim_vo = 4096")                                      \
  X(c->segment.q_dtype = (preflash_dtype)77, BAD, "q_dtype = 77")                                  \
  X(c->segment.kv_dtype = (preflash_dtype) - 1, BAD, "kv_dtype")                                   \
  X(c->segment.o_dtype = (preflash_dtype)5, BAD, "o_dtype = 5")                                    \
  X(c->segment.o_dtype = PREFLASH_FLOAT8_E5M2, BAD, "o_dtype = e5m2 with q_dtype = f32")           \
  X(c->segment.o_dtype = PREFLASH_BFLOAT16, BAD, "o_dtype = bf16")                                 \
  X(c->segment.q_dtype = PREFLASH_FLOAT8_E5M2, BAD, "q_dtype = e5m2")                              \
  X(c->segment.kv_dtype = PREFLASH_BFLOAT16, BAD, "kv_dtype = bf16 with")                          \
  X((c->segment.q_dtype = PREFLASH_FLOAT8_E4M3, c->segment.kv_dtype = PREFLASH_FLOAT8_E5M2,        \
     c->segment.o_dtype = PREFLASH_FLOAT16),                                                       \
    BAD, "kv_dtype = e5m2 with q_dtype = e4m3")                                                    \
  X(c->segment.reserved = 1, BAD, "reserved = 1")                                                  \
  X(c->segment.soft_cap = 1e-30f, BAD, "soft_cap")                                                 \
  X(c->segment.soft_cap = 3e38f, BAD, "soft_cap")                                                  \
  X((c->segment.position = PREFLASH_ROPE, c->segment.rope_scale = 1e-12), BAD, "1024 radians")     \
  X((c->segment.position = PREFLASH_ROPE, c->segment.rope_theta = 1e-6), BAD, "1024 radians")      \
  X((c->segment.causal = 0, c->segment.custom_mask = 1, c->segment.kv_lens = kQo), BAD, "kv_lens") \
  X((c->segment.causal = 0, c->segment.custom_mask = 1, c->segment.graph_max_rows = 9), BAD,       \
    "graph_max_rows")                                                                              \
  X(c->segment.causal = 2, BAD, "causal = 2")                                                      \
  X(c->segment.custom_mask = 1, BAD, "one of them")                                                \
  X(c->segment.batch_invariant = -1, BAD, "batch_invariant = -1")                                  \
  X(c->segment.window_left = -2, BAD, "window_left = -2: must be -1")                              \
  X(c->segment.soft_cap = -1.0f, BAD, "soft_cap = -1")                                             \
  X(c->segment.soft_cap = NAN, BAD, "soft_cap")                                                    \
  X(c->segment.position = (preflash_position)9, BAD, "position = 9")                               \
  X((c->segment.position = PREFLASH_ROPE, c->segment.rope_scale = 0), BAD, "rope")                 \
  X((c->segment.position = PREFLASH_ROPE, c->segment.rope_theta = INFINITY), BAD, "rope")          \
  X(c->segment.num_requests = -1, BAD, "num_requests = -1")                                        \
  X(c->segment.qo_indptr = NULL, BAD, "qo_indptr is NULL")                                         \
  X(c->segment.kv_indptr = NULL, BAD, "kv_indptr is NULL")                                         \
  X(c->segment.qo_indptr = kFalling, BAD, "qo_indptr[2] = 2 is less than qo_indptr[1] = 3")        \
  X(c->segment.kv_indptr = kFalling, BAD, "kv_indptr[2] = 2 is less than")                         \
  X(c->segment.qo_indptr = kNegative, BAD, "qo_indptr[0] = -1: must not be negative")              \
  X(c->segment.kv_indptr = kNegative, BAD, "kv_indptr[0] = -1: must not be negative")              \
  X(c->segment.page_size = -1, BAD, "page_size = -1")                                              \
  X(c->segment.page_size = 0, BAD, "page_size = 0")                                                \
  X((c->segment.page_size = 0, c->segment.last_page_len = NULL), BAD, "or page_indices")           \
  X(c->segment.last_page_len = NULL, BAD, "last_page_len is NULL")                                 \
  X(c->segment.last_page_len = kNone, BAD, "last_page_len[0] = 0: request 0")                      \
  X(c->segment.last_page_len = kLong, BAD, "last_page_len[1] = 9: request 1 has 3 pages")          \
  X(c->segment.block_table_stride = -3, BAD, "block_table_stride = -3")                            \
  X(c->segment.block_table_stride = 2, BAD, "request 1 has 3 pages")                               \
  X(c->segment.graph_max_rows = -1, BAD, "graph_max_rows = -1")                                    \
  X(c->segment.graph_max_rows = 2, BAD, "qo_indptr[-1] - qo_indptr[0] = 5")                        \
  X(c->segments = NULL, BAD, "segments is NULL")                                                   \
  X(c->num_segments = 0, BAD, "num_segments = 0")                                                  \
  X(c->num_segments = 3, BAD, "num_segments = 3")                                                  \
  X(c->backend = (preflash_backend)8, BAD, "no preflash_backend")                                  \
  X(c->backend = (preflash_backend)4, BAD, "no preflash_backend")                                  \
  X(c->backend = PREFLASH_FA3, BAD, "does not run on device -1")                                   \
  X(c->backend = PREFLASH_FA2, BAD, "does not run on device -1")
#define ROWS_OF_PLAN(X)                                          \
  X(c->segment.page_indices = NULL, BAD, "page_indices is NULL") \
  X(c->ints = NULL, BAD, "int_memory is NULL")                   \
  X(c->ints = (char*)c->ints + 8, BAD, "16 bytes")               \
  X(c->int_bytes = 16, BAD, "16 bytes; this plan needs")
#define ROWS_OF_RUN(X)                                                                             \
  X(c->run_tensors = NULL, BAD, "tensors is NULL")                                                 \
  X(c->run_segments = 2, BAD, "num_segments = 2; planned were 1")                                  \
  X(c->tensors.size = 1, BAD, "INIT macro")                                                        \
  X(c->tensors.q.data = NULL, BAD, "q is NULL")                                                    \
  X(c->tensors.k.data = NULL, BAD, "k is NULL")                                                    \
  X(c->tensors.v.data = NULL, BAD, "v is NULL")                                                    \
  X(c->tensors.out.data = NULL, BAD, "out is NULL")                                                \
  X(c->tensors.q.data = (char*)c->tensors.q.data + 4, BAD, "16")                                   \
  X(c->tensors.q.num_tokens = 4, BAD, "out has 5 rows, q 4")                                       \
  X((c->tensors.q.num_tokens = 4, c->tensors.out.num_tokens = 4), BAD, "q has 4 rows")             \
  X(c->tensors.q.stride_token = DIM * HEADS + 1, BAD, "q has a stride of 65")                      \
  X(c->tensors.k.stride_head = 4, BAD, "k has a stride of 4")                                      \
  X(c->tensors.v.stride_page = -64, BAD, "v has a stride of -64")                                  \
  X(c->tensors.k.num_pages = 0, BAD, "on 0 pages")                                                 \
  X(c->tensors.k.num_pages = 2, BAD, "x 4 and 6 x 4")                                              \
  X(c->tensors.v.num_tokens = 3, BAD, "x 4 and 6 x 3")                                             \
  X((c->tensors.k.num_pages = 3, c->tensors.v.num_pages = 3), BAD, "page")                         \
  X((c->tensors.k.num_tokens = 3, c->tensors.v.num_tokens = 3), BAD, "pages of 4")                 \
  X(c->tensors.q.num_pages = 2, BAD, "")                                                           \
  X(c->tensors.out.stride_head = 0, BAD, "out has a stride of 0")                                  \
  X(c->tensors.out.stride_token = DIM * 2, BAD, "rows would overlap")                              \
  X(c->tensors.out.stride_token = DIM * HEADS - 4, BAD, "rows would overlap")                      \
  X(c->tensors.out.data = c->tensors.k.data, BAD, "out shares memory with k")                      \
  X(c->tensors.out.data = c->floats, BAD, "float_workspace_buffer")                                \
  X(c->tensors.sm_scale = 3e38f, BAD, "sm_scale")                                                  \
  X(c->tensors.sm_scale = NAN, BAD, "sm_scale")                                                    \
  X(c->tensors.out_scale = INFINITY, BAD, "out_scale")                                             \
  X(c->tensors.mask_bits = (uint8_t*)c->tensors.q.data, BAD, "mask_bits are for")                  \
  X((c->tensors.lse = c->tensors.q.data, c->tensors.lse_stride_token = 4,                          \
     c->tensors.lse_stride_head = 1),                                                              \
    BAD, "lse shares memory with q")                                                               \
  X((c->tensors.lse = c->floats, c->tensors.lse_stride_token = 0, c->tensors.lse_stride_head = 0), \
    BAD, "lse has strides")                                                                        \
  X((c->tensors.lse = c->floats, c->tensors.lse_stride_token = HEADS - 1,                          \
     c->tensors.lse_stride_head = 1),                                                              \
    BAD, "lse has strides")

struct row {
  const char* name;
  preflash_status status;
  const char* says;
};

/* Makes the change of row i and returns 1; 0 behind the last row. */
#define CHANGE(code, row_status, row_says)            \
  if (n++ == i) {                                     \
    code;                                             \
    *row = (struct row){#code, row_status, row_says}; \
    return 1;                                         \
  }
#define DEFINE_CHANGES(name, rows)                          \
  static int name(int i, struct call* c, struct row* row) { \
    int n = 0;                                              \
    rows(CHANGE) return 0;                                  \
  }
DEFINE_CHANGES(change_segment, ROWS_OF_SEGMENT)
DEFINE_CHANGES(change_plan, ROWS_OF_PLAN)
DEFINE_CHANGES(change_run, ROWS_OF_RUN)

static float* values(size_t count) {
  float *made = device_memory(4 * count), x = 0.3f;
  for (size_t i = 0; i < count; ++i) made[i] = x = 3.7f * x * (1 - x);
  return made;
}

static int failures = 0;

static preflash_status plan_and_run(preflash_plan* plan, struct call* c, int runs) {
  preflash_status status =
      preflash_plan_batch(plan, c->backend, c->segments ? &c->segment : NULL, c->num_segments,
                          c->ints, c->int_bytes, c->float_bytes, NULL);
  if (status != PREFLASH_OK || !runs) return status;
  return preflash_run(plan, c->run_tensors ? &c->tensors : NULL, c->run_segments, c->floats,
                      c->float_bytes, NULL);
}

static void expect(const char* where, const struct row* row, preflash_status status) {
  if (status == row->status && strstr(preflash_last_error(), row->says) != NULL) return;
  ++failures;
  printf("%s, %s: status %d instead of %d: %s\n", where, row->name, status, row->status,
         status == PREFLASH_OK ? "" : preflash_last_error());
}

int main(void) {
  struct call right = {.segment = PREFLASH_SEGMENT_INIT,
                       .tensors = PREFLASH_TENSORS_INIT,
                       .memory = PREFLASH_MEMORY_INIT,
                       .device = DEVICE,
                       .num_segments = 1,
                       .run_segments = 1};
  preflash_segment* s = &right.segment;
  s->num_qo_heads = HEADS, s->num_kv_heads = KV_HEADS, s->head_dim_qk = s->head_dim_vo = DIM;
  s->q_dtype = s->kv_dtype = s->o_dtype = PREFLASH_FLOAT32;
  s->num_requests = 2, s->qo_indptr = kQo, s->kv_indptr = kKv, s->last_page_len = kLast;
  s->page_size = PAGE;
  int32_t* indices = device_memory(20);
  for (int i = 0; i < 5; ++i) indices[i] = 5 - i;
  s->page_indices = indices;
  const preflash_tensor rows = {NULL, 0, HEADS * DIM, DIM, 1, ROWS};
  const preflash_tensor cache = {NULL, PAGE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, PAGES, PAGE};
  preflash_tensors* t = &right.tensors;
  t->q = rows, t->out = rows, t->k = cache, t->v = cache;
  t->q.data = values(ROWS * HEADS * DIM), t->out.data = values(ROWS * HEADS * DIM);
  t->k.data = values(PAGES * PAGE * KV_HEADS * DIM),
  t->v.data = values(PAGES * PAGE * KV_HEADS * DIM);
  right.segments = s, right.run_tensors = t;
  if (preflash_sizes(DEVICE, PREFLASH_AUTO, s, 1, &right.memory) != PREFLASH_OK) return 2;
  right.int_bytes = right.memory.int_bytes, right.float_bytes = right.memory.float_bytes + 4096;
  right.ints = device_memory(right.int_bytes), right.floats = device_memory(right.float_bytes);

  preflash_plan* plan;
  if (preflash_plan_create(DEVICE, &plan) != PREFLASH_OK) return 2;
  if (preflash_run(plan, t, 1, right.floats, right.float_bytes, NULL) != BAD) ++failures;
  if (plan_and_run(plan, &right, 1) != PREFLASH_OK) return 2;
  float first[ROWS * HEADS * DIM];
  copy(first, t->out.data, sizeof first);

  struct row row;
  struct call c = right;
  int refused = 0;
  for (int i = 0; c = right, change_segment(i, &c, &row); ++i, ++refused) {
    const preflash_segment* given = c.segments ? &c.segment : NULL;
    if (row.says[0] != '\0') {
      expect("sizes", &row, preflash_sizes(c.device, c.backend, given, c.num_segments, &c.memory));
    }
    expect("plan", &row, plan_and_run(plan, &c, 0));
  }
  for (int i = 0; c = right, change_plan(i, &c, &row); ++i, ++refused) {
    expect("plan", &row, plan_and_run(plan, &c, 0));
  }
  if (plan_and_run(plan, &right, 1) != PREFLASH_OK) ++failures;
  for (int i = 0; c = right, change_run(i, &c, &row); ++i, ++refused) {
    expect("run", &row,
           preflash_run(plan, c.run_tensors ? &c.tensors : NULL, c.run_segments, c.floats,
                        c.float_bytes, NULL));
  }
  if (preflash_run(plan, t, 1, right.floats, right.float_bytes, NULL) != PREFLASH_OK) ++failures;
  if (memcmp(first, t->out.data, sizeof first) != 0) {
    ++failures;
    printf("the batch has another result after refused calls\n");
  }
  preflash_plan_destroy(plan);
  preflash_plan_destroy(NULL);
  device_free(indices), device_free(t->q.data), device_free(t->k.data), device_free(t->v.data);
  device_free(t->out.data), device_free(right.ints), device_free(right.floats);
  printf("%d refusals, %d failures\n", refused, failures);
  return failures != 0;
}
