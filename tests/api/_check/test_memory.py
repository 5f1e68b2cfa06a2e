"""Kernels get addresses, so tensors without memory, of another dtype or shape, or that share memory
are refused by name."""

import itertools
import math

import preflash
import pytest
import torch
from changed_tensors import fake, freed, freed_view, meta, negative, resized
from planned_cases import PAGED_ARRAYS, check_run, plan_arguments, planned
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor
from wrapper_options import hints


def too_small_strided(t):
    wide = torch.cat([t, t], -1)
    view = wide[..., : t.shape[-1]]
    wide.untyped_storage().resize_(wide.nbytes - t.shape[-1] * t.itemsize - 1)
    return view


def nested(t, **options):
    return torch.nested.nested_tensor([t, t[:1]], **options)


# (spoil, a pattern of the message, error)
BAD = {
    "meta": (meta, "on (the device )?meta", ValueError),
    "fake": (fake, "FakeTensor", ValueError),
    "freed": (freed, "0 bytes and it needs", ValueError),
    "freed_view": (freed_view, "0 bytes and it needs", ValueError),
    "too_small": (lambda t: resized(t, t.nbytes - 1), "was it freed", ValueError),
    "too_small_strided": (too_small_strided, "was it freed", ValueError),
    "zero_tensor": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
        "ZeroTensor", ValueError),
    "wrapper_subclass": (lambda t: TwoTensor(t, t), "TwoTensor", ValueError),
    "negative": (negative, "negative view", ValueError),
    "sparse": (torch.Tensor.to_sparse, "sparse_coo", TypeError),
    "nested": (nested, "nested", TypeError),
    "jagged": (lambda t: nested(t, layout=torch.jagged), "nested", TypeError),
}  # fmt: skip
PAGED = Case("paged", (33, 5), (40, 90), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.PACKED)
RUN = Case("run", (33, 5), (40, 90), 4, 2, 64)


TOKENS = itertools.count(11)  # no two calls of the single function have the same shapes

# --- Calls, each with right arguments and the names of those that are spoilt ------


def plan_of(case, *names):
    def make(target):
        inputs = build(case, device=target.device, index_device="cpu")
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        return wrapper.plan, {**hints(inputs), **plan_arguments(inputs)}, names

    return make


def run_of_a_wrapper(target):
    inputs, wrapper = planned(RUN, target)
    lse, sinks = (torch.zeros(*shape, device=target.device) for shape in ((38, 4), (4,)))
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": torch.empty_like(inputs.q)}
    given |= {"lse": lse, "sinks": sinks}
    return wrapper.run, {**given, "return_lse": True}, given


def single(target):
    shapes = {"q": (4, 64), "k": (2, 64), "v": (2, 64)}
    tokens = next(TOKENS)
    given = {name: torch.ones(tokens, *shape).half() for name, shape in shapes.items()}
    given = {name: target.to(x) for name, x in {**given, "sinks": torch.zeros(4)}.items()}
    return preflash.single_prefill_with_kv_cache, {**given, "backend": target.backend}, given


def call_of(call, fixed, given):
    return lambda target: (call, {**fixed, **{n: target.to(x) for n, x in given.items()}}, given)


V, S, INT = torch.ones(3, 2, 8), torch.ones(3, 2), torch.int32
VS = {"v": V.clone(), "s": S.clone(), "v_other": V, "s_other": S}
BITS, INDPTR = torch.ones(16, dtype=torch.uint8), torch.tensor([0, 7, 16], dtype=INT)
ONE, ENDS = torch.zeros(1, dtype=INT), torch.tensor([0, 1], dtype=INT)
ROWS = dict.fromkeys("qkv", torch.ones(3, 2, 64).to(torch.float8_e4m3fn))
CACHE = {"append_key": V[:1], "append_value": V[:1], "paged_kv_cache": torch.zeros(2, 2, 4, 2, 8)}
TABLE = {"kv_indptr": ENDS, "kv_last_page_len": ONE + 1}
PLACES = {"batch_indices": ONE, "positions": ONE, "kv_indices": ONE, **TABLE}
HEADS = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 64}


def plan(name: str):
    return getattr(preflash, name)(torch.empty(1 << 20, dtype=torch.uint8)).plan


