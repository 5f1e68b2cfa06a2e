"""cudnn_batch_prefill_with_kv_cache takes cuDNN's forms of arguments."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from cudnn_calls import arguments, call, check, cumulated, make_case, rows_of
from fuzz import cudnn_problems, cudnn_trial
from fuzz.random_cases import Limits
from preflash._fmha import cudnn
from preflash._fmha.lengths import FmhaLengths
from preflash.testing import build, compare, poison, reference


def verify(inputs, **kwargs):
    """Makes the call and compares its result with the oracle's."""
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


def problem(seed, device="cpu", **changes):
    dtypes = (torch.float16, torch.bfloat16, *[torch.float32] * (device == "cpu"))
    drawn = cudnn_problems.draw(1, seed, Limits(100, 1e6, dtypes))
    return dataclasses.replace(drawn, call=dataclasses.replace(drawn.call, **changes))


def compute(drawn, target):
    """Compares output, LSE and all memory around them with the oracle's."""
    verdict = cudnn_trial.examine(drawn, backend=target.backend, device=target.device)
    assert verdict.failures == []


@pytest.mark.parametrize("seed", range(150))
def test_random_problems(target, seed):
    compute(problem(seed, target.device), target)


# cuDNN itself has no kernel for the last two.
@pytest.mark.parametrize(
    "change",
    [{"dims": (192, 128)}, {"dims": (256, 256)}, {"dtype": torch.float32}],
    ids=["192 and 128", "256", "float32"],
)
@pytest.mark.parametrize("backend", [None, "auto", "cudnn"])
def test_cudnn_is_auto(backend, change):
    inputs = build(make_case("empty", **change))
    verify(inputs, **arguments(inputs), backend=backend)


def test_rows_of_q_in_one_place():
    """The stride from token to token is 0."""
    inputs = build(make_case())
    inputs.q = inputs.q[:1].expand(inputs.q.shape[0], -1, -1)
    verify(inputs, **arguments(inputs, "tokens"))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=["meta", "f64", "bf16"]
)
def test_the_defaults_of_the_caller_reach_nothing(default, page_size):
    inputs = build(make_case("empty", page_size=page_size))
    kwargs = arguments(inputs)
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        out, lse = call(**kwargs)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert lse.dtype == torch.float32
    check(inputs, out, rows_of(inputs.case, lse))


def test_without_gradients():
    inputs = build(make_case())
    with torch.no_grad():
        verify(inputs, **arguments(inputs) | {"k_cache": inputs.k.clone().requires_grad_()})


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


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_outputs_on_inputs(name):
    """Results that are put in place after the kernels have read the inputs are refused too."""
    given = arguments(inputs := build(make_case()), units="tokens")
    memory = torch.zeros(1 << 17, dtype=torch.bfloat16)
    given[name] = memory[: given[name].numel()].view(given[name].shape).copy_(given[name])
    before = memory.clone()
    lse = memory.view(torch.float32)[: 4 * 70 * 6].view(4, 70, 6)
    with pytest.raises(ValueError, match=f"lse shares memory with {name}"):
        call(**given, lse=lse, backend="cpu")
    if name != "q":  # out may be q
        out = memory[: inputs.q.numel()].view(inputs.q.shape)
        reverse = {"batch_offsets_o": cumulated(inputs.case.qo_lens[::-1])[:-1].flip(0)}
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            call(**(given | reverse), out=out, backend="cpu")
    assert torch.equal(*(t.view(torch.int16) for t in (memory, before)))


