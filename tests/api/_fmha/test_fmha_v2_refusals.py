"""trtllm_fmha_v2_prefill refuses bad arguments by name, before anything is written."""

import dataclasses
import math

import preflash
import pytest
import torch
from fuzz.fmha_problems import SPARE, FmhaCase, build

attention = preflash.trtllm_fmha_v2_prefill

SEPARATE = FmhaCase((33, 5, 0, 70), (40, 90, 7, 70), stats=True, brings_out=True, sinks=True)
PAGED = dataclasses.replace(SEPARATE, layout="Q_PAGED_KV_HND")
PACKED = dataclasses.replace(
    SEPARATE, layout="PACKED_QKV", kv_lens=SEPARATE.qo_lens, num_kv_heads=SEPARATE.num_heads
)
CONTIGUOUS = dataclasses.replace(SEPARATE, layout="CONTIGUOUS_Q_KV")
FACTOR = "skip_softmax_threshold_scale_factor"


def put(**values):
    return lambda arguments: arguments.update(values)


def change(name: str, function):
    return lambda arguments: arguments.update({name: function(arguments[name])})


def entry(name: str, index: int, value: int):
    def changed(array):
        array = array.clone()
        array[index] = value
        return array

    return change(name, changed)


def part(index: int, function):
    """Changes one tensor in the tuple of qkv."""
    return change("qkv", lambda qkv: (*qkv[:index], function(qkv[index]), *qkv[index + 1 :]))