ON_ANY_DEVICE = {
    "run": run_of_a_wrapper,
    "new single": single,
    "paged plan": plan_of(PAGED, *PAGED_ARRAYS, "custom_mask", "seq_lens", "block_tables"),
    "ragged plan": plan_of(RAGGED, "kv_indptr", "packed_custom_mask", "seq_lens_q"),
    "merge_state": call_of(preflash.merge_state, {}, {"v_a": V, "s_a": S, "v_b": V, "s_b": S}),
    "in_place": call_of(preflash.merge_state_in_place, {}, {**VS, "mask": S[:, 0] > 0}),
    "merge_states": call_of(
        preflash.merge_states, {}, {"v": torch.ones(3, 2, 2, 8), "s": torch.ones(3, 2, 2)},
    ),
    "packbits": call_of(preflash.packbits, {}, {"x": BITS}),
    "segment_packbits": call_of(preflash.segment_packbits, {}, {"x": BITS, "indptr": INDPTR}),
    "workspace": call_of(
        preflash.BatchPrefillWithPagedKVCacheWrapper, {},
        {"float_workspace_buffer": torch.empty(64, 64, dtype=torch.uint8)},
    ),
}  # fmt: skip
ON_THE_CPU = {
    "single": call_of(
        preflash.single_prefill_with_kv_cache, ROWS,
        {f"scale_{name}": torch.ones(2) for name in "qkv"},
    ),
    "append": call_of(preflash.append_paged_kv_cache, CACHE, PLACES),
    "get_seq_lens": call_of(preflash.get_seq_lens, {"page_size": 4}, TABLE),
    "block sparse": call_of(
        plan("BlockSparseAttentionWrapper"), {"M": 16, "N": 16, "R": 16, "C": 16, **HEADS},
        {"indptr": ENDS, "indices": ONE},
    ),
    "block sizes": call_of(
        plan("VariableBlockSparseAttentionWrapper"), HEADS,
        {"block_mask_map": torch.ones(2, 1, 1).bool(), "block_row_sz": torch.full((2, 1), 3),
         "block_col_sz": torch.full((2, 1), 3)},
    ),
}  # fmt: skip
CALLS = {**ON_ANY_DEVICE, **ON_THE_CPU}
FORMS = {
    "dtype": (torch.Tensor.cfloat, "is torch.complex64", TypeError),
    "shape": (lambda t: t[None, None], "has shape", ValueError),
    "stride": (lambda t: torch.stack([t, t], -1)[..., 0], "has stride", ValueError),
}
OF_ANY_FORM = {("packbits", "dtype"), ("segment_packbits", "dtype")}
OF_ANY_FORM |= {("workspace", "dtype"), ("workspace", "shape")}
OF_ANY_FORM |= {(key, "stride") for key in CALLS if key not in ("in_place", "single")}
WITH_PLANS = ("run", "new single", "paged plan", "ragged plan")  # test_refusals.py has their forms
OF_ANY_FORM |= set(itertools.product(WITH_PLANS, FORMS))
OF_ANY_FORM |= {("paged plan", "jagged"), ("ragged plan", "jagged")}


@pytest.mark.parametrize(
    ("key", "kind"),
    [row for row in itertools.product(CALLS, {**BAD, **FORMS}) if row not in OF_ANY_FORM],
)
def test_calls(target, key, kind):
    """A tensor is refused in a first call and after a right one. A run of shapes that were seen
    before looks at addresses alone; only the first one asks how large a storage still is."""
    if key in ON_THE_CPU and target.device != "cpu":
        pytest.skip("a test of the CPU")
    spoil, why, error = {**BAD, **FORMS}[kind]
    if remembers := key in WITH_PLANS[:2]:
        why = f"({why}|has no memory behind it)"
    for name in ("v", "s") if (key, kind) == ("in_place", "stride") else CALLS[key](target)[2]:
        call, given, _ = CALLS[key](target)
        for seen in (False, True):
            if not (seen and remembers and kind.startswith("too_small")):
                wrong = {**given, name: spoil(given[name])}
                refused(rf"\b{name} .*{why}", call, error=error, **wrong)
            call(**given)


def merge_of(v):
    return lambda: preflash.merge_state(v, S, V, S)


def with_mask(mask):
    q, k = (torch.zeros(n, 1, 64) for n in (2, 5))
    return lambda: preflash.single_prefill_with_kv_cache(q, k, k, custom_mask=mask)


def packed(x, call=preflash.packbits):
    return lambda: call(x)


def inside(transform, call):
    """Calls with plain tensors inside of a transform, which makes tensors without memory there."""
    return lambda: transform(lambda t: (call(), t.sum())[1])(torch.ones(4))


def jvp(call):
    return lambda x: torch.func.jvp(call, (x,), (x,))


OTHERS = {
    "functionalized": (packed(BITS > 0, torch.func.functionalize(preflash.packbits)),
        ValueError, r"x has no memory.*torch\.func"),
    "quantized": (packed(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)),
        TypeError, r"x is torch\.quint8"),
    "nested mask": (with_mask(nested(torch.ones(2, 5) > 0)), TypeError,
        "custom_mask is a nested tensor"),
    "mkldnn": (merge_of(torch.ones(3, 2, 8).to_mkldnn()), TypeError, "v_a .*_mkldnn"),
    "uninitialized": (merge_of(UninitializedParameter(requires_grad=False)), ValueError,
        "v_a has no"),
    **{f"{name} inside of {transform.__name__}": (inside(transform, call), NotImplementedError,
        "torch makes tensors without memory here")
        for transform in (torch.func.grad, jvp)
        for name, call in (("packbits", packed(BITS)), ("merge", merge_of(V)))},
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), OTHERS.values(), ids=OTHERS)
def test_other_refusals(call, error, says):
    refused(says, call, error=error)


