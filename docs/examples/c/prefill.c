/* Prefill of two requests over a paged cache, checked against a plain loop; on the CPU:
 *   cc prefill.c $(python -m preflash config) -lm && ./a.out
 * and on a GPU with -DWITH_CUDA and CUDA's runtime (-I, -L, -lcudart). */
#include <math.h>
#include <preflash/preflash.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef WITH_CUDA
#include <cuda_runtime.h>
enum { DEVICE = 0 };
static void* memory(size_t n) { void* p = NULL; return cudaMalloc(&p, n + 16) ? NULL : p; }
static void copy(void* to, const void* from, size_t n) { cudaMemcpy(to, from, n, cudaMemcpyDefault); }
#else
enum { DEVICE = -1 };
static void* memory(size_t n) { return aligned_alloc(128, n / 128 * 128 + 128); }
static void copy(void* to, const void* from, size_t n) { memcpy(to, from, n); }
#endif

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 16, ROWS = 8, PAGES = 5 };
static const int32_t qo_indptr[] = {0, 3, 8}, kv_indptr[] = {0, 2, 5}, last_page_len[] = {4, 1};
static const int32_t pages[PAGES] = {3, 0, 4, 2, 1}; /* of 20 and 33 keys */
static uint16_t q[ROWS][HEADS][DIM], out[ROWS][HEADS][DIM]; /* bits of bfloat16 */
static uint16_t k[PAGES][PAGE][KV_HEADS][DIM], v[PAGES][PAGE][KV_HEADS][DIM];

static float value(uint16_t bits) { float x = 0; memcpy((char*)&x + 2, &bits, 2); return x; }
static void* filled(void* values, size_t bytes) { /* with -1 to 1; returns a copy on the device */
  for (uint16_t* bits = values; bits < (uint16_t*)values + bytes / 2; ++bits) {
    float x = (float)rand() / (float)RAND_MAX * 2 - 1;
    memcpy(bits, (char*)&x + 2, 2);
  }
  void* to = memory(bytes);
  return copy(to, values, bytes), to;
}
static void check(preflash_status status) {
  if (status != PREFLASH_OK) exit(fprintf(stderr, "%s\n", preflash_last_error()) > 0);
}
static float error(int request, int row, int head) { /* of out beside the plain loop */
  int keys = (kv_indptr[request + 1] - kv_indptr[request] - 1) * PAGE + last_page_len[request];
  float sum = 0, wanted[DIM] = {0}, worst = 0;
  for (int key = 0; key <= keys - qo_indptr[request + 1] + row; ++key) {
    int page = pages[kv_indptr[request] + key / PAGE], at = key % PAGE, kv = head / 2;
    float logit = 0;
    for (int d = 0; d < DIM; ++d) logit += value(q[row][head][d]) * value(k[page][at][kv][d]);
    sum += expf(logit / 8);
    for (int d = 0; d < DIM; ++d) wanted[d] += expf(logit / 8) * value(v[page][at][kv][d]);
  }
  for (int d = 0; d < DIM; ++d) worst = fmaxf(worst, fabsf(wanted[d] / sum - value(out[row][head][d])));
  return worst;
}

int main(void) {
  preflash_segment batch = PREFLASH_SEGMENT_INIT; /* bfloat16 with causal masking */
  batch.num_qo_heads = HEADS, batch.num_kv_heads = KV_HEADS, batch.head_dim_qk = batch.head_dim_vo = DIM;
  batch.num_requests = 2, batch.qo_indptr = qo_indptr, batch.kv_indptr = kv_indptr;
  batch.page_size = PAGE, batch.last_page_len = last_page_len;
  copy((void*)(batch.page_indices = memory(sizeof pages)), pages, sizeof pages);

  preflash_memory need = PREFLASH_MEMORY_INIT;
  check(preflash_sizes(DEVICE, PREFLASH_AUTO, &batch, 1, &need));
  void *ints = memory(need.int_bytes), *floats = memory(need.float_bytes);
  preflash_plan* plan;
  check(preflash_plan_create(DEVICE, &plan));
  check(preflash_plan_batch(plan, 0, &batch, 1, ints, need.int_bytes, need.float_bytes, NULL));

  preflash_tensors layer = PREFLASH_TENSORS_INIT; /* strides of pages, tokens and heads; extents */
  const preflash_tensor rows = {NULL, 0, HEADS * DIM, DIM, 1, ROWS};
  const preflash_tensor cache = {NULL, PAGE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, PAGES, PAGE};
  layer.q = layer.out = rows, layer.k = layer.v = cache, layer.sm_scale = 0.125f;
  layer.q.data = filled(q, sizeof q), layer.out.data = memory(sizeof out);
  layer.k.data = filled(k, sizeof k), layer.v.data = filled(v, sizeof v);
  check(preflash_run(plan, &layer, 1, floats, need.float_bytes, NULL));
  copy(out, layer.out.data, sizeof out);

  float worst = 0;
  for (int i = 0; i < ROWS * HEADS; ++i) worst = fmaxf(worst, error(i > 11, i / HEADS, i % HEADS));
  printf("%s: largest error %.4f\n", preflash_plan_variant(plan), worst);
  preflash_plan_destroy(plan);
  return worst > 0.01f;
}