INT = {"dtype": torch.int32}
LENS = ("actual_seq_lens_q", "actual_seq_lens_kv")
OFFSETS = [f"batch_offsets_{of}" for of in "qokv"]
REFUSED = {
    ValueError: [
        *((name, None, f"{name} is missing") for name in (*LENS, *OFFSETS)),
        ("batch_offsets_units", "bytes", "batch_offsets_units='bytes'"),
        ("lse_base", "log10", "lse_base='log10'"),
        ("backend", "cubin", "backend='cubin'"),
        ("q", torch.zeros(3, 128), r"q has shape \(3, 128\)"),
        ("k_cache", torch.zeros(3, 2, 4, 128), "k_cache has shape"),
        ("v_cache", torch.zeros(208, 3, 128, dtype=torch.bfloat16), r"v_cache \(208, 3"),
        ("k_cache", torch.zeros(208, 2, 64, dtype=torch.bfloat16), r"k_cache \(208, 2"),
        ("q", torch.zeros(113, 5, 128, dtype=torch.bfloat16), r"q has shape \(113, 5"),
        ("scale", math.nan, "scale"),
        ("max_token_per_sequence", -1, "max_token_per_sequence=-1"),
        ("max_token_per_sequence", 69, r"actual_seq_lens_q\[3\] = 70"),
        ("max_sequence_kv", 89, r"actual_seq_lens_kv\[2\] = 90"),
        ("actual_seq_lens_q", torch.tensor([5, -1, 1, 70]), r"seq_lens_q\[1\] = -1"),
        ("actual_seq_lens_kv", torch.ones(3, **INT), "has 3 elements"),
        ("actual_seq_lens_q", torch.ones(2, 2, **INT), "one-dimensional"),
        ("batch_offsets_q", torch.zeros(7, **INT), "has 7 elements"),
        ("block_tables", torch.zeros(4, 9, **INT), "k_cache has shape"),
        ("out", torch.zeros(3, 6, 128, dtype=torch.bfloat16), "out has shape"),
        ("lse", torch.zeros(4, 70, 5), "lse has shape"),
        ("lse", torch.zeros(4, 6, 70).transpose(1, 2), "lse has strides"),
        ("lse",
         lambda given: {"lse": given["out"].view(torch.float32).flatten()[:1680].view(4, 70, 6)},
         "lse shares memory with out"),
        ("q_scale", torch.ones(2), "q_scale has 2 elements"),
        ("k_scale", math.nan, "k_scale"),
        ("scale", torch.ones(2), "scale has 2 elements"),
        ("max_sequence_kv", -1, "max_sequence_kv=-1"),
        ("o_data_type", "fp4", "o_data_type='fp4'"),
        ("k_cache", torch.zeros(208, 2, 128, dtype=torch.bfloat16, device="meta"), "k_cache"),
        ("q", torch.zeros(113, 6, 256, dtype=torch.bfloat16)[..., ::2], "q has stride"),
        ("q", torch.zeros(113 * 768 + 1, dtype=torch.bfloat16)[1:].view(113, 6, 128),
         "q starts 2 bytes"),
        ("batch_offsets_q", torch.tensor([-768, 5 * 768, 42 * 768, 43 * 768]),
         r"batch_offsets_q\[0\]: request 0 would have the tokens \[-1, 4\); there are 113"),
        ("batch_offsets_k", cumulated((17, 37, 90)) * 256 + 999 * 256,
         r"batch_offsets_k\[0\]: request 0 would have the tokens \[999, 1016\)"),
        ("batch_offsets_v", torch.tensor([0, 17, 54, 150]) * 256,
         r"batch_offsets_v\[3\]: request 3 would have"),
        ("batch_offsets_o", torch.tensor([0, 5, 42, 44]) * 768,
         r"batch_offsets_o\[3\]: request 3 would have"),
        ("batch_offsets_stats", torch.tensor([0, 5, 42, 211]) * 6,
         r"batch_offsets_stats\[3\]: request 3 would have the tokens \[211, 281\)"),
        ("actual_seq_lens_kv", torch.tensor([17, 38, 90, 64]),
         r"batch_offsets_k\[1\]: request 1 has 38 tokens, and the next one begins 37 behind it"),
        ("actual_seq_lens_q", torch.tensor([5, 37, 2, 70]),
         r"batch_offsets_q\[2\]: request 2 has 2 tokens"),
        ("batch_offsets_q", torch.tensor([0, 5, 42, 43, 113]),
         r"batch_offsets_q\[1\] = 5: must be a multiple"),
        ("batch_offsets_o", torch.zeros(5, **INT), "batch_offsets_o: requests overlap in out"),
        ("batch_offsets_stats", torch.zeros(5, **INT),
         "batch_offsets_stats: requests overlap in lse"),
    ],
    TypeError: [
        ("backend", 3, "backend"),
        ("q", None, "q must be a torch.Tensor"),
        ("k_cache", torch.zeros(208, 2, 128), "k_cache=torch.float32"),
        ("scale", "large", "scale"),
        ("causal", None, "causal"),
        ("return_lse", 2, "return_lse"),
        ("is_cuda_graph_compatible", "yes", "is_cuda_graph_compatible"),
        ("actual_seq_lens_q", torch.ones(4), "torch.float32"),
        ("batch_offsets_v", torch.zeros(5), "batch_offsets_v is"),
        ("workspace_buffer", None, "workspace_buffer"),
        ("out", torch.zeros(113, 6, 128), "out"),
        ("lse", torch.zeros(4, 70, 6).double(), "lse is"),
        ("v_scale", "one", "v_scale"),
        ("max_token_per_sequence", 70.0, "max_token_per_sequence"),
        ("lse_base", None, "lse_base"),
        ("out", [1], "out must be"),
        ("lse", [1], "lse must be"),
        ("q", torch.zeros(113, 6, 128, **INT), "q=torch.int32"),
    ],
    NotImplementedError: [
        ("o_data_type", torch.float16, "o_data_type"),
        ("k_cache", lambda given: {"k_cache": given["k_cache"].clone().requires_grad_()},
         "forward only"),
    ],
}  # fmt: skip


