"""Each row breaks arguments of a correct batch: the call is refused with the row's words, and the
batch has the same result as before."""

import math

import interface
import pytest
import torch
from interface import Call, RefusedError, address, changed, segment_of, tensors_of
from preflash.testing import Case, MaskKind, build

HEADS, DIM = 4, 16
CASE = Case("right", (2, 3), (7, 9), HEADS, 2, DIM, dtype=torch.float32, page_size=4,
            mask=MaskKind.CAUSAL)  # fmt: skip
WRONG = torch.tensor([[0, 3, 2], [-1, 2, 5], [0, 1, 0], [3, 9, 0]], dtype=torch.int32)
FALLING, NEGATIVE, NONE, LONG = map(address, WRONG)
MASKED = {"causal": 0, "custom_mask": 1}
# Members of the segment, and what sizes() and plan_batch() say.
OF_SEGMENT = [
    ({"size": 0}, "INIT macro"),
    ({"size": 1 << 40}, "INIT macro"),
    ({"size": 140}, "INIT macro"),
    ({"num_qo_heads": 0}, "num_qo_heads = 0: must be at least 1"),
    ({"num_kv_heads": 0}, "num_kv_heads = 0: must be in [1, 32767]"),
    ({"num_kv_heads": 3}, "num_qo_heads = 4 is not a multiple of num_kv_heads = 3"),
    ({"head_dim_qk": 0}, "head_dim_qk = 0: must be a multiple of 8 from 8 to 512"),
    ({"head_dim_qk": 12}, "padded with zeros to 16 columns"),
    ({"head_dim_vo": 4096}, "head_dim_vo = 4096"),
    ({"q_dtype": 77}, "q_dtype = 77"),
    ({"kv_dtype": -1}, "kv_dtype"),
    ({"o_dtype": 5}, "o_dtype = 5"),
    ({"o_dtype": interface.E5M2}, "o_dtype = e5m2 with q_dtype = f32"),
    ({"o_dtype": interface.BF16}, "o_dtype = bf16"),
    ({"q_dtype": interface.E5M2}, "q_dtype = e5m2"),
    ({"kv_dtype": interface.BF16}, "kv_dtype = bf16 with"),
    (
        {"q_dtype": interface.E4M3, "kv_dtype": interface.E5M2, "o_dtype": interface.F16},
        "kv_dtype = e5m2 with q_dtype = e4m3",
    ),
    ({"reserved": 1}, "reserved = 1"),
    ({"soft_cap": 1e-30}, "soft_cap"),
    ({"soft_cap": 3e38}, "soft_cap"),
    ({"soft_cap": -1.0}, "soft_cap = -1"),
    ({"soft_cap": math.nan}, "soft_cap"),
    ({"position": interface.ROPE, "rope_scale": 1e-12}, "1024 radians"),
    ({"position": interface.ROPE, "rope_theta": 1e-6}, "1024 radians"),
    ({"position": interface.ROPE, "rope_scale": 0.0}, "rope"),
    ({"position": interface.ROPE, "rope_theta": math.inf}, "rope"),
    ({"position": 9}, "position = 9"),
    ({**MASKED, "kv_lens": NONE}, "kv_lens"),
    ({**MASKED, "graph_max_rows": 9}, "graph_max_rows"),
    ({"causal": 2}, "causal = 2"),
    ({"custom_mask": 1}, "one of them"),
    ({"batch_invariant": -1}, "batch_invariant = -1"),
    ({"window_left": -2}, "window_left = -2: must be -1"),
    ({"num_requests": -1}, "num_requests = -1"),
    ({"qo_indptr": None}, "qo_indptr is NULL"),
    ({"kv_indptr": None}, "kv_indptr is NULL"),
    ({"qo_indptr": FALLING}, "qo_indptr[2] = 2 is less than qo_indptr[1] = 3"),
    ({"kv_indptr": FALLING}, "kv_indptr[2] = 2 is less than"),
    ({"qo_indptr": NEGATIVE}, "qo_indptr[0] = -1: must not be negative"),
    ({"kv_indptr": NEGATIVE}, "kv_indptr[0] = -1: must not be negative"),
    ({"page_size": -1}, "page_size = -1"),
    ({"page_size": 0}, "page_size = 0"),
    ({"page_size": 0, "last_page_len": None}, "or page_indices"),
    ({"last_page_len": None}, "last_page_len is NULL"),
    ({"last_page_len": NONE}, "last_page_len[0] = 0: request 0"),
    ({"last_page_len": LONG}, "last_page_len[1] = 9: request 1 has 3 pages"),
    ({"block_table_stride": -3}, "block_table_stride = -3"),
    ({"block_table_stride": 2}, "request 1 has 3 pages"),
    ({"graph_max_rows": -1}, "graph_max_rows = -1"),
    ({"graph_max_rows": 2}, "qo_indptr[-1] - qo_indptr[0] = 5"),
]
# Arguments of both.
OF_CALL = [
    ({"segment": None}, "segments is NULL"),
    ({"num_segments": 0}, "num_segments = 0"),
    ({"num_segments": 3}, "num_segments = 3"),
    ({"backend": 8}, "no preflash_backend"),
    ({"backend": 4}, "no preflash_backend"),
    ({"backend": interface.FA3}, "does not run on device -1"),
    ({"backend": interface.FA2}, "does not run on device -1"),
]
# Arguments of plan_batch() alone. A function makes a value from the right call.
OF_PLAN = [
    ({"segment.page_indices": None}, "page_indices is NULL"),
    ({"ints": None}, "int_memory is NULL"),
    ({"ints": lambda c: c.ints + 8}, "16 bytes"),
    ({"int_bytes": 16}, "16 bytes; this plan needs"),
]
LSE = {"lse": lambda c: c.floats, "lse_stride_head": 1}
# Members of the tensors, and what run() says.
OF_TENSORS = [
    ({"size": 1}, "INIT macro"),
    *(({f"{name}.data": None}, f"{name} is NULL") for name in ("q", "k", "v", "out")),
    ({"q.data": lambda c: c.tensors.q.data + 4}, "16"),
    ({"q.num_tokens": 4}, "out has 5 rows, q 4"),
    ({"q.num_tokens": 4, "out.num_tokens": 4}, "q has 4 rows"),
    ({"q.stride_token": DIM * HEADS + 1}, "q has a stride of 65"),
    ({"k.stride_head": 4}, "k has a stride of 4"),
    ({"v.stride_page": -64}, "v has a stride of -64"),
    ({"k.num_pages": 0}, "on 0 pages"),
    ({"k.num_pages": 2}, "x 4 and 8 x 4"),
    ({"v.num_tokens": 3}, "x 4 and 8 x 3"),
    ({"k.num_pages": 3, "v.num_pages": 3}, "page"),
    ({"k.num_tokens": 3, "v.num_tokens": 3}, "pages of 4"),
    ({"q.num_pages": 2}, ""),
    ({"out.stride_head": 0}, "out has a stride of 0"),
    ({"out.stride_token": DIM * 2}, "rows would overlap"),
    ({"out.stride_token": DIM * HEADS - 4}, "rows would overlap"),
    ({"out.data": lambda c: c.tensors.k.data}, "out shares memory with k"),
    ({"out.data": lambda c: c.floats}, "float_workspace_buffer"),
    ({"sm_scale": 3e38}, "sm_scale"),
    ({"sm_scale": math.nan}, "sm_scale"),
    ({"out_scale": math.inf}, "out_scale"),
    ({"mask_bits": lambda c: c.tensors.q.data}, "mask_bits are for"),
    ({**LSE, "lse": lambda c: c.tensors.q.data, "lse_stride_token": 4}, "lse shares memory with q"),
    ({**LSE, "lse_stride_token": 0, "lse_stride_head": 0}, "lse has strides"),
    ({**LSE, "lse_stride_token": HEADS - 1}, "lse has strides"),
]
OF_RUN = [
    ({"tensors": None}, "tensors is NULL"),
    ({"run_segments": 2}, "num_segments = 2; planned were 1"),
]


