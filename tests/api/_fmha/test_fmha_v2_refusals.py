"""Bad arguments of trtllm_fmha_v2_prefill are refused by name, before anything is written."""

import dataclasses
import math
from collections.abc import Callable

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


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`spoil` changes the arguments of the case; `match` is a pattern for the message."""

    id: str
    case: FmhaCase
    spoil: Callable[[dict], object]
    match: str
    error: type = ValueError


def put(**values) -> Callable[[dict], object]:
    return lambda arguments: arguments.update(values)


def change(name: str, function) -> Callable[[dict], object]:
    return lambda arguments: arguments.update({name: function(arguments[name])})


def entry(name: str, index: int, value: int) -> Callable[[dict], object]:
    def spoil(arguments: dict) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][index] = value

    return spoil


def part(index: int, function) -> Callable[[dict], object]:
    """Another tensor in the tuple of qkv."""

    def spoil(arguments: dict) -> None:
        parts = list(arguments["qkv"])
        parts[index] = function(parts[index])
        arguments["qkv"] = tuple(parts)

    return spoil


MISTAKES = [
    Mistake("layout unknown", SEPARATE, put(input_layout="QKV"), "input_layout='QKV'.*PACKED"),
    Mistake("layout no str", SEPARATE, put(input_layout=3), "input_layout", TypeError),
    Mistake(
        "packed given three", SEPARATE, put(input_layout="PACKED_QKV"), "qkv must be.*3", TypeError
    ),
    Mistake(
        "packed of two planes", PACKED, change("qkv", lambda t: t[:, :2]), r"qkv has shape.*3, num"
    ),
    Mistake("packed of three dims", PACKED, change("qkv", lambda t: t[..., 0]), "qkv has shape"),
    Mistake(
        "contiguous given three",
        SEPARATE,
        put(input_layout="CONTIGUOUS_Q_KV"),
        "qkv.*of 3",
        TypeError,
    ),
    Mistake(
        "contiguous of three planes",
        CONTIGUOUS,
        part(1, lambda t: torch.cat([t, t[:, :1]], 1)),
        r"qkv\[1\] has shape.*2, num_kv_heads",
    ),
    Mistake(
        "separate given two", CONTIGUOUS, put(input_layout="SEPARATE_Q_K_V"), "qkv.*of 2", TypeError
    ),
    Mistake(
        "separate given a tensor", PACKED, put(input_layout="SEPARATE_Q_K_V"), "qkv", TypeError
    ),
    Mistake(
        "paged given a tensor", PACKED, put(input_layout="Q_PAGED_KV_NHD"), "qkv must", TypeError
    ),
    Mistake("paged ragged", CONTIGUOUS, put(input_layout="Q_PAGED_KV_NHD"), r"qkv\[1\] has shape"),
    Mistake("HND pages as NHD", PAGED, put(input_layout="Q_PAGED_KV_NHD"), "qkv.*another input_la"),
    Mistake("q of two dims", SEPARATE, part(0, lambda t: t[..., 0]), r"qkv\[0\] has shape"),
    Mistake("k of two dims", SEPARATE, part(1, lambda t: t[..., 0]), r"qkv\[1\] has shape"),
    Mistake("fewer tokens of v", SEPARATE, part(2, lambda t: t[:-1]), "qkv: v has shape"),
    Mistake("fewer heads of v", SEPARATE, part(2, lambda t: t[:, :1]), "qkv: v has shape"),
    Mistake("q no tensor", SEPARATE, part(0, lambda t: t.tolist), "qkv", TypeError),
    Mistake(
        "k in another dtype", SEPARATE, part(1, lambda t: t.bfloat16()), "qkv: k is", TypeError
    ),
    Mistake("v in another dtype", SEPARATE, part(2, lambda t: t.float()), "qkv: v is", TypeError),
    Mistake("float64", PACKED, change("qkv", lambda t: t.double()), "qkv=torch.float64", TypeError),
    Mistake("k of another head_dim", SEPARATE, part(1, lambda t: t[..., :32]), "head_dim 32 and q"),
    Mistake("three heads on two", SEPARATE, part(0, lambda t: t[:, :3]), "q has 3 heads and k 2"),
    Mistake("workspace no tensor", SEPARATE, put(workspace_buffer=None), "workspace_b", TypeError),
    Mistake(
        "workspace strided", SEPARATE, change("workspace_buffer", lambda t: t[::2]), "workspace_buf"
    ),
    Mistake(
        "workspace unaligned",
        SEPARATE,
        change("workspace_buffer", lambda t: t[1:]),
        "workspace_buf",
    ),
    Mistake("batch_size negative", SEPARATE, put(batch_size=-1), "batch_size=-1"),
    Mistake(
        "batch_size too small",
        SEPARATE,
        put(batch_size=3),
        r"seq_lens has shape.*\(3,\)",
    ),
    Mistake("batch_size no int", SEPARATE, put(batch_size=4.0), "batch_size", TypeError),
    Mistake(
        "seq_lens in int64",
        SEPARATE,
        change("seq_lens", lambda t: t.long()),
        "seq_lens is",
        TypeError,
    ),
    Mistake(
        "seq_lens of two dims", SEPARATE, change("seq_lens", lambda t: t[None]), "seq_lens has"
    ),
    Mistake("seq_lens negative", SEPARATE, entry("seq_lens", 1, -90), r"seq_lens\[1\] = -90"),
    Mistake("a length of another offset", SEPARATE, entry("seq_lens", 1, 89), r"\[1\] = 89.*agree"),
    Mistake("the same with pages", PAGED, entry("seq_lens", 1, 89), r"\[1\] = 89.*agree"),
    Mistake("q offsets missing", SEPARATE, put(cum_seq_lens_q=None), "cum_seq_lens_q", TypeError),
    Mistake(
        "q offsets too few",
        SEPARATE,
        change("cum_seq_lens_q", lambda t: t[:-1]),
        "cum_seq_lens_q has",
    ),
    Mistake(
        "q offsets decrease", SEPARATE, entry("cum_seq_lens_q", 2, 1), r"cum_seq_lens_q\[2\] = 1"
    ),
    Mistake(
        "q offsets negative", SEPARATE, entry("cum_seq_lens_q", 0, -1), r"cum_seq_lens_q\[0\] = -1"
    ),
    Mistake(
        "q offsets too large", SEPARATE, entry("cum_seq_lens_q", -1, 999), r"cum_seq_lens_q\[-1\]"
    ),
    Mistake(
        "kv offsets missing", SEPARATE, put(cum_seq_lens_kv=None), "cum_seq_lens_kv", TypeError
    ),
    Mistake(
        "kv offsets too large",
        SEPARATE,
        change("cum_seq_lens_kv", lambda t: t + 9),
        "cum_seq_lens_kv",
    ),
    Mistake(
        "packed keys elsewhere", PACKED, change("cum_seq_lens_kv", lambda t: t - 1), "PACKED_QKV"
    ),
    Mistake("max_q_len too small", SEPARATE, put(max_q_len=69), "max_q_len=69: request 3"),
    Mistake("max_kv_len too small", SEPARATE, put(max_kv_len=89), "max_kv_len=89: request 1"),
    Mistake("max_kv_len negative", SEPARATE, put(max_kv_len=-1), "max_kv_len=-1"),
    Mistake("pages without a table", PAGED, put(block_tables=None), "block_tables=None"),
    Mistake(
        "a table without pages",
        SEPARATE,
        put(block_tables=torch.zeros(4, 9, dtype=torch.int32)),
        "block_tables is given",
    ),
    Mistake(
        "table too short", PAGED, change("block_tables", lambda t: t[:, :5]), "block_tables has"
    ),
    Mistake(
        "table of fewer requests",
        PAGED,
        change("block_tables", lambda t: t[:3]),
        "block_tables has",
    ),
    Mistake(
        "table in int64",
        PAGED,
        change("block_tables", lambda t: t.long()),
        "block_tables is",
        TypeError,
    ),
    Mistake(
        "page beyond the pool",
        PAGED,
        entry("block_tables", (1, 0), 999),
        r"block_tables\[1\] holds 999",
    ),
    Mistake(
        "page negative", PAGED, entry("block_tables", (0, 1), -1), r"block_tables\[0\] holds -1"
    ),
    Mistake("bmm1 infinite", SEPARATE, put(bmm1_scale=math.inf), "bmm1_scale"),
    Mistake("bmm1 of two", SEPARATE, put(bmm1_scale=torch.ones(2)), "bmm1_scale has 2"),
    Mistake("bmm1 text", SEPARATE, put(bmm1_scale="one"), "bmm1_scale", TypeError),
    Mistake(
        "bmm1 negative with statistics", SEPARATE, put(bmm1_scale=-1.0), "bmm1_scale=-1.0 with save"
    ),
    Mistake("bmm2 NaN", SEPARATE, put(bmm2_scale=math.nan), "bmm2_scale"),
    Mistake("mask unknown", SEPARATE, put(mask_mode="full"), "mask_mode='full'"),
    Mistake("mask no str", SEPARATE, put(mask_mode=None), "mask_mode", TypeError),
    Mistake(
        "chunk no power of two",
        SEPARATE,
        put(mask_mode="chunked", chunked_attention_size=48),
        "chunked_attention_size=48",
    ),
    Mistake("chunk not given", SEPARATE, put(mask_mode="chunked"), "chunked_attention_size=0"),
    Mistake(
        "chunk negative", SEPARATE, put(chunked_attention_size=-4), "chunked_attention_size=-4"
    ),
    Mistake(
        "chunk of another mode", SEPARATE, put(chunked_attention_size=3), "chunked_attention_size=3"
    ),
    Mistake("window below -1", SEPARATE, put(window_left=-2), "window_left=-2"),
    Mistake(
        "position unknown", SEPARATE, put(pos_encoding_mode="rope"), "pos_encoding_mode='rope'"
    ),
    Mistake(
        "soft cap negative", SEPARATE, put(logits_soft_cap_scale=-3.0), "logits_soft_cap_scale=-3"
    ),
    Mistake("soft cap tiny", SEPARATE, put(logits_soft_cap_scale=1e-30), "logits_soft_cap_scale"),
    Mistake("factor negative", SEPARATE, put(**{FACTOR: -1.0}), f"{FACTOR}=-1.0"),
    Mistake("factor infinite", SEPARATE, put(**{FACTOR: math.inf}), FACTOR),
    Mistake("factor NaN", SEPARATE, put(**{FACTOR: math.nan}), FACTOR),
    Mistake("factor a bool", SEPARATE, put(**{FACTOR: True}), FACTOR, TypeError),
    Mistake("factor a tensor", SEPARATE, put(**{FACTOR: torch.ones(1)}), FACTOR, TypeError),
    Mistake(
        "statistics of skipped tiles", SEPARATE, put(**{FACTOR: 5.0}), f"{FACTOR}=5.0 with save"
    ),
    Mistake(
        "statistics no bool", SEPARATE, put(save_softmax_stats=2), "save_softmax_stats", TypeError
    ),
    Mistake(
        "sinks of half precision", SEPARATE, put(sinks=torch.zeros(4).half()), "sinks is", TypeError
    ),
    Mistake("sinks of fewer heads", SEPARATE, put(sinks=torch.zeros(3)), "sinks has shape"),
    Mistake("sinks of two tensors", SEPARATE, put(sinks=[torch.zeros(4)] * 2), "sinks holds 2"),
    Mistake("out of fewer rows", SEPARATE, change("out", lambda t: t[1:]), "out has shape"),
    Mistake("out in float64", SEPARATE, change("out", lambda t: t.double()), "out is", TypeError),
    Mistake("out and out_dtype", SEPARATE, put(out_dtype="bf16"), "out is.*out_dtype", TypeError),
    Mistake(
        "out_dtype e5m2",
        SEPARATE,
        put(out=None, out_dtype=torch.float8_e5m2),
        "out_dtype is",
        TypeError,
    ),
    Mistake("out_dtype unknown", SEPARATE, put(out=None, out_dtype="fp4"), "out_dtype='fp4'"),
    Mistake(
        "out is q",
        dataclasses.replace(SEPARATE, num_kv_heads=4),
        lambda a: a.update(out=a["qkv"][1][: a["out"].shape[0]]),
        "out.*shares memory|out has shape",
    ),
    Mistake("backend unknown", SEPARATE, put(backend="fa9"), "backend='fa9'"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_are_refused_by_name(mistake):
    inputs = build(mistake.case)
    out = inputs.arguments["out"]
    mistake.spoil(inputs.arguments)
    with pytest.raises(mistake.error, match=mistake.match):
        attention(**inputs.arguments)
    assert out.isnan().all()


@pytest.mark.parametrize("index", [1, 2], ids=["k", "v"])
def test_a_converted_output_on_keys_or_values(index):
    """It is written by a copy, after the kernel."""
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


def test_inputs_that_require_grad_are_refused():
    inputs = build(SEPARATE)
    q, k, v = inputs.arguments["qkv"]
    with pytest.raises(NotImplementedError, match="no gradients"):
        attention(**inputs.arguments | {"qkv": (q.clone().requires_grad_(), k, v)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_an_output_that_requires_grad_is_refused(dtype):
    """One that is converted into, too: autograd would record the copy, or refuse it too late."""
    inputs = build(dataclasses.replace(SEPARATE, out_dtype=dtype, brings_out=True))
    leaf = torch.full_like(inputs.arguments["out"].float(), 7.0).to(dtype).requires_grad_()
    for out in (leaf, leaf.view(leaf.shape)):
        with pytest.raises(NotImplementedError, match=r"^out requires grad"):
            attention(**inputs.arguments | {"out": out})
    assert bool((leaf.detach().float() == 7.0).all())


@pytest.mark.gpu
def test_lengths_on_the_host_cannot_be_captured():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
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
    """Nobody reads them on the host: they may not reach beyond what there is."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    inputs = build(dataclasses.replace(SEPARATE, stats=False), "cuda")
    inputs.arguments["seq_lens"] += 1 << 20
    inputs.arguments["cum_seq_lens_q"][-1] += 1 << 20
    out = attention(**inputs.arguments, backend=backend)
    torch.cuda.synchronize()
    assert out[SPARE : SPARE + 33].isfinite().all()
