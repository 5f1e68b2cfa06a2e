"""cudnn_batch_prefill_with_kv_cache: cuDNN's forms of arguments, on the kernels of this package."""

import dataclasses
import math

import pytest
import torch
from cudnn_calls import LENGTHS, arguments, call, check, cumulated, make_case, rows_of
from preflash._fmha import cudnn
from preflash._fmha.lengths import FmhaLengths
from preflash.testing import build, compare, poison, reference, runner


@pytest.mark.parametrize("page_size", [0, 1, 5, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_own_kernels(target, lengths, page_size, causal):
    inputs = build(make_case(lengths, page_size=page_size, causal=causal), device=target.device)
    out, lse = call(**arguments(inputs), backend=target.backend)
    check(inputs, out, rows_of(inputs.case, lse))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("units", ["elements", "tokens"])
@pytest.mark.parametrize("dims", [(192, 128), (64, 64), (72, 72)])
def test_own_kernels_take_any_head_dim_and_arrays(target, dims, units, where):
    inputs = build(make_case(dims=dims, dtype=torch.float16), device=target.device)
    device = target.device if where == "device" else "cpu"
    out, lse = call(**arguments(inputs, units, device), backend=target.backend, lse_base="ln")
    check(inputs, out, rows_of(inputs.case, lse) / math.log(2))


def scattered(inputs, gap=3):
    """The same requests `gap` rows apart, in another order of their numbers; poison between."""
    case, kwargs = inputs.case, arguments(inputs, "tokens")
    order = sorted(range(case.batch_size), key=lambda i: (i * 7) % 5)
    for lengths, names in (
        (case.qo_lens, [("batch_offsets_q", "q"), ("batch_offsets_o", None)]),
        (case.kv_lens, [("batch_offsets_k", "k_cache"), ("batch_offsets_v", "v_cache")]),
    ):
        for turn, (offsets_name, name) in enumerate(names):
            at, starts = 1 + turn * (name is not None), [0] * case.batch_size
            for i in order:
                starts[i], at = at, at + lengths[i] + gap
            if name is None:
                starts = kwargs["batch_offsets_q"].tolist()[: case.batch_size]
            else:
                old = kwargs[name]
                new = poison((at, *old.shape[1:]), old.dtype)
                begin = cumulated(lengths).tolist()
                for i in order:
                    new[starts[i] : starts[i] + lengths[i]] = old[begin[i] : begin[i + 1]]
                kwargs[name] = new
            kwargs[offsets_name] = torch.tensor(starts, dtype=torch.int64)
    return kwargs


@pytest.mark.parametrize("lengths", ["odd", "empty", "more_queries"])
def test_requests_anywhere_and_only_their_rows_written(lengths):
    inputs = build(make_case(lengths))
    kwargs = scattered(inputs)
    rows, heads = kwargs["q"].shape[:2]
    out = torch.full((rows, heads, 128), 7.0, dtype=torch.bfloat16)
    lse = torch.full((rows, heads), 7.0)
    stats = kwargs["batch_offsets_q"]
    given = call(**kwargs, out=out, lse=lse, batch_offsets_stats=stats)
    assert given[0] is out
    assert given[1] is lse
    own = [range(s, s + n) for s, n in zip(stats.tolist(), inputs.case.qo_lens, strict=True)]
    own = torch.tensor([row for rows_of_one in own for row in rows_of_one])
    check(inputs, out[own], lse[own])
    others = torch.ones(rows, dtype=torch.bool).index_fill(0, own, False)
    assert (out[others] == 7.0).all()
    assert (lse[others] == 7.0).all()


@pytest.mark.parametrize("out_dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_requests_of_8_bits_anywhere(out_dtype):
    case = dataclasses.replace(
        make_case(dtype=torch.float8_e4m3fn), num_qo_heads=4, head_dim=64, head_dim_vo=64,
        o_dtype=out_dtype,
    )  # fmt: skip
    inputs = build(case)
    kwargs = scattered(inputs)
    offsets = torch.tensor([3, 9, 50, 52])
    rows = torch.cat(
        [torch.arange(s, s + n) for s, n in zip(offsets.tolist(), case.qo_lens, strict=True)]
    )
    kwargs["q"] = torch.cat([inputs.q, poison((9, 4, 64), case.dtype)])
    kwargs["batch_offsets_q"] = cumulated(case.qo_lens)
    kwargs["batch_offsets_o"] = offsets
    out, lse = call(**kwargs, o_data_type=out_dtype, backend="cpu")
    assert out.dtype == out_dtype
    runner.compare(inputs, out.view(-1, 4, 64)[rows], rows_of(case, lse)).check()


def test_strided_tensors_and_padded_lse_in_place():
    inputs = build(make_case("empty"))
    kwargs = arguments(inputs, "tokens")
    wide = poison((inputs.q.shape[0], 9, 128), torch.bfloat16)
    wide[:, 1:7] = inputs.q
    kwargs["q"] = wide[:, 1:7]
    out = poison((inputs.q.shape[0], 8, 128), torch.bfloat16)[:, 2:]
    lse = torch.full((5, 7, 6), 7.0)
    result = call(**kwargs, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    check(inputs, out[: sum(inputs.case.qo_lens)], rows_of(inputs.case, lse))


def test_element_offsets_follow_the_strides():
    inputs = build(make_case())
    kwargs = arguments(inputs)
    wide = poison((inputs.q.shape[0], 9, 128), torch.bfloat16)
    wide[:, :6] = inputs.q
    kwargs["q"] = wide[:, :6]
    kwargs["batch_offsets_q"] = cumulated(inputs.case.qo_lens) * 9 * 128
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


def test_rows_of_q_in_one_place():
    """A stride of 0 from token to token."""
    inputs = build(make_case())
    inputs.q = inputs.q[:1].expand(inputs.q.shape[0], -1, -1)
    out, lse = call(**arguments(inputs, "tokens"))
    check(inputs, out, rows_of(inputs.case, lse))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lse_at_offsets_of_a_fresh_tensor(lengths):
    inputs = build(make_case(lengths))
    qo_lens = inputs.case.qo_lens
    stats = cumulated(qo_lens) * 6
    out, lse = call(**arguments(inputs), batch_offsets_stats=stats)
    rows = sum(qo_lens)
    assert lse.shape == (len(qo_lens), max(qo_lens), 6)
    check(inputs, out, lse.view(-1, 6)[:rows])
    assert (lse.view(-1, 6)[rows:] == -math.inf).all()


def test_the_seed_form_of_arrays():
    """[batch_size] offsets and [batch_size, 1, 1, 1] lengths."""
    inputs = build(make_case())
    kwargs = arguments(inputs)
    for name in list(kwargs):
        if name.startswith("batch_offsets") and isinstance(kwargs[name], torch.Tensor):
            kwargs[name] = kwargs[name][:-1]
        if name.startswith("actual_seq_lens"):
            kwargs[name] = kwargs[name].view(-1, 1, 1, 1)
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


def test_lengths_out_of_token_offsets():
    inputs = build(make_case("empty"))
    kwargs = arguments(inputs, "tokens")
    del kwargs["actual_seq_lens_q"], kwargs["actual_seq_lens_kv"]
    del kwargs["batch_offsets_o"], kwargs["batch_offsets_v"]
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


def test_one_request_needs_no_offsets():
    inputs = build(make_case("one"))
    kwargs = {k: v for k, v in arguments(inputs).items() if "offsets_" not in k or "units" in k}
    kwargs["q"] = inputs.q[:33]
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))


def test_scales():
    inputs = build(make_case())
    kwargs = arguments(inputs) | {"scale": 0.11 / 6.0}
    out, lse = call(**kwargs, q_scale=2.0, k_scale=torch.tensor(3.0))
    check(inputs, out, rows_of(inputs.case, lse))


def test_without_lse():
    inputs = build(make_case())
    expected, _ = call(**arguments(inputs))
    out, lse = call(**arguments(inputs) | {"return_lse": False})
    assert lse is None
    rows = sum(inputs.case.qo_lens)
    assert torch.equal(out[:rows], expected[:rows])
    written = torch.full((4, 70, 6), 7.0)
    _, lse = call(**arguments(inputs) | {"return_lse": False}, lse=written)
    assert lse is None
    check(inputs, out, rows_of(inputs.case, written))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
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
        empty = {"actual_seq_lens_q": torch.zeros(5, dtype=torch.int32, device="cpu")}
        _, nothing = call(**kwargs | empty | {"max_token_per_sequence": 0})
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert lse.dtype == nothing.dtype == torch.float32
    check(inputs, out, rows_of(inputs.case, lse))


def test_gradients_and_traces_are_refused():
    inputs = build(make_case())
    kwargs = arguments(inputs)
    wanted = kwargs | {"k_cache": inputs.k.clone().requires_grad_()}
    with pytest.raises(NotImplementedError, match="forward"):
        call(**wanted)
    with torch.no_grad():
        out, lse = call(**wanted)
    check(inputs, out, rows_of(inputs.case, lse))


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


def test_lse_inside_out():
    inputs = build(make_case())
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    lse = out.view(-1).view(torch.float32)[: 4 * 70 * 6].view(4, 70, 6)
    with pytest.raises(ValueError, match="lse shares memory with out"):
        call(**arguments(inputs), out=out, lse=lse)
    assert (out == 7.0).all()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_outputs_on_inputs(name):
    """Also where results are put in place after the kernels have read all of them."""
    given = arguments(inputs := build(make_case()), units="tokens")
    memory = torch.zeros(1 << 17, dtype=torch.bfloat16)
    given[name] = memory[: given[name].numel()].view(given[name].shape).copy_(given[name])
    before = memory.clone()
    lse = memory.view(torch.float32)[: 4 * 70 * 6].view(4, 70, 6)
    with pytest.raises(ValueError, match=f"lse shares memory with {name}"):
        call(**given, lse=lse, backend="cpu")
    if name != "q":  # which out may lie on
        out = memory[: inputs.q.numel()].view(inputs.q.shape)
        reverse = {"batch_offsets_o": cumulated(inputs.case.qo_lens[::-1])[:-1].flip(0)}
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            call(**(given | reverse), out=out, backend="cpu")
    assert torch.equal(*(t.view(torch.int16) for t in (memory, before)))


INT = {"dtype": torch.int32}
MISTAKES = {
    "no lengths": ({"actual_seq_lens_q": None}, ValueError, "actual_seq_lens_q is missing"),
    "no kv lengths": ({"actual_seq_lens_kv": None}, ValueError, "actual_seq_lens_kv is missing"),
    "no q offsets": ({"batch_offsets_q": None}, ValueError, "batch_offsets_q is missing"),
    "no o offsets": ({"batch_offsets_o": None}, ValueError, "batch_offsets_o is missing"),
    "no k offsets": ({"batch_offsets_k": None}, ValueError, "batch_offsets_k is missing"),
    "no v offsets": ({"batch_offsets_v": None}, ValueError, "batch_offsets_v is missing"),
    "units": ({"batch_offsets_units": "bytes"}, ValueError, "batch_offsets_units='bytes'"),
    "base": ({"lse_base": "log10"}, ValueError, "lse_base='log10'"),
    "backend": ({"backend": "cubin"}, ValueError, "backend='cubin'"),
    "backend type": ({"backend": 3}, TypeError, "backend"),
    "q dims": ({"q": torch.zeros(3, 128)}, ValueError, r"q has shape \(3, 128\)"),
    "q type": ({"q": None}, TypeError, "q must be a torch.Tensor"),
    "k paged": ({"k_cache": torch.zeros(3, 2, 4, 128)}, ValueError, "k_cache has shape"),
    "k dtype": ({"k_cache": torch.zeros(208, 2, 128)}, TypeError, "k_cache=torch.float32"),
    "v heads": (
        {"v_cache": torch.zeros(208, 3, 128, dtype=torch.bfloat16)}, ValueError, r"v_cache \(208, 3"
    ),
    "k dim": (
        {"k_cache": torch.zeros(208, 2, 64, dtype=torch.bfloat16)}, ValueError, r"k_cache \(208, 2"
    ),
    "heads": (
        {"q": torch.zeros(113, 5, 128, dtype=torch.bfloat16)}, ValueError, r"q has shape \(113, 5"
    ),
    "scale": ({"scale": math.nan}, ValueError, "scale"),
    "scale type": ({"scale": "large"}, TypeError, "scale"),
    "causal": ({"causal": None}, TypeError, "causal"),
    "return_lse": ({"return_lse": 2}, TypeError, "return_lse"),
    "graph": ({"is_cuda_graph_compatible": "yes"}, TypeError, "is_cuda_graph_compatible"),
    "longest": ({"max_token_per_sequence": -1}, ValueError, "max_token_per_sequence=-1"),
    "too long": ({"max_token_per_sequence": 69}, ValueError, r"actual_seq_lens_q\[3\] = 70"),
    "kv too long": ({"max_sequence_kv": 89}, ValueError, r"actual_seq_lens_kv\[2\] = 90"),
    "negative": (
        {"actual_seq_lens_q": torch.tensor([5, -1, 1, 70])}, ValueError, r"seq_lens_q\[1\] = -1"
    ),
    "count": ({"actual_seq_lens_kv": torch.ones(3, **INT)}, ValueError, "has 3 elements"),
    "float lengths": ({"actual_seq_lens_q": torch.ones(4)}, TypeError, "torch.float32"),
    "2-D lengths": ({"actual_seq_lens_q": torch.ones(2, 2, **INT)}, ValueError, "one-dimensional"),
    "offsets count": ({"batch_offsets_q": torch.zeros(7, **INT)}, ValueError, "has 7 elements"),
    "offsets dtype": ({"batch_offsets_v": torch.zeros(5)}, TypeError, "batch_offsets_v is"),
    "table": ({"block_tables": torch.zeros(4, 9, **INT)}, ValueError, "k_cache has shape"),
    "workspace": ({"workspace_buffer": None}, TypeError, "workspace_buffer"),
    "out shape": (
        {"out": torch.zeros(3, 6, 128, dtype=torch.bfloat16)}, ValueError, "out has shape"
    ),
    "out dtype": ({"out": torch.zeros(113, 6, 128)}, (TypeError, ValueError), "out"),
    "lse shape": ({"lse": torch.zeros(4, 70, 5)}, ValueError, "lse has shape"),
    "lse rows": ({"lse": torch.zeros(113, 6)}, ValueError, "lse has shape"),
    "lse dtype": ({"lse": torch.zeros(4, 70, 6).double()}, TypeError, "lse is"),
    "lse strides": ({"lse": torch.zeros(4, 6, 70).transpose(1, 2)}, ValueError, "lse has strides"),
    "o_data_type": ({"o_data_type": torch.float16}, NotImplementedError, "o_data_type"),
    "q_scale": ({"q_scale": torch.ones(2)}, ValueError, "q_scale has 2 elements"),
    "k_scale": ({"k_scale": math.nan}, ValueError, "k_scale"),
    "v_scale type": ({"v_scale": "one"}, (TypeError, NotImplementedError), "v_scale"),
    "scale of two": ({"scale": torch.ones(2)}, ValueError, "scale has 2 elements"),
    "longest type": ({"max_token_per_sequence": 70.0}, TypeError, "max_token_per_sequence"),
    "kv longest": ({"max_sequence_kv": -1}, ValueError, "max_sequence_kv=-1"),
    "base type": ({"lse_base": None}, TypeError, "lse_base"),
    "o_data_type name": ({"o_data_type": "fp4"}, ValueError, "o_data_type='fp4'"),
    "out type": ({"out": [1]}, TypeError, "out must be"),
    "lse type": ({"lse": [1]}, TypeError, "lse must be"),
    "offsets shape": ({"batch_offsets_q": torch.zeros(5, 2, **INT)}, ValueError, "one-dimensional"),
    "stats count": ({"batch_offsets_stats": torch.zeros(3, **INT)}, ValueError, "has 3 elements"),
    "stats dtype": ({"batch_offsets_stats": torch.zeros(5)}, TypeError, "batch_offsets_stats is"),
    "no memory": (
        {"k_cache": torch.zeros(208, 2, 128, dtype=torch.bfloat16, device="meta")}, ValueError,
        "k_cache",
    ),
    "integers": ({"q": torch.zeros(113, 6, 128, **INT)}, TypeError, "q=torch.int32"),
    "q columns": (
        {"q": torch.zeros(113, 6, 256, dtype=torch.bfloat16)[..., ::2]}, ValueError, "q has stride"
    ),
    "q address": (
        {"q": torch.zeros(113 * 768 + 1, dtype=torch.bfloat16)[1:].view(113, 6, 128)},
        (ValueError, NotImplementedError), "q starts 2 bytes",
    ),
    "q before the tensor": (
        {"batch_offsets_q": torch.tensor([-768, 5 * 768, 42 * 768, 43 * 768])}, ValueError,
        r"batch_offsets_q\[0\]: request 0 would have the tokens \[-1, 4\); there are 113",
    ),
    "k behind the tensor": (
        {"batch_offsets_k": cumulated((17, 37, 90)) * 256 + 999 * 256}, ValueError,
        r"batch_offsets_k\[0\]: request 0 would have the tokens \[999, 1016\)",
    ),
    "v behind the tensor": (
        {"batch_offsets_v": torch.tensor([0, 17, 54, 150]) * 256}, ValueError,
        r"batch_offsets_v\[3\]: request 3 would have",
    ),
    "o behind the tensor": (
        {"batch_offsets_o": torch.tensor([0, 5, 42, 44]) * 768}, ValueError,
        r"batch_offsets_o\[3\]: request 3 would have",
    ),
    "stats behind the tensor": (
        {"batch_offsets_stats": torch.tensor([0, 5, 42, 211]) * 6}, ValueError,
        r"batch_offsets_stats\[3\]: request 3 would have the tokens \[211, 281\)",
    ),
    "longer than its keys": (
        {"actual_seq_lens_kv": torch.tensor([17, 38, 90, 64])}, ValueError,
        r"batch_offsets_k\[1\]: request 1 has 38 tokens, and the next one begins 37 behind it",
    ),
    "longer than its rows": (
        {"actual_seq_lens_q": torch.tensor([5, 37, 2, 70])}, ValueError,
        r"batch_offsets_q\[2\]: request 2 has 2 tokens",
    ),
}  # fmt: skip
PAGE_MISTAKES = {
    "table width": (lambda table: table[:, :5], ValueError, "block_tables has 5 pages of 16 keys"),
    "table rows": (lambda table: table[:3], ValueError, r"block_tables has shape \(3, 8\)"),
    "table dims": (lambda table: table[0], ValueError, "block_tables has shape"),
    "table dtype": (lambda table: table.long(), TypeError, "block_tables is torch.int64"),
    "page beyond": (
        lambda table: table.clone().index_fill_(1, torch.tensor([1]), 999), ValueError,
        r"block_tables\[0\] holds 999; must be in \[0, 18\)",
    ),
    "page negative": (
        lambda table: table.clone().index_fill_(1, torch.tensor([2]), -1), ValueError,
        r"block_tables\[1\] holds -1",
    ),
}  # fmt: skip


def test_a_table_as_wide_as_the_lengths_need():
    """max_sequence_kv is a bound of lengths that the host knows."""
    inputs = build(make_case(page_size=16))
    kwargs = arguments(inputs) | {"max_sequence_kv": 4096}
    longest = max(inputs.case.kv_lens)
    pages = -(-longest // 16)
    table = kwargs["block_tables"]
    out, lse = call(**kwargs | {"block_tables": table[:, :pages].clone()})
    check(inputs, out, rows_of(inputs.case, lse))
    message = f"block_tables has {pages - 1} pages of 16 keys.* request 2 has {longest} keys"
    with pytest.raises(ValueError, match=message):
        call(**kwargs | {"block_tables": table[:, : pages - 1].clone()})


@pytest.mark.parametrize("mistake", PAGE_MISTAKES)
def test_refusals_of_pages(mistake):
    change, error, message = PAGE_MISTAKES[mistake]
    inputs = build(make_case(page_size=16))
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    kwargs = arguments(inputs) | {"out": out}
    with pytest.raises(error, match=message):
        call(**kwargs | {"block_tables": change(kwargs["block_tables"])})
    with pytest.raises(NotImplementedError, match="batch_offsets_k"):
        call(**kwargs | {"batch_offsets_k": cumulated(inputs.case.kv_lens)})
    pools = {name: kwargs[name].transpose(1, 2) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"k_cache \(18, 16, 2.*\[pages, num_kv_heads, page_size"):
        call(**kwargs | pools)
    with pytest.raises(ValueError, match="pages of 0 tokens; must hold at least 1"):
        call(**kwargs | {name: kwargs[name][:, :, :0] for name in pools})
    with pytest.raises(ValueError, match="actual_seq_lens_kv is missing"):
        call(**kwargs | {"actual_seq_lens_kv": None})
    assert (out == 7.0).all()


@pytest.mark.parametrize("units", ["elements", "tokens"])
def test_requests_may_share_keys_and_leave_gaps(units):
    """Offsets of batch_size + 1 in any order, and lengths below what they leave."""
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_refusals(mistake):
    """Whoever computes, and before anything is written."""
    change, error, message = MISTAKES[mistake]
    inputs = build(make_case())
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    kwargs = arguments(inputs) | {"out": out} | change
    with pytest.raises(error, match=message):
        call(**kwargs)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_offsets_q": [0, 5, 42, 43, 113]}, r"batch_offsets_q\[1\] = 5: must be a multiple"),
        ({"batch_offsets_q": [0, 768 * 999, 0, 0, 0]}, r"batch_offsets_q\[1\]: request 1 would"),
        ({"batch_offsets_k": [-256, 0, 0, 0, 0]}, r"batch_offsets_k\[0\]: request 0 would"),
        ({"batch_offsets_o": [0, 0, 0, 0, 0]}, "batch_offsets_o: requests overlap in out"),
        ({"batch_offsets_stats": [0, 0, 0, 0, 0]}, "batch_offsets_stats: requests overlap in lse"),
        ({"batch_offsets_stats": [0, 0, 6 * 280, 0, 0]}, r"batch_offsets_stats\[2\]: request 2"),
    ],
)
def test_offsets_that_the_host_can_read(change, message):
    inputs = build(make_case())
    out = torch.full((inputs.q.shape[0], 6, 128), 7.0, dtype=torch.bfloat16)
    change = {name: torch.tensor(value) for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        call(**arguments(inputs) | change, out=out)
    assert (out == 7.0).all()


def test_out_may_be_q_itself():
    inputs = build(make_case())
    expected = reference(inputs)
    out, lse = call(**arguments(inputs), out=inputs.q)
    assert out is inputs.q
    compare(out[: expected.out.shape[0]], rows_of(inputs.case, lse), expected).check()


@pytest.mark.parametrize("lse_base", ["log2", "ln"])
@pytest.mark.parametrize("units", ["elements", "tokens"])
@pytest.mark.parametrize("backend", [None, "auto", "cudnn"])
def test_cudnn_is_auto(backend, units, lse_base):
    inputs = build(make_case("empty", dims=(192, 128), dtype=torch.float16))
    out, lse = call(**arguments(inputs, units), lse_base=lse_base, backend=backend)
    factor = 1.0 if lse_base == "log2" else 1 / math.log(2)
    check(inputs, out, rows_of(inputs.case, lse) * factor)


def test_a_factor_of_v():
    inputs = build(make_case())
    plain, _ = call(**arguments(inputs))
    out, _ = call(**arguments(inputs), v_scale=2.0, backend="cudnn")
    rows = sum(inputs.case.qo_lens)
    assert torch.equal(out[:rows], plain[:rows] * 2)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"dims": (64, 64)}, {"dims": (256, 256)}], ids=str
)
def test_what_cudnn_itself_has_no_kernel_for(change):
    inputs = build(make_case(**change))
    out, lse = call(**arguments(inputs), backend="cudnn")
    check(inputs, out, rows_of(inputs.case, lse))