# A case, an error, and changes of the arguments with a piece of each message.
REFUSED = [
    (SEPARATE, ValueError, [
        (put(input_layout="QKV"), "input_layout='QKV'.*PACKED"),
        (part(0, lambda t: t[..., 0]), r"qkv\[0\] has shape"),
        (part(2, lambda t: t[:-1]), "qkv: v has shape"),
        (part(1, lambda t: t[..., :32]), "head_dim 32 and q"),
        (part(0, lambda t: t[:, :3]), "q has 3 heads and k 2"),
        (change("workspace_buffer", lambda t: t[::2]), "workspace_buf"),
        (change("workspace_buffer", lambda t: t[1:]), "workspace_buf"),
        (put(batch_size=-1), "batch_size=-1"),
        (put(batch_size=3), r"seq_lens has shape.*\(3,\)"),
        (change("seq_lens", lambda t: t[None]), "seq_lens has"),
        (entry("seq_lens", 1, -90), r"seq_lens\[1\] = -90"),
        (entry("seq_lens", 1, 89), r"\[1\] = 89.*agree"),
        (change("cum_seq_lens_q", lambda t: t[:-1]), "cum_seq_lens_q has"),
        (entry("cum_seq_lens_q", 2, 1), r"cum_seq_lens_q\[2\] = 1"),
        (entry("cum_seq_lens_q", -1, 999), r"cum_seq_lens_q\[-1\]"),
        (change("cum_seq_lens_kv", lambda t: t + 9), "cum_seq_lens_kv"),
        (put(max_q_len=69), "max_q_len=69: request 3"),
        (put(max_kv_len=89), "max_kv_len=89: request 1"),
        (put(block_tables=torch.zeros(4, 9, dtype=torch.int32)), "block_tables is given"),
        (put(bmm1_scale=math.inf), "bmm1_scale"),
        (put(bmm1_scale=torch.ones(2)), "bmm1_scale has 2"),
        (put(bmm1_scale=-1.0), "bmm1_scale=-1.0 with save"),
        (put(bmm2_scale=math.nan), "bmm2_scale"),
        (put(mask_mode="full"), "mask_mode='full'"),
        (put(mask_mode="chunked", chunked_attention_size=48), "chunked_attention_size=48"),
        (put(chunked_attention_size=3), "chunked_attention_size=3"),
        (put(window_left=-2), "window_left=-2"),
        (put(pos_encoding_mode="rope"), "pos_encoding_mode='rope'"),
        (put(logits_soft_cap_scale=-3.0), "logits_soft_cap_scale=-3"),
        (put(**{FACTOR: -1.0}), f"{FACTOR}=-1.0"),
        (put(**{FACTOR: math.nan}), FACTOR),
        (put(**{FACTOR: 5.0}), f"{FACTOR}=5.0 with save"),
        (put(sinks=torch.zeros(3)), "sinks has shape"),
        (put(sinks=[torch.zeros(4)] * 2), "sinks holds 2"),
        (change("out", lambda t: t[1:]), "out has shape"),
        (put(out=None, out_dtype="fp4"), "out_dtype='fp4'"),
        (put(backend="fa9"), "backend='fa9'"),
    ]),
    (PACKED, ValueError, [
        (change("qkv", lambda t: t[:, :2]), r"qkv has shape.*3, num"),
        (change("cum_seq_lens_kv", lambda t: t - 1), "PACKED_QKV"),
    ]),
    (CONTIGUOUS, ValueError, [
        (part(1, lambda t: torch.cat([t, t[:, :1]], 1)), r"qkv\[1\] has shape.*2, num_kv_heads"),
        (put(input_layout="Q_PAGED_KV_NHD"), r"qkv\[1\] has shape"),
    ]),
    (PAGED, ValueError, [
        (put(input_layout="Q_PAGED_KV_NHD"), "qkv.*another input_la"),
        (entry("seq_lens", 1, 89), r"\[1\] = 89.*agree"),
        (put(block_tables=None), "block_tables=None"),
        (change("block_tables", lambda t: t[:, :5]), "block_tables has"),
        (change("block_tables", lambda t: t[:3]), "block_tables has"),
        (entry("block_tables", (1, 0), 999), r"block_tables\[1\] holds 999"),
        (entry("block_tables", (0, 1), -1), r"block_tables\[0\] holds -1"),
    ]),
    (dataclasses.replace(SEPARATE, num_kv_heads=4), ValueError, [
        (lambda a: a.update(out=a["qkv"][1][: a["out"].shape[0]]),
         "out.*shares memory|out has shape"),
    ]),
    (SEPARATE, TypeError, [
        (put(input_layout=3), "input_layout"),
        (put(input_layout="PACKED_QKV"), "qkv must be.*3"),
        (part(0, lambda t: t.tolist), "qkv"),
        (part(1, lambda t: t.bfloat16()), "qkv: k is"),
        (put(workspace_buffer=None), "workspace_b"),
        (put(batch_size=4.0), "batch_size"),
        (change("seq_lens", lambda t: t.long()), "seq_lens is"),
        (put(cum_seq_lens_q=None), "cum_seq_lens_q"),
        (put(cum_seq_lens_kv=None), "cum_seq_lens_kv"),
        (put(bmm1_scale="one"), "bmm1_scale"),
        (put(mask_mode=None), "mask_mode"),
        (put(**{FACTOR: torch.ones(1)}), FACTOR),
        (put(save_softmax_stats=2), "save_softmax_stats"),
        (put(sinks=torch.zeros(4).half()), "sinks is"),
        (change("out", lambda t: t.double()), "out is"),
        (put(out_dtype="bf16"), "out is.*out_dtype"),
        (put(out=None, out_dtype=torch.float8_e5m2), "out_dtype is"),
    ]),
    (CONTIGUOUS, TypeError, [
        (put(input_layout="SEPARATE_Q_K_V"), "qkv.*of 2"),
    ]),
    (PACKED, TypeError, [
        (put(input_layout="Q_PAGED_KV_NHD"), "qkv must"),
        (change("qkv", lambda t: t.double()), "qkv=torch.float64"),
    ]),
    (PAGED, TypeError, [
        (change("block_tables", lambda t: t.long()), "block_tables is"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "error", "spoil", "match"),
    [
        pytest.param(case, error, *row, id=f"{row[1]} {number}")
        for case, error, rows in REFUSED
        for number, row in enumerate(rows)
    ],
)
def test_wrong_arguments_are_refused_by_name(case, error, spoil, match):
    inputs = build(case)
    out = inputs.arguments["out"]
    spoil(inputs.arguments)
    with pytest.raises(error, match=match):
        attention(**inputs.arguments)
    assert out.isnan().all()


@pytest.mark.parametrize("index", [1, 2], ids=["k", "v"])
def test_a_converted_output_on_keys_or_values(index):
    """A copy writes the output, after the kernel."""
    case = dataclasses.replace(SEPARATE, num_kv_heads=4, stats=False, brings_out=False)
    inputs = build(case)
    keys = inputs.arguments["qkv"][index]
    before = keys.view(torch.int16).clone()
    out = keys.view(torch.bfloat16)[: inputs.arguments["qkv"][0].shape[0]]
    with pytest.raises(ValueError, match=f"out shares memory with {'qkv'[index]}"):
        attention(**{**inputs.arguments, "out": out})
    assert torch.equal(keys.view(torch.int16), before)


def test_a_converted_output_of_any_stride():
    """Rows of 40 bytes do not start on multiples of 16; no kernel writes them."""
    inputs = build(dataclasses.replace(SEPARATE, head_dim=40, stats=False, brings_out=False))
    fp8 = torch.float8_e4m3fn
    expected = attention(**{**inputs.arguments, "out_dtype": fp8})
    out = torch.zeros_like(expected)
    assert attention(**{**inputs.arguments, "out": out}) is out
    got, wanted = (inputs.of_requests(one.view(torch.uint8)) for one in (out, expected))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_an_output_that_requires_grad_is_refused(dtype):
    """A converted output is refused too: autograd would record its copy."""
    inputs = build(dataclasses.replace(SEPARATE, out_dtype=dtype, brings_out=True))
    leaf = torch.full_like(inputs.arguments["out"].float(), 7.0).to(dtype).requires_grad_()
    for out in (leaf, leaf.view(leaf.shape)):
        with pytest.raises(NotImplementedError, match=r"^out requires grad"):
            attention(**inputs.arguments | {"out": out})
    q, k, v = inputs.arguments["qkv"]
    with pytest.raises(NotImplementedError, match="no gradients"):
        attention(**inputs.arguments | {"qkv": (q.clone().requires_grad_(), k, v)})
    assert bool((leaf.detach().float() == 7.0).all())


@pytest.mark.gpu
def test_lengths_on_the_host_cannot_be_captured():
    inputs = build(dataclasses.replace(SEPARATE, stats=False), "cuda", "cpu")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="seq_lens is on the CPU"),
        torch.cuda.graph(graph),
    ):
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
