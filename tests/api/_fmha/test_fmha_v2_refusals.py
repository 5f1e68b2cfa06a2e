"""trtllm_fmha_v2_prefill refuses bad arguments by name, before anything is written."""

import dataclasses
import math

import preflash
import pytest
import torch
from changed_tensors import entry
from fuzz.fmha_problems import SPARE, FmhaCase, build
from planned_cases import mistakes, spoil
from refusals import refused

attention = preflash.trtllm_fmha_v2_prefill

SEPARATE = FmhaCase((33, 5, 0, 70), (40, 90, 7, 70), stats=True, brings_out=True, sinks=True)
PAGED = dataclasses.replace(SEPARATE, layout="Q_PAGED_KV_HND")
PACKED = dataclasses.replace(
    SEPARATE, layout="PACKED_QKV", kv_lens=SEPARATE.qo_lens, num_kv_heads=SEPARATE.num_heads
)
CONTIGUOUS = dataclasses.replace(SEPARATE, layout="CONTIGUOUS_Q_KV")
FACTOR = "skip_softmax_threshold_scale_factor"
CHUNKED = dataclasses.replace(SEPARATE, mask_mode="chunked")
OWN_OUT = dataclasses.replace(SEPARATE, brings_out=False)


def part(index: int, function):
    return lambda qkv: (*qkv[:index], function(qkv[index]), *qkv[index + 1 :])


# Rows of mistakes() for each layout.
REFUSED = {
    "separate": (SEPARATE, [
        ("input_layout", ValueError, ["QKV", "input_layout='QKV'.*PACKED"]),
        ("input_layout", TypeError, 3, ["PACKED_QKV", "qkv must be.*3"]),
        ("qkv", ValueError, [part(0, lambda t: t[..., 0]), r"qkv\[0\] has shape"],
         [part(2, lambda t: t[:-1]), "qkv: v has shape"],
         [part(1, lambda t: t[..., :32]), "head_dim 32 and q"],
         [part(0, lambda t: t[:, :3]), "q has 3 heads and k 2"]),
        ("qkv", TypeError, part(0, lambda t: t.tolist),
         [part(1, torch.Tensor.bfloat16), "qkv: k is"]),
        ("workspace_buffer", ValueError, lambda t: t[::2], lambda t: t[1:]),
        ("workspace_buffer", TypeError, None),
        ("batch_size", ValueError, [-1, "batch_size=-1"], [3, r"seq_lens has shape.*\(3,\)"]),
        ("batch_size", TypeError, 4.0),
        ("seq_lens", ValueError, [lambda t: t[None], "seq_lens has"],
         [entry(1, -90), r"seq_lens\[1\] = -90: must not be"],
         [entry(1, 89), r"\[1\] = 89.*agree"]),
        ("seq_lens", TypeError, [torch.Tensor.long, "seq_lens is"]),
        ("cum_seq_lens_q", ValueError, [lambda t: t[:-1], "cum_seq_lens_q has"],
         [entry(2, 1), r"cum_seq_lens_q\[2\] = 1"], [entry(-1, 999), r"cum_seq_lens_q\[-1\]"]),
        ("cum_seq_lens_q", TypeError, None),
        ("cum_seq_lens_kv", ValueError, lambda t: t + 9),
        ("cum_seq_lens_kv", TypeError, None),
        ("max_q_len", ValueError, [69, "max_q_len=69: request 3"]),
        ("max_kv_len", ValueError, [89, "max_kv_len=89: request 1"]),
        ("block_tables", ValueError,
         [torch.zeros(4, 9, dtype=torch.int32), "block_tables is given"]),
        ("bmm1_scale", ValueError, math.inf, [torch.ones(2), "bmm1_scale has 2"],
         [-1.0, "bmm1_scale=-1.0 with save"]),
        ("bmm1_scale", TypeError, "one"),
        ("bmm2_scale", ValueError, math.nan),
        ("mask_mode", ValueError, ["full", "mask_mode='full'"]),
        ("mask_mode", TypeError, None),
        ("chunked_attention_size", ValueError, [3, "chunked_attention_size=3"]),
        ("window_left", ValueError, [-2, "window_left=-2"]),
        ("pos_encoding_mode", ValueError, ["rope", "pos_encoding_mode='rope'"]),
        ("logits_soft_cap_scale", ValueError, [-3.0, "logits_soft_cap_scale=-3"]),
        (FACTOR, ValueError, [-1.0, f"{FACTOR}=-1.0"], math.nan, [5.0, f"{FACTOR}=5.0 with save"]),
        (FACTOR, TypeError, torch.ones(1)),
        ("save_softmax_stats", TypeError, 2),
        ("sinks", ValueError, [torch.zeros(3), "sinks has shape"],
         [[torch.zeros(4)] * 2, "sinks holds 2"]),
        ("sinks", TypeError, [torch.zeros(4).half(), "sinks is"]),
        ("out", ValueError, [lambda t: t[1:], "out has shape"]),
        ("out", TypeError, [torch.Tensor.double, "out is"]),
        ("out_dtype", TypeError, ["bf16", "out is.*out_dtype"]),
        ("backend", ValueError, ["fa9", "backend='fa9'"]),
    ]),
    "chunked": (CHUNKED, [("chunked_attention_size", ValueError, [48, "attention_size=48"])]),
    "own out": (OWN_OUT, [
        ("out_dtype", ValueError, ["fp4", "out_dtype='fp4'"]),
        ("out_dtype", TypeError, [torch.float8_e5m2, "out_dtype is"]),
    ]),
    "packed": (PACKED, [
        ("qkv", ValueError, [lambda t: t[:, :2], r"qkv has shape.*3, num"]),
        ("qkv", TypeError, [torch.Tensor.double, "qkv=torch.float64"]),
        ("cum_seq_lens_kv", ValueError, [lambda t: t - 1, "PACKED_QKV"]),
        ("input_layout", TypeError, ["Q_PAGED_KV_NHD", "qkv must"]),
    ]),
    "contiguous": (CONTIGUOUS, [
        ("qkv", ValueError, [part(1, lambda t: torch.cat([t, t[:, :1]], 1)),
         r"qkv\[1\] has shape.*2, num_kv_heads"]),
        ("input_layout", ValueError, ["Q_PAGED_KV_NHD", r"qkv\[1\] has shape"]),
        ("input_layout", TypeError, ["SEPARATE_Q_K_V", "qkv.*of 2"]),
    ]),
    "paged": (PAGED, [
        ("input_layout", ValueError, ["Q_PAGED_KV_NHD", "qkv.*another input_la"]),
        ("seq_lens", ValueError, [entry(1, 89), r"\[1\] = 89.*agree"]),
        ("block_tables", ValueError, [None, "block_tables=None"],
         [lambda t: t[:, :5], "block_tables has"], [lambda t: t[:3], "block_tables has"],
         [entry((1, 0), 999), r"block_tables\[1\] holds 999"],
         [entry((0, 1), -1), r"block_tables\[0\] holds -1"]),
        ("block_tables", TypeError, [torch.Tensor.long, "block_tables is"]),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "argument", "value", "error", "says"),
    [
        pytest.param(case, *row.values, id=f"{name} {row.id}")
        for name, (case, rows) in REFUSED.items()
        for row in mistakes(*rows)
    ],
)
def test_wrong_arguments_are_refused_by_name(case, argument, value, error, says):
    inputs = build(case)
    out = inputs.arguments.get("out")
    spoil(inputs.arguments, argument, value)
    refused(says, attention, error=error, **inputs.arguments)
    assert out is None or out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["own", "converted"])