def of_table(function):
    return "block_tables", lambda given: {"block_tables": function(given["block_tables"].clone())}


def of_pools(function):
    return "pools", lambda given: {name: function(given[name]) for name in ("k_cache", "v_cache")}


def entry(row, column, value):
    def changed(table):
        table[row, column] = value
        return table

    return of_table(changed)


REFUSED_PAGES = {
    ValueError: [
        (*of_table(lambda t: t[:, :5]), "block_tables has 5 pages of 16 keys"),
        (*of_table(lambda t: t[:3]), r"block_tables has shape \(3, 8\)"),
        (*of_table(lambda t: t[0]), "block_tables has shape"),
        (*entry(0, 1, 999), r"\[0\] holds 999.* \[0, 18\)"),
        (*entry(1, 2, -1), r"block_tables\[1\] holds -1"),
        (*of_pools(lambda t: t.transpose(1, 2)),
         r"k_cache \(18, 16, 2.*\[pages, num_kv_heads, page_size"),
        (*of_pools(lambda t: t[:, :, :0]), "pages of 0 tokens; must hold at least 1"),
        ("actual_seq_lens_kv", None, "actual_seq_lens_kv is missing"),
    ],
    TypeError: [(*of_table(lambda t: t.long()), "block_tables is torch.int64")],
    NotImplementedError: [("batch_offsets_k", torch.zeros(5, **INT), "batch_offsets_k")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "error", "name", "value", "message"),
    [
        pytest.param(page_size, error, *row, id=f"{row[0]} {page_size} {number}")
        for page_size, table in ((0, REFUSED), (16, REFUSED_PAGES))
        for error, rows in table.items()
        for number, row in enumerate(rows)
    ],
)
def test_refusals(page_size, error, name, value, message):
    """Refuses before anything is written."""
    inputs = build(make_case(page_size=page_size))
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    given = arguments(inputs) | {"out": out}
    with pytest.raises(error, match=message):
        call(**given | (value(given) if callable(value) else {name: value}))
    assert (out == 7.0).all()


