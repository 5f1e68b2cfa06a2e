/* Uses of the interface that no case has: two segments, structs of other releases, other strides.
 */
#include <preflash/preflash.h>
#include <stdio.h>

#include "device.h"

enum { HEADS = 2, DIM = 8, KEYS = 40, ROWS = 9, SIZE = ROWS * HEADS * DIM, LONG = 4000 };

static int failures = 0;
static void expect(int right, const char* what) {
  if (right) return;
  ++failures;
  printf("wrong: %s (%s)\n", what, preflash_last_error());
}

static float* values(size_t count) {
  static float x = 0.3f;
  float* made = device_memory(4 * count);
  for (size_t i = 0; i < count; ++i) made[i] = x = 3.7f * x * (1 - x);
  return made;
}

static const int32_t kOne[] = {0, ROWS}, kDecode[] = {0, 1, 2}, kKeys[] = {0, KEYS},
                     kTwo[] = {0, 30, KEYS}, kLong[] = {0, LONG}, kFull[] = {16};

static preflash_segment segment(int num_requests, const int32_t* qo, const int32_t* kv) {
  preflash_segment s = PREFLASH_SEGMENT_INIT;
  s.num_qo_heads = s.num_kv_heads = HEADS, s.head_dim_qk = s.head_dim_vo = DIM;
  s.q_dtype = s.kv_dtype = s.o_dtype = PREFLASH_FLOAT32;
  s.num_requests = num_requests, s.qo_indptr = qo, s.kv_indptr = kv;
  return s;
}
static preflash_tensors layer(float* q, float* k, float* v, float* out, int rows) {
  preflash_tensors t = PREFLASH_TENSORS_INIT;
  t.q = (preflash_tensor){q, 0, HEADS * DIM, DIM, 1, rows};
  t.k = (preflash_tensor){k, 0, HEADS * DIM, DIM, 1, KEYS};
  t.v = (preflash_tensor){v, 0, HEADS * DIM, DIM, 1, KEYS};
  t.out = (preflash_tensor){out, 0, HEADS * DIM, DIM, 1, rows};
  t.sm_scale = 0.5f;
  return t;
}
/* Plans and runs segments in memory of its own. */
static preflash_status computed(const preflash_segment* s, const preflash_tensors* t, int count) {
  preflash_memory need = PREFLASH_MEMORY_INIT;
  preflash_status status = preflash_sizes(DEVICE, PREFLASH_AUTO, s, count, &need);
  if (status != PREFLASH_OK) return status;
  void *ints = device_memory(need.int_bytes), *floats = device_memory(need.float_bytes);
  preflash_plan* plan = NULL;
  status = preflash_plan_create(DEVICE, &plan);
  if (status == PREFLASH_OK) status = preflash_plan_set_num_threads(plan, 2);
  if (status == PREFLASH_OK) {
    status = preflash_plan_batch(plan, PREFLASH_AUTO, s, count, ints, need.int_bytes,
                                 need.float_bytes, NULL);
  }
  if (status == PREFLASH_OK) {
    const char* name = NULL;
    expect(preflash_find_variant(DEVICE, PREFLASH_AUTO, s, count, &name) == PREFLASH_OK &&
               strcmp(name, preflash_plan_variant(plan)) == 0,
           "preflash_find_variant() names the planned kernel");
    status = preflash_run(plan, t, count, floats, need.float_bytes, NULL);
  }
  preflash_plan_destroy(plan);
  device_free(ints), device_free(floats);
  return status;
}

/* Plans that share memory, one after the other, and plans that a CUDA graph may hold. */
static void share_memory(const preflash_segment* s, const preflash_tensors* t) {
  preflash_memory m = PREFLASH_MEMORY_INIT;
  preflash_plan* plans[2] = {NULL, NULL};
  expect(preflash_sizes(DEVICE, PREFLASH_AUTO, s, 1, &m) == PREFLASH_OK, "sizes");
  const size_t size = 2 * m.int_bytes, room = m.float_bytes;
  void *ints = device_memory(size), *floats = device_memory(room);
  preflash_segment batch = *s;
  for (int i = 0; i < 3; ++i) {
    preflash_plan** plan = &plans[i % 2];
    if (i < 2) expect(preflash_plan_create(DEVICE, plan) == PREFLASH_OK, "a plan");
    preflash_plan_batch(*plan, PREFLASH_AUTO, s, 1, ints, size, room, NULL);
    expect(preflash_run(*plan, t, 1, floats, room, NULL) == PREFLASH_OK, "the last plan");
  }
  expect(preflash_run(plans[1], t, 1, floats, room, NULL) != PREFLASH_OK, "an overwritten plan");
  batch.graph_max_rows = ROWS;
  for (int window = -1; window < 9; window += 9) {
    batch.window_left = window;
    expect((preflash_plan_batch(plans[0], PREFLASH_AUTO, &batch, 1, ints, size, 0, NULL) ==
            PREFLASH_OK) == (window < 0),
           "other options than those of a graph's plan");
  }
  /* The page size and the address of the pages are a graph's, too. */
  int32_t* pages = device_memory(8 * sizeof *pages);
  memset(pages, 0, 8 * sizeof *pages);
  batch.window_left = -1, batch.kv_indptr = kDecode, batch.last_page_len = kFull;
  for (int i = 0; i < 3; ++i) {
    batch.page_size = i == 1 ? 32 : 16, batch.page_indices = pages + i / 2 * 4;
    expect((preflash_plan_batch(plans[1], PREFLASH_AUTO, &batch, 1, ints, size, 0, NULL) ==
            PREFLASH_OK) == (i == 0),
           "other pages than those of a graph's plan");
  }
  device_free(pages);
  preflash_plan_destroy(plans[0]), preflash_plan_destroy(plans[1]);
  device_free(ints), device_free(floats);
}