def members_of(struct: str, rows):
    return [({f"{struct}.{name}": x for name, x in row.items()}, says) for row, says in rows]


ROWS_OF = {
    "sizes make_plan": members_of("segment", OF_SEGMENT) + OF_CALL,
    "make_plan": OF_PLAN,
    "run": members_of("tensors", OF_TENSORS) + OF_RUN,
}


@pytest.fixture(scope="module")
def right() -> Call:
    inputs = build(CASE)
    inputs.out = torch.zeros_like(inputs.q)
    made = Call(segment_of(inputs), tensors_of(inputs, inputs.out))
    made.inputs = inputs
    made.allocate(more=4096)
    with pytest.raises(RefusedError):
        made.run()  # before plan_batch()
    return made


@pytest.mark.parametrize(
    ("calls", "changes", "says"),
    [(calls.split(), *row) for calls, rows in ROWS_OF.items() for row in rows],
)
def test_refusals(right, calls, changes, says):
    right.make_plan()
    right.run()
    before = right.inputs.out.clone()
    values = {path: x(right) if callable(x) else x for path, x in changes.items()}
    wrong = changed(right, values)
    for name in calls:
        with pytest.raises(RefusedError) as caught:
            getattr(wrong, name)()
        assert caught.value.status == interface.INVALID_ARGUMENT
        assert says in str(caught.value)
    right.run()
    assert torch.equal(right.inputs.out, before)
