"""cudnn_batch_prefill_with_kv_cache takes cuDNN's forms of arguments."""

import dataclasses
import math

import pytest
import torch
from changed_tensors import entry, misaligned
from cudnn_calls import arguments, call, check, cumulated, make_case, rows_of
from graph_replays import replayed
from planned_cases import mistakes, spoil
from preflash.testing import build, poison
from refusals import refused


def verify(inputs, **kwargs):
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


@pytest.mark.parametrize("backend", [None, "auto", "cudnn"])
def test_cudnn_is_auto(backend):
    """cuDNN itself has no kernel for float32."""
    inputs = build(make_case("empty", dtype=torch.float32))
    verify(inputs, **arguments(inputs), backend=backend)


def test_forms_of_q():
    """The stride from token to token may be 0, and out may be q itself."""
    inputs = build(make_case())
    given, inputs.q = arguments(inputs), inputs.q.clone()
    verify(inputs, **given, out=given["q"])
    inputs.q = inputs.q[:1].expand(inputs.q.shape[0], -1, -1)
    verify(inputs, **arguments(inputs, "tokens"))


def test_requests_may_share_keys_and_leave_gaps():
    """Offsets may be in any order, and lengths below what they leave."""
    inputs = build(dataclasses.replace(make_case(), qo_lens=(5, 37, 9), kv_lens=(40, 40, 40)))
    starts = (40, 40, 0)
    at = torch.tensor([*starts, 99]) * 256
    given = arguments(inputs) | {"batch_offsets_k": at, "batch_offsets_v": at}
    inputs.k, inputs.v = (torch.cat([t[n : n + 40] for n in starts]) for t in (inputs.k, inputs.v))
    verify(inputs, **given)


@pytest.mark.parametrize(("rows", "batch_size"), [(3, 0), (0, 1)])
def test_nothing_to_compute(rows, batch_size):
    q, kv = torch.randn(rows, 6, 128).half(), torch.randn(4, 2, 128).half()
    lens, given = torch.zeros(batch_size).int(), poison((batch_size, 2, 6), torch.float32, "cpu")
    out, _ = call(
        q, kv, kv, 0.1, torch.empty(1024, dtype=torch.uint8), max_token_per_sequence=2,
        max_sequence_kv=4, actual_seq_lens_q=lens, actual_seq_lens_kv=lens + 4, causal=True,
        return_lse=True, lse=given,
    )  # fmt: skip
    assert out.shape == q.shape
    assert (given == -math.inf).all()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "workspace_buffer"])
def test_outputs_on_other_memory(name):
    """Results that are put in place after the kernels have read the inputs are refused too."""
    inputs = build(make_case())
    given = arguments(inputs, "tokens") | {"out": torch.zeros_like(inputs.q), "backend": "cpu"}
    given["workspace_buffer"] = given["workspace_buffer"][: 1 << 16]
    memory = torch.zeros(1 << 17, dtype=torch.bfloat16)
    given[name] = memory[: given[name].numel()].view(given[name].shape).copy_(given[name])
    before = memory.clone()
    with pytest.raises(ValueError, match=f"lse shares memory with {name}"):
        call(**given, lse=memory.view(torch.float32)[: 4 * 70 * 6].view(4, 70, 6))
    if name not in ("q", "out"):  # out may be q
        given["out"] = memory[: inputs.q.numel()].view(inputs.q.shape)
        given["batch_offsets_o"] = cumulated(inputs.case.qo_lens[::-1])[:-1].flip(0)
        refused(f"out shares memory with {name}", call, **given)
    assert torch.equal(memory.view(torch.int16), before.view(torch.int16))


INT, BF16 = {"dtype": torch.int32}, {"dtype": torch.bfloat16}
LENS = ("actual_seq_lens_q", "actual_seq_lens_kv")
OFFSETS = [f"batch_offsets_{of}" for of in "qokv"]