/* What a caller of a later release passes: members behind those of this one. */
struct later_segment {
  preflash_segment known;
  int64_t added;
};
struct later_tensors {
  preflash_tensors known;
  int64_t added;
};

int main(void) {
  float *q = values(SIZE), *k = values(KEYS * HEADS * DIM), *v = values(KEYS * HEADS * DIM);
  float *out = values(SIZE), *other = values(SIZE), *decode_q = values(2 * HEADS * DIM);
  float *decode = values(2 * HEADS * DIM), *both[2] = {values(SIZE), values(2 * HEADS * DIM)};
  const preflash_segment prefill = segment(1, kOne, kKeys), two = segment(2, kDecode, kTwo);
  const preflash_tensors of_prefill = layer(q, k, v, out, ROWS);
  const preflash_tensors of_two = layer(decode_q, k, v, decode, 2);
  expect(computed(&prefill, &of_prefill, 1) == PREFLASH_OK, "a prefill");
  expect(computed(&two, &of_two, 1) == PREFLASH_OK, "a decode batch");

  const preflash_segment segments[] = {prefill, two};
  preflash_tensors layers[] = {of_prefill, of_two};
  layers[0].out.data = both[0], layers[1].out.data = both[1];
  expect(computed(segments, layers, 2) == PREFLASH_OK, "prefill beside decode");
  expect(memcmp(both[0], out, 4 * SIZE) == 0, "the prefill of both");
  expect(memcmp(both[1], decode, 8 * HEADS * DIM) == 0, "the decode batch of both");

  /* One row of many keys, which are split where there is more than one processor. */
  preflash_segment row = segment(1, kDecode, kLong);
  row.num_qo_heads = row.num_kv_heads = 1;
  float* many = values(LONG * HEADS * DIM);
  preflash_tensors of_row = layer(decode_q, many, many, both[0], 1);
  of_row.k.num_tokens = of_row.v.num_tokens = LONG;
  expect(computed(&row, &of_row, 1) == PREFLASH_OK, "sizes of keys that are split");
  device_free(many);

  /* Each segment's own numbers of keys, and its own kernel. */
  const int32_t lengths[] = {KEYS - 11, 20, 5};
  int32_t* kv_lens = device_memory(sizeof lengths);
  copy(kv_lens, lengths, sizeof lengths);
  preflash_segment bounds[] = {prefill, two};
  bounds[0].kv_lens = kv_lens, bounds[1].kv_lens = kv_lens + 1;
  bounds[1].position = PREFLASH_ALIBI;
  float* alone[] = {values(SIZE), values(2 * HEADS * DIM)};
  expect(computed(bounds, layers, 2) == PREFLASH_OK, "numbers of keys of two segments");
  for (int i = 0; i < 2; ++i) {
    preflash_tensors one = layers[i];
    one.out.data = alone[i];
    expect(computed(&bounds[i], &one, 1) == PREFLASH_OK, "numbers of keys of one segment");
    expect(memcmp(both[i], alone[i], i ? 8 * HEADS * DIM : 4 * SIZE) == 0, "each reads its own");
  }

  /* Outputs of one segment on memory of the other. */
  preflash_tensors shared[] = {layers[0], layers[1]};
  shared[0].lse = shared[1].lse = alone[0];
  shared[0].lse_stride_token = shared[1].lse_stride_token = HEADS;
  shared[0].lse_stride_head = shared[1].lse_stride_head = 1;
  expect(computed(segments, shared, 2) == PREFLASH_INVALID_ARGUMENT, "one lse for both");
  shared[0] = layers[0], shared[1] = layers[1];
  shared[0].out.data = shared[0].q.data = shared[1].q.data = alone[0];
  expect(computed(segments, shared, 2) == PREFLASH_INVALID_ARGUMENT, "out on the other's q");
  share_memory(&prefill, &of_prefill);

  /* Values of one argument that are right or wrong by those of another. */
  preflash_tensors scale = of_prefill, few_keys = of_prefill;
  preflash_segment alibi = prefill, capped = prefill;
  alibi.position = PREFLASH_ALIBI, scale.sm_scale = 0.0f, scale.out.data = alone[0];
  expect(computed(&alibi, &scale, 1) == PREFLASH_OK, "ALiBi alone");
  capped.soft_cap = 1e-6f, scale.sm_scale = 1e33f;
  expect(computed(&capped, &scale, 1) == PREFLASH_INVALID_ARGUMENT, "an infinite scale / soft_cap");
  few_keys.k.num_tokens = few_keys.v.num_tokens = KEYS - 1;
  expect(computed(&prefill, &few_keys, 1) == PREFLASH_INVALID_ARGUMENT, "fewer keys than planned");

  /* Two segments of a later release, whose members behind ours are 0. */
  struct later_segment later[] = {{prefill, 0}, {two, 0}};
  struct later_tensors later_layers[] = {{layers[0], 0}, {layers[1], 0}};
  for (int i = 0; i < 2; ++i) {
    later[i].known.size = sizeof later[i], later_layers[i].known.size = sizeof later_layers[i];
    memset(both[i], 0, i ? 8 * HEADS * DIM : 4 * SIZE);
  }
  expect(computed(&later[0].known, &later_layers[0].known, 2) == PREFLASH_OK, "a later release");
  expect(memcmp(both[1], decode, 8 * HEADS * DIM) == 0, "the decode batch of a later release");
  later[1].added = 7;
  expect(computed(&later[0].known, &later_layers[0].known, 2) == PREFLASH_INVALID_ARGUMENT &&
             strstr(preflash_last_error(), "of a later release") != NULL,
         "a member that this release does not know");
  /* An earlier release, without the last members. */
  preflash_segment earlier = prefill;
  earlier.size = offsetof(preflash_segment, kv_lens);
  earlier.reserved = 5, earlier.graph_max_rows = -3;
  preflash_tensors of_earlier = of_prefill;
  of_earlier.size = offsetof(preflash_tensors, sinks), of_earlier.out.data = other;
  of_earlier.mask_bits = (const uint8_t*)q;
  expect(computed(&earlier, &of_earlier, 1) == PREFLASH_OK, "an earlier release");
  expect(memcmp(other, out, 4 * SIZE) == 0, "the result of an earlier release");

  /* out_scale, lse [heads, rows], an output between others, and an output that is q. */
  preflash_tensors scaled = of_prefill;
  float* wide = device_memory(8 * SIZE);
  memset(wide, 0, 8 * SIZE);
  float* lse = device_memory(4 * ROWS * HEADS);
  scaled.out = (preflash_tensor){wide, 0, 2 * HEADS * DIM, 2 * DIM, 1, ROWS};
  scaled.out_scale = 2.0f, scaled.lse = lse, scaled.lse_stride_token = 1;
  scaled.lse_stride_head = ROWS;
  expect(computed(&prefill, &scaled, 1) == PREFLASH_OK, "other strides");
  for (int i = 0; i < SIZE; ++i) {
    const float got = wide[i / DIM * 2 * DIM + i % DIM], between = wide[i / DIM * 2 * DIM + DIM];
    expect(got == 2 * out[i] && between == 0.0f, "out_scale, and rows between others");
    expect(lse[i / DIM % HEADS * ROWS + i / DIM / HEADS] > -20.0f, "lse of every row");
  }
  preflash_tensors in_place = of_prefill;
  copy(other, q, 4 * SIZE);
  in_place.q.data = in_place.out.data = other;
  expect(computed(&prefill, &in_place, 1) == PREFLASH_OK, "out is q");
  expect(memcmp(other, out, 4 * SIZE) == 0, "the result where out is q");

  const char* name = NULL;
  preflash_segment unserved = prefill;
  unserved.head_dim_qk = 24, unserved.q_dtype = unserved.o_dtype = PREFLASH_FLOAT16;
  expect(preflash_find_variant(DEVICE, PREFLASH_AUTO, &unserved, 1, &name) != PREFLASH_OK,
         "options without a kernel");
  preflash_segment mixed[] = {prefill, prefill};
  mixed[1].q_dtype = mixed[1].kv_dtype = mixed[1].o_dtype = PREFLASH_FLOAT16;
  expect(preflash_find_variant(DEVICE, PREFLASH_AUTO, mixed, 2, &name) == PREFLASH_OK &&
             strstr(name, "f32_") && strstr(name, "f16_"),
         "the names of two segments");
  unserved.head_dim_qk = DIM;
  unserved.q_dtype = unserved.kv_dtype = unserved.o_dtype = PREFLASH_FLOAT8_E4M3;
  expect(preflash_find_variant(DEVICE, PREFLASH_AUTO, &unserved, 1, &name) !=
             PREFLASH_INVALID_ARGUMENT,
         "8 bits in and out");
  expect(preflash_find_variant(-2, PREFLASH_AUTO, &prefill, 1, &name) == PREFLASH_INVALID_ARGUMENT,
         "a device that cannot be");
  expect(preflash_set_kernel_directory(NULL) == PREFLASH_INVALID_ARGUMENT, "no directory");
  expect(preflash_abi_version() == PREFLASH_ABI_VERSION, "the version");
  float* all[] = {q,       k,       v,    out, other,    decode_q, decode,
                  both[0], both[1], wide, lse, alone[0], alone[1]};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) device_free(all[i]);
  device_free(kv_lens);
  printf("%d failures\n", failures);
  return failures != 0;
}