def test_the_environment_overrides(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "fa2")
    inputs = build(make_case())
    with pytest.raises(ValueError, match="backend='fa2' computes on CUDA tensors"):
        call(**arguments(inputs), backend="cudnn")
    monkeypatch.setenv("PREFLASH_BACKEND", "cudnn")
    with pytest.raises(ValueError, match="PREFLASH_BACKEND='cudnn'"):
        call(**arguments(inputs))


# --- is_cuda_graph_compatible ------------------------------------------------------


@pytest.fixture
def unread(monkeypatch):
    """Treats the CPU as a GPU whose arrays the host does not read."""
    monkeypatch.setattr(cudnn, "_GPU", ("cpu", "cuda"))
    monkeypatch.setattr(FmhaLengths, "on_host", False)


GRAPH = {"is_cuda_graph_compatible": True}


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_arrays_that_the_host_does_not_read(unread, lengths, page_size, causal):
    inputs = build(make_case(lengths, page_size=page_size, causal=causal))
    for units in ("elements", "tokens"):
        out, lse = call(**arguments(inputs, units), **GRAPH)
        check(inputs, out, rows_of(inputs.case, lse))
        assert (out[sum(inputs.case.qo_lens) :] == 0).all()


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("lengths", ["odd", "empty", "more_queries"])
def test_unread_requests_anywhere_in_q_and_out(unread, lengths, stats):
    inputs = build(make_case(lengths))
    kwargs = arguments(inputs, "tokens")
    moved = scattered(inputs)
    for name in ("q", "batch_offsets_q", "batch_offsets_o"):
        kwargs[name] = moved[name]
    rows, qo_lens = kwargs["q"].shape[0], inputs.case.qo_lens
    out = torch.full((rows, 6, 128), 7.0, dtype=torch.bfloat16)
    at, lse = kwargs["batch_offsets_o"], torch.full((len(qo_lens), max(qo_lens), 6), 7.0)
    if stats:
        kwargs["batch_offsets_stats"], lse = at, torch.full((rows, 6), 7.0)
    returned, returned_lse = call(**kwargs, out=out, lse=lse, **GRAPH)
    assert returned is out
    assert returned_lse is lse
    own = torch.cat([torch.arange(s, s + n) for s, n in zip(at.tolist(), qo_lens, strict=True)])
    check(inputs, out[own], lse[own] if stats else rows_of(inputs.case, lse))
    others = torch.ones(rows, dtype=torch.bool).index_fill(0, own, False)
    assert (out[others] == 7.0).all()
    assert not stats or (lse[others] == 7.0).all()


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
    out, lse = call(**kwargs)
    check(inputs, out, rows_of(inputs.case, lse))
    for change, message in (
        ({"max_token_per_sequence": 69}, r"actual_seq_lens_q\[3\] = 70"),
        ({"batch_offsets_v": later}, "batch_offsets_v: requests must lie one after the other"),
        ({"batch_offsets_q": kwargs["batch_offsets_q"] + 9}, r"batch_offsets_q\[3\]: request 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**kwargs | change)


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