def test_a_table_as_wide_as_the_lengths_need():
    """max_sequence_kv is a bound of lengths that the host knows."""
    inputs = build(make_case(page_size=16))
    kwargs = arguments(inputs) | {"max_sequence_kv": 4096}
    longest = max(inputs.case.kv_lens)
    pages = -(-longest // 16)
    table = kwargs["block_tables"]
    verify(inputs, **kwargs | {"block_tables": table[:, :pages].clone()})
    message = f"block_tables has {pages - 1} pages of 16 keys.* request 2 has {longest} keys"
    with pytest.raises(ValueError, match=message):
        call(**kwargs | {"block_tables": table[:, : pages - 1].clone()})


@pytest.mark.parametrize("units", ["elements", "tokens"])
def test_requests_may_share_keys_and_leave_gaps(units):
    """Offsets may be in any order, and lengths below what they leave."""
    case = dataclasses.replace(make_case(), qo_lens=(5, 37, 9), kv_lens=(40, 40, 40))
    inputs = build(case)
    kwargs = arguments(inputs, units)
    width = 1 if units == "tokens" else 256
    starts = torch.tensor([40, 0, 40, 99]) * width
    kwargs |= {"batch_offsets_k": starts, "batch_offsets_v": starts}
    out, lse = call(**kwargs)
    own = dataclasses.replace(inputs, k=torch.cat([inputs.k[n : n + 40] for n in (40, 0, 40)]))
    own.v = torch.cat([inputs.v[n : n + 40] for n in (40, 0, 40)])
    check(own, out, rows_of(case, lse))


def test_out_may_be_q_itself():
    inputs = build(make_case())
    expected = reference(inputs)
    out, lse = call(**arguments(inputs), out=inputs.q)
    assert out is inputs.q
    compare(out[: len(expected.out)], rows_of(inputs.case, lse), expected).check()


def test_the_environment_overrides(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "fa2")
    inputs = build(make_case())
    with pytest.raises(ValueError, match="backend='fa2' computes on CUDA tensors"):
        call(**arguments(inputs), backend="cudnn")
    monkeypatch.setenv("PREFLASH_BACKEND", "cudnn")
    with pytest.raises(ValueError, match="PREFLASH_BACKEND='cudnn'"):
        call(**arguments(inputs))


@pytest.fixture
def unread(monkeypatch):
    """Treats the CPU as a GPU, whose arrays the host does not read: no public call does."""
    monkeypatch.setattr(cudnn, "_GPU", ("cpu", "cuda"))
    monkeypatch.setattr(FmhaLengths, "on_host", False)


GRAPH = {"is_cuda_graph_compatible": True}


@pytest.mark.parametrize("seed", range(150))
def test_random_problems_of_arrays_that_the_host_does_not_read(unread, seed):
    compute(problem(seed, capturable=True), SimpleNamespace(device="cpu", backend="cpu"))


READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2"}


def operators(**arguments):
    with torch.autograd.profiler.profile() as profile:
        call(**arguments)
    return {event.name for event in profile.function_events}


def test_no_value_is_read(unread):
    inputs = build(make_case("odd"))
    kwargs = arguments(inputs, "tokens") | {"lse": torch.zeros(113, 6)}
    kwargs |= {"batch_offsets_stats": kwargs["batch_offsets_q"]}
    assert not READS & operators(**kwargs, **GRAPH)
    assert READS & operators(**kwargs)


def test_unread_values_are_checked_for_debugging(unread, monkeypatch):
    inputs = build(make_case())
    kwargs = arguments(inputs, "tokens") | GRAPH
    later = kwargs["batch_offsets_v"] + 1
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    verify(inputs, **kwargs)
    for changes, message in (
        ({"max_token_per_sequence": 69}, r"actual_seq_lens_q\[3\] = 70"),
        ({"batch_offsets_v": later}, "batch_offsets_v: requests must lie one after the other"),
        ({"batch_offsets_q": kwargs["batch_offsets_q"] + 9}, r"batch_offsets_q\[3\]: request 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**kwargs | changes)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_call_follows_its_arrays(page_size):
    inputs = build(make_case(page_size=page_size), device="cuda")
    kwargs = arguments(inputs, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(**kwargs, **GRAPH)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = call(**kwargs, **GRAPH)
    rows = sum(inputs.case.qo_lens)
    for qo_lens in ((5, 37, 1, 70), (3, 0, 1, 44)):
        kwargs["actual_seq_lens_q"].copy_(torch.tensor(qo_lens, dtype=torch.int32))
        graph.replay()
        expected, expected_lse = call(**kwargs)
        torch.testing.assert_close(out[:rows], expected[:rows])
        torch.testing.assert_close(lse, expected_lse)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="pass is_cuda_graph_compatible=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        call(**kwargs)
    with pytest.raises(ValueError, match=r"actual_seq_lens_q is on cpu; .*must be on the GPU"):
        call(**kwargs | {"actual_seq_lens_q": kwargs["actual_seq_lens_q"].cpu()}, **GRAPH)
    with pytest.raises(NotImplementedError, match="q_scale is on the GPU"):
        call(**kwargs, q_scale=torch.ones(1, device="cuda"), **GRAPH)