# Rows of mistakes() for keys [tokens, heads, head_dim].
REFUSED = [
    *((name, ValueError, [None, f"{name} is missing"]) for name in (*LENS, *OFFSETS)),
    ("q", ValueError, [torch.zeros(3, 128), r"q has shape \(3, 128\)"],
     [torch.zeros(113, 5, 128, **BF16), r"q has shape \(113, 5"],
     [torch.zeros(113, 6, 256, **BF16)[..., ::2], "q has stride"],
     [misaligned, "q starts 2 bytes"]),
    ("q", TypeError, [None, "q must be a torch.Tensor"],
     [torch.zeros(113, 6, 128, **INT), "q=torch.int32"]),
    ("k_cache", ValueError, [torch.zeros(3, 2, 4, 128), "k_cache has shape"],
     [torch.zeros(208, 2, 64, **BF16), r"k_cache \(208, 2"],
     lambda t: torch.empty_like(t, device="meta")),
    ("k_cache", TypeError, [torch.zeros(208, 2, 128), "k_cache=torch.float32"]),
    ("k_cache", NotImplementedError, [lambda t: t.clone().requires_grad_(), "forward only"]),
    ("v_cache", ValueError, [torch.zeros(208, 3, 128, **BF16), r"v_cache \(208, 3"]),
    ("workspace_buffer", TypeError, None),
    ("scale", ValueError, math.nan, [torch.ones(2), "scale has 2 elements"]),
    ("scale", TypeError, "large"),
    ("q_scale", ValueError, [torch.ones(2), "q_scale has 2 elements"]),
    ("k_scale", ValueError, math.nan),
    ("v_scale", TypeError, "one"),
    ("max_token_per_sequence", ValueError, [-1, "max_token_per_sequence=-1"],
     [69, r"actual_seq_lens_q\[3\] = 70"]),
    ("max_token_per_sequence", TypeError, 70.0),
    ("max_sequence_kv", ValueError, [-1, "max_sequence_kv=-1"],
     [89, r"actual_seq_lens_kv\[2\] = 90"]),
    ("actual_seq_lens_q", ValueError,
     [torch.tensor([5, -1, 1, 70]), r"seq_lens_q\[1\] = -1"],
     [torch.ones(2, 2, **INT), "one-dimensional"],
     [torch.tensor([5, 37, 2, 70]), r"batch_offsets_q\[2\]: request 2 has 2 tokens"]),
    ("actual_seq_lens_q", TypeError, [torch.ones(4), "torch.float32"]),
    ("actual_seq_lens_kv", ValueError, [torch.ones(3, **INT), "has 3 elements"],
     [torch.tensor([17, 38, 90, 64]),
      r"batch_offsets_k\[1\]: request 1 has 38 tokens, and the next one begins 37 behind it"]),
    ("batch_offsets_q", ValueError, [torch.zeros(7, **INT), "has 7 elements"],
     [torch.tensor([-768, 5 * 768, 42 * 768, 43 * 768]),
      r"batch_offsets_q\[0\]: request 0 would have the tokens \[-1, 4\); there are 113"],
     [torch.tensor([0, 5, 42, 43, 113]), r"batch_offsets_q\[1\] = 5: must be a multiple"]),
    ("batch_offsets_k", ValueError, [cumulated((17, 37, 90)) * 256 + 999 * 256,
     r"batch_offsets_k\[0\]: request 0 would have the tokens \[999, 1016\)"]),
    ("batch_offsets_v", ValueError, [torch.tensor([0, 17, 54, 150]) * 256,
     r"batch_offsets_v\[3\]: request 3 would have"]),
    ("batch_offsets_v", TypeError, [torch.zeros(5), "batch_offsets_v is"]),
    ("batch_offsets_o", ValueError, [torch.tensor([0, 5, 42, 44]) * 768,
     r"batch_offsets_o\[3\]: request 3 would have"],
     [torch.zeros(5, **INT), "batch_offsets_o: requests overlap in out"]),
    ("batch_offsets_stats", ValueError, [torch.tensor([0, 5, 42, 211]) * 6,
     r"batch_offsets_stats\[3\]: request 3 would have the tokens \[211, 281\)"],
     [torch.zeros(5, **INT), "batch_offsets_stats: requests overlap in lse"]),
    ("batch_offsets_units", ValueError, ["bytes", "batch_offsets_units='bytes'"]),
    ("block_tables", ValueError, [torch.zeros(4, 9, **INT), "k_cache has shape"]),
    ("out", ValueError, [torch.zeros(3, 6, 128, **BF16), "out has shape"]),
    ("out", TypeError, torch.zeros(113, 6, 128), [[1], "out must be"]),
    ("lse", ValueError, [torch.zeros(4, 70, 5), "lse has shape"],
     [torch.zeros(4, 6, 70).transpose(1, 2), "lse has strides"]),
    ("lse", TypeError, [torch.zeros(4, 70, 6).double(), "lse is"], [[1], "lse must be"]),
    ("lse_base", ValueError, ["log10", "lse_base='log10'"]),
    ("lse_base", TypeError, None),
    ("o_data_type", ValueError, ["fp4", "o_data_type='fp4'"]),
    ("o_data_type", NotImplementedError, torch.float16),
    ("causal", TypeError, None),
    ("return_lse", TypeError, 2),
    ("is_cuda_graph_compatible", TypeError, "yes"),
    ("backend", ValueError, ["cubin", "backend='cubin'"]),
    ("backend", TypeError, 3),
]  # fmt: skip
# A name of two arguments changes both alike.
REFUSED_PAGES = [
    ("block_tables", ValueError, [lambda t: t[:, :5], "block_tables has 5 pages of 16 keys"],
     [lambda t: t[:3], r"block_tables has shape \(3, 8\)"],
     [lambda t: t[0], "block_tables has shape"],
     [entry((0, 1), 999), r"\[0\] holds 999.* \[0, 18\)"],
     [entry((1, 2), -1), r"block_tables\[1\] holds -1"]),
    ("block_tables", TypeError, [torch.Tensor.long, "block_tables is torch.int64"]),
    ("k_cache v_cache", ValueError,
     [lambda t: t.transpose(1, 2), r"k_cache \(18, 16, 2.*\[pages, num_kv_heads, page_size"],
     [lambda t: t[:, :, :0], "pages of 0 tokens; must hold at least 1"]),
    ("actual_seq_lens_kv", ValueError, [None, "actual_seq_lens_kv is missing"]),
    ("batch_offsets_k", NotImplementedError, torch.zeros(5, **INT)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value", "error", "says", "page_size"),
    [
        pytest.param(*row.values, page_size, id=f"{row.id} {page_size}")
        for page_size, table in ((0, REFUSED), (16, REFUSED_PAGES))
        for row in mistakes(*table)
    ],
)
def test_refusals(page_size, argument, value, error, says):
    inputs = build(make_case(page_size=page_size))
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    given = arguments(inputs) | {"out": out}
    for name in argument.split():
        spoil(given, name, value)
    refused(says, call, error=error, **given)
    assert (out == 7.0).all()


def test_a_table_as_wide_as_the_lengths_need():
    """max_sequence_kv is a bound of lengths that the host knows."""
    inputs = build(make_case(page_size=16))
    kwargs = arguments(inputs) | {"max_sequence_kv": 4096}
    table = kwargs["block_tables"]
    verify(inputs, **kwargs | {"block_tables": table[:, :6].clone()})
    with pytest.raises(ValueError, match=r"has 5 pages of 16 keys.* request 2 has 90 keys"):
        call(**kwargs | {"block_tables": table[:, :5].clone()})


def test_the_environment_overrides(monkeypatch):
    given = arguments(build(make_case()))
    for name, message in (
        ("fa2", "backend='fa2' computes on CUDA tensors"), ("cudnn", "PREFLASH_BACKEND='cudnn'")
    ):  # fmt: skip
        monkeypatch.setenv("PREFLASH_BACKEND", name)
        refused(message, call, **given, backend="cudnn")


GRAPH = {"is_cuda_graph_compatible": True}


@pytest.mark.gpu
def test_values_on_the_gpu_are_checked_for_debugging(monkeypatch):
    """Otherwise the host does not read them."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    inputs = build(make_case(), device="cuda")
    kwargs = arguments(inputs, "tokens", "cuda") | GRAPH
    verify(inputs, **kwargs)
    for name, change, message in (
        ("max_token_per_sequence", -1, r"actual_seq_lens_q\[3\] = 70"),
        ("batch_offsets_v", 1, "batch_offsets_v: requests must lie one after the other"),
        ("batch_offsets_q", 9, r"batch_offsets_q\[3\]: request 3"),
    ):
        refused(message, call, **kwargs | {name: kwargs[name] + change})


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_call_follows_its_arrays(page_size):
    inputs = build(make_case(page_size=page_size), device="cuda")
    kwargs = arguments(inputs, device="cuda")
    graph, (out, lse) = replayed(lambda: call(**kwargs, **GRAPH))
    rows = sum(inputs.case.qo_lens)
    for qo_lens in ((5, 37, 1, 70), (3, 0, 1, 44)):
        kwargs["actual_seq_lens_q"].copy_(torch.tensor(qo_lens, dtype=torch.int32))
        graph.replay()
        expected, expected_lse = call(**kwargs)
        torch.testing.assert_close(out[:rows], expected[:rows])
        torch.testing.assert_close(lse, expected_lse)
    torch.cuda.synchronize()
    raises = pytest.raises(RuntimeError, match="pass is_cuda_graph_compatible=True")
    with raises, torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(**kwargs)
    for name, value, error, match in (
        ("actual_seq_lens_q", kwargs["actual_seq_lens_q"].cpu(), ValueError,
         r"actual_seq_lens_q is on cpu; .*must be on the GPU"),
        ("q_scale", torch.ones(1, device="cuda"), NotImplementedError, "q_scale is on the GPU"),
    ):  # fmt: skip
        refused(match, call, error=error, **kwargs | {name: value}, **GRAPH)