def test_views_have_memory(target):
    for view in (
        torch.ones(6, 4)[:, 1:3],
        torch.ones(6, 4).t(),
        torch.ones(1, 4).expand(5, 4),
        torch.ones(6, 4)[5:, 3:],
        torch.ones(6, 4)[6:],
        torch.nn.Parameter(torch.ones(3, 2), requires_grad=False),
        torch.empty_strided((0, 3), (1, 1000)),
    ):
        s = target.to(view)
        v = torch.full((*s.shape, 8), 3.0, device=target.device)
        merged_v, merged_s = preflash.merge_state(v, s, v, s)
        torch.testing.assert_close(merged_v, v, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(merged_s, s + 1, rtol=1e-6, atol=1e-6)


def test_a_plan_and_a_size_by_values_cannot_be_fake(target):
    """test_forward_only.py has the calls that can."""
    inputs, wrapper = planned(RUN, target)
    with FakeTensorMode(allow_non_fake_inputs=True):
        refused("memory", runner.plan, wrapper, inputs)
        with pytest.raises(DynamicOutputShapeException):
            preflash.segment_packbits(target.to(BITS), INDPTR)
    check_run(inputs, wrapper)


# --- merge_state_in_place() on memory that its arguments share ----------------


def states(target, tokens=7, heads=3, dim=40) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"v": (tokens, heads, dim), "s": (tokens, heads)}
    return {
        name + other: target.to(torch.randn(shape, generator=generator))
        for other in ("", "_other")
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("same", ["vs", "v", "s", "transposed"])
def test_merge_in_place_with_itself(target, same):
    """A view that is not contiguous is copied before anything is written."""
    given = states(target, tokens=37, heads=37, dim=264)
    given["s"][3] = -math.inf
    for name in "vs":
        if same == "transposed":
            given[f"{name}_other"] = given[name].transpose(0, 1)
        elif name in same:
            given[f"{name}_other"] = given[name]
    expected = preflash.merge_state(*given.values())
    preflash.merge_state_in_place(**given)
    assert all(map(torch.equal, (given["v"], given["s"]), expected))


def one_row_apart(t):
    wide = torch.cat([t, t])
    return wide[: t.shape[0]], wide[1 : t.shape[0] + 1]


def test_merge_in_place_overlaps(target):
    given = states(target)
    v, s = given["v"], given["s"]
    wide = torch.zeros(v.numel() + s.numel() - 1, device=v.device)
    flat_v, bytes_s, bytes_v = v.view(-1), s.view(torch.uint8).view(-1), v.view(torch.uint8)
    cases = {
        ("v", "v_other"): one_row_apart(v),
        ("s", "s_other"): one_row_apart(s),
        ("v", "s"): (v, flat_v[: s.numel()].view(s.shape)),
        ("v", "s_other"): (v, flat_v[-s.numel() :].view(s.shape)),
        ("s", "mask"): (s, bytes_s[-7:]),
        ("v", "mask"): (v, bytes_v.view(-1)[:7]),
        ("s", "v_other"): (wide[: s.numel()].view(s.shape), wide[s.numel() - 1 :].view(v.shape)),
    }
    for names, changed in cases.items():
        arguments = {**given, **dict(zip(names, changed, strict=True))}
        before = {key: value.clone() for key, value in arguments.items()}
        says = "^{} shares memory with {}".format(*names)
        refused(says, preflash.merge_state_in_place, **arguments)
        assert all(torch.equal(arguments[key], value) for key, value in before.items())


def test_merge_in_place_of_neighbours(target):
    given = states(target)
    v, s = (torch.cat([given[name], given[f"{name}_other"]]) for name in "vs")
    expected = preflash.merge_state(*given.values())
    preflash.merge_state_in_place(v[:7], s[:7], v[7:], s[7:])
    for x, name, merged in ((v, "v_other", expected[0]), (s, "s_other", expected[1])):
        assert torch.equal(x, torch.cat([merged, given[name]]))
    empty = v[3:3], s[3:3]
    preflash.merge_state_in_place(*empty, *empty)


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [("sinks", 8, torch.float16)]
    + [(f"scale_{name}", n, torch.float8_e4m3fn) for name, n in (("q", 8), ("k", 4), ("v", 4))],
)
def test_out_on_the_last_factor_of_the_heads(name, count, dtype):
    """The output may begin where the factors end, and no earlier."""
    case = Case("factors", (3,), (5,), 8, 4, 64, dtype=dtype, o_dtype=torch.float16)
    wrapper = runner.planned(inputs := build(case), backend="cpu")
    memory = torch.ones(64 + inputs.q.numel(), dtype=torch.float16)
    of_heads = memory[32 - 2 * count : 32].view(torch.float32)

    def run(begin: int):
        out = memory[begin:][: inputs.q.numel()].view(inputs.q.shape)
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out, **{name: of_heads})

    run(32)
    refused(f"out shares memory with {name}", run, 24)