@pytest.mark.parametrize("index", [1, 2], ids=["k", "v"])
def test_an_output_on_keys_or_values(index, dtype):
    """A copy writes an output of another dtype, after the kernel."""
    inputs = build(dataclasses.replace(OWN_OUT, num_kv_heads=4, stats=False))
    given, keys = inputs.arguments, inputs.arguments["qkv"][index]
    before = keys.view(torch.int16).clone()
    out = keys.view(dtype)[: given["qkv"][0].shape[0]]
    for other, memory in (("qkv"[index], given["workspace_buffer"]), ("workspace_buffer", out)):
        with pytest.raises(ValueError, match=f"out shares memory with {other}"):
            attention(**given | {"out": out, "workspace_buffer": memory.flatten()})
    assert torch.equal(keys.view(torch.int16), before)


def test_a_converted_output_of_any_stride():
    """Rows of 40 bytes do not start on multiples of 16; no kernel writes them."""
    inputs = build(dataclasses.replace(OWN_OUT, head_dim=40, stats=False))
    expected = attention(**inputs.arguments | {"out_dtype": torch.float8_e4m3fn})
    out = torch.zeros_like(expected)
    assert attention(**inputs.arguments | {"out": out}) is out
    got, wanted = (inputs.of_requests(one.view(torch.uint8)) for one in (out, expected))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_that_require_grad(dtype):
    """A converted output is refused too: autograd would record its copy."""
    inputs = build(dataclasses.replace(SEPARATE, out_dtype=dtype))
    given, (q, *kv) = inputs.arguments, inputs.arguments["qkv"]
    leaf = torch.full_like(given["out"].float(), 7.0).to(dtype).requires_grad_()
    for name, value, says in (
        ("out", leaf, r"^out requires grad"),
        ("out", leaf.view(leaf.shape), r"^out requires grad"),
        ("qkv", (q.clone().requires_grad_(), *kv), "no gradients"),
    ):
        refused(says, attention, error=NotImplementedError, **given | {name: value})
    assert bool((leaf.detach().float() == 7.0).all())


@pytest.mark.gpu
def test_lengths_on_the_host_cannot_be_captured():
    inputs = build(dataclasses.replace(SEPARATE, stats=False), "cuda", "cpu")
    raises = pytest.raises(RuntimeError, match="seq_lens is on the CPU")
    with raises, torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(**inputs.arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_lengths_beyond_the_tensors_are_cut_off(backend):
    """The host does not read the lengths; the kernels stay inside the tensors."""
    inputs = build(dataclasses.replace(SEPARATE, stats=False), "cuda")
    inputs.arguments["seq_lens"] += 1 << 20
    inputs.arguments["cum_seq_lens_q"][-1] += 1 << 20
    out = attention(**inputs.arguments, backend=backend)
    torch.cuda.synchronize()
    assert out[SPARE : SPARE + 33].isfinite().all()
