/* run_case CASE RESULT: computes the batch of a file that test_c_interface.py wrote, whose header
 * is struct header and whose arrays follow it in the order in which they are read here. */
#include <preflash/preflash.h>
#include <stdio.h>

#include "device.h"

struct tensor {
  int64_t bytes, stride_page, stride_token, stride_head, num_pages, num_tokens;
};
struct header {
  int64_t num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_dtype, kv_dtype, o_dtype;
  int64_t causal, custom_mask, window_left, position;
  int64_t num_requests, page_size, num_indices, table_stride, sinks, mask_bytes, bounds;
  struct tensor q, k, v, out;
  double soft_cap, sm_scale, rope_scale, rope_theta;
};

static FILE* file;

static void* read_host(size_t bytes) {
  void* memory = malloc(bytes ? bytes : 1);
  if (fread(memory, 1, bytes, file) != bytes) exit(3);
  return memory;
}
static void* read_device(size_t bytes) {
  if (bytes == 0) return NULL;
  void *host = read_host(bytes), *device = device_memory(bytes);
  copy(device, host, bytes);
  free(host);
  return device;
}
static void check(preflash_status status) {
  if (status == PREFLASH_OK) return;
  fprintf(stderr, "%s\n", preflash_last_error());
  exit(status == PREFLASH_NOT_COMPILED ? 4 : 1);
}
static preflash_tensor tensor(const struct tensor* t, void* data) {
  return (preflash_tensor){data,           t->stride_page, t->stride_token,
                           t->stride_head, t->num_pages,   t->num_tokens};
}

int main(int argc, char** argv) {
  file = argc == 3 ? fopen(argv[1], "rb") : NULL;
  if (file == NULL) return 2;
  struct header* h = read_host(sizeof *h);
  preflash_segment s = PREFLASH_SEGMENT_INIT;
  s.num_qo_heads = (int32_t)h->num_qo_heads, s.num_kv_heads = (int32_t)h->num_kv_heads;
  s.head_dim_qk = (int32_t)h->head_dim_qk, s.head_dim_vo = (int32_t)h->head_dim_vo;
  s.q_dtype = (preflash_dtype)h->q_dtype, s.kv_dtype = (preflash_dtype)h->kv_dtype;
  s.o_dtype = (preflash_dtype)h->o_dtype, s.causal = (int32_t)h->causal;
  s.custom_mask = (int32_t)h->custom_mask, s.window_left = (int32_t)h->window_left;
  s.position = (preflash_position)h->position, s.soft_cap = (float)h->soft_cap;
  s.rope_scale = h->rope_scale, s.rope_theta = h->rope_theta;
  s.num_requests = (int32_t)h->num_requests, s.page_size = (int32_t)h->page_size;
  const size_t requests = (size_t)h->num_requests, rows = (size_t)h->q.num_tokens;
  void* qo_indptr = read_host(4 * (requests + 1));
  void* kv_indptr = read_host(4 * (requests + 1));
  void* last_page_len = read_host(h->page_size ? 4 * requests : 0);
  s.qo_indptr = qo_indptr, s.kv_indptr = kv_indptr;
  s.last_page_len = h->page_size ? last_page_len : NULL;
  s.page_indices = read_device(4 * (size_t)h->num_indices);
  s.block_table_stride = h->table_stride;
  s.kv_lens = read_device(h->bounds ? 4 * requests : 0);

  preflash_tensors t = PREFLASH_TENSORS_INIT;
  t.q = tensor(&h->q, read_device((size_t)h->q.bytes));
  t.k = tensor(&h->k, read_device((size_t)h->k.bytes));
  t.v = tensor(&h->v, read_device((size_t)h->v.bytes));
  t.sinks = read_device(h->sinks ? 4 * (size_t)h->num_qo_heads : 0);
  t.mask_bits = read_device((size_t)h->mask_bytes);
  t.out = tensor(&h->out, device_memory((size_t)h->out.bytes));
  const size_t lse_bytes = 4 * rows * (size_t)h->num_qo_heads;
  t.lse = device_memory(lse_bytes), t.lse_stride_token = h->num_qo_heads, t.lse_stride_head = 1;
  t.sm_scale = (float)h->sm_scale;
  fclose(file);

  preflash_memory memory = PREFLASH_MEMORY_INIT;
  check(preflash_sizes(DEVICE, PREFLASH_AUTO, &s, 1, &memory));
  preflash_plan* plan;
  check(preflash_plan_create(DEVICE, &plan));
  void *ints = device_memory(memory.int_bytes), *floats = device_memory(memory.float_bytes);
  check(preflash_plan_batch(plan, PREFLASH_AUTO, &s, 1, ints, memory.int_bytes, memory.float_bytes,
                            NULL));
  free(qo_indptr), free(kv_indptr), free(last_page_len); /* the plan has copies */
  check(preflash_run(plan, &t, 1, floats, memory.float_bytes, NULL));

  char* out = malloc((size_t)h->out.bytes + lse_bytes + 1);
  copy(out, t.out.data, (size_t)h->out.bytes);
  copy(out + h->out.bytes, t.lse, lse_bytes);
  file = fopen(argv[2], "wb");
  if (fwrite(out, 1, (size_t)h->out.bytes + lse_bytes, file) == 0 && rows > 0) return 3;
  fclose(file);
  printf("%s\n", preflash_plan_variant(plan));
  preflash_plan_destroy(plan);
  device_free(ints), device_free(floats), device_free(t.out.data), device_free(t.q.data);
  device_free(t.k.data), device_free(t.v.data), free(out), free(h);
  device_free(t.lse), device_free((void*)t.sinks), device_free((void*)t.mask_bits);
  device_free((void*)s.page_indices), device_free((void*)s.kv_lens);
  return 0;
}
