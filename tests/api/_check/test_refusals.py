"""Bad input is refused by name before anything runs, and the wrapper stays as it was.

Every entry is one mistake: where it is made, what it is, and the name that the message must hold.
After the refusal the wrapper must still compute the right result with the plan it had, and output
buffers that were handed in must be untouched.
"""

import dataclasses
import math
from collections.abc import Callable

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, MaskKind, build, poison, reference, runner

REFUSED = (ValueError, TypeError)
EITHER = (ValueError, TypeError, NotImplementedError)

PAGED = Case("paged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`spoil` changes the named arguments; `match` is a pattern for the message."""

    id: str
    spoil: Callable[[dict], object]
    match: str
    error: type | tuple = REFUSED


def put(name: str, value) -> Callable[[dict], object]:
    return lambda arguments: arguments.update({name: value})


def change(name: str, function) -> Callable[[dict], object]:
    return lambda arguments: arguments.update({name: function(arguments[name])})


def entry(name: str, index: int, value: int) -> Callable[[dict], object]:
    def spoil(arguments: dict) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][index] = value

    return spoil


def longer(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t[-1:]])


def mask_of(size: int, dtype=torch.bool, name: str = "custom_mask"):
    def spoil(arguments: dict) -> None:
        arguments[name] = torch.ones(size, dtype=dtype, device=arguments["qo_indptr"].device)

    return spoil


MASK_SIZE = sum(a * b for a, b in zip(PAGED.qo_lens, PAGED.kv_lens, strict=True))
PACKED_SIZE = sum(-(-a * b // 8) for a, b in zip(PAGED.qo_lens, PAGED.kv_lens, strict=True))

COMMON_PLAN = [
    Mistake("qo_indptr_none", put("qo_indptr", None), "qo_indptr"),
    Mistake("qo_indptr_int64", change("qo_indptr", torch.Tensor.long), "qo_indptr"),
    Mistake("qo_indptr_float", change("qo_indptr", torch.Tensor.float), "qo_indptr"),
    Mistake("qo_indptr_2d", change("qo_indptr", lambda t: t[None]), "qo_indptr"),
    Mistake("qo_indptr_empty", change("qo_indptr", lambda t: t[:0]), "qo_indptr"),
    Mistake("qo_indptr_decreasing", entry("qo_indptr", 2, 20), "qo_indptr"),
    Mistake("qo_indptr_negative", entry("qo_indptr", 0, -1), "qo_indptr"),
    Mistake("qo_indptr_longer", change("qo_indptr", longer), "qo_indptr|kv_indptr"),
    Mistake("zero_qo_heads", put("num_qo_heads", 0), "num_qo_heads"),
    Mistake("heads_not_divisible", put("num_qo_heads", 5), "num_qo_heads"),
    Mistake("negative_kv_heads", put("num_kv_heads", -2), "num_kv_heads"),
    Mistake("zero_kv_heads", put("num_kv_heads", 0), "num_kv_heads"),
    Mistake("head_dim_zero", put("head_dim", 0), "head_dim"),
    Mistake("head_dim_negative", put("head_dim", -64), "head_dim"),
    Mistake("head_dim_100", put("head_dim", 100), "head_dim", EITHER),
    Mistake("head_dim_520", put("head_dim", 520), "head_dim", EITHER),
    Mistake("head_dim_vo_odd", put("head_dim_vo", 63), "head_dim", EITHER),
    Mistake("head_dim_a_float", put("head_dim", 64.5), "head_dim"),
    Mistake("head_dim_qk_a_tensor", put("head_dim_qk", torch.ones(2)), "head_dim_qk"),
    Mistake("window_left_minus_2", put("window_left", -2), "window_left"),
    Mistake("soft_cap_vanishes", put("logits_soft_cap", 1e-50), "logits_soft_cap"),
    Mistake("soft_cap_past_float32", put("logits_soft_cap", 1e39), "logits_soft_cap"),
    Mistake("sm_scale_past_float32", put("sm_scale", 1e39), "sm_scale"),
    Mistake("soft_cap_nan", put("logits_soft_cap", math.nan), "logits_soft_cap"),
    Mistake("sm_scale_text", put("sm_scale", "big"), "sm_scale"),
    Mistake("pos_encoding_unknown", put("pos_encoding_mode", "SINUS"), "pos_encoding_mode"),
    Mistake("rope_scale_alone", put("rope_scale", 2.0), "rope_scale"),
    Mistake("rope_theta_alone", put("rope_theta", 5e5), "rope_theta"),
    Mistake("rope_scale_zero", put("rope_scale", 0.0), "rope_scale"),
    Mistake("rope_theta_negative", put("rope_theta", -1e4), "rope_theta"),
    Mistake("rope_theta_infinite", put("rope_theta", math.inf), "rope_theta"),
    Mistake("rope_scale_nan", put("rope_scale", math.nan), "rope_scale"),
    Mistake("rope_theta_text", put("rope_theta", "1e4"), "rope_theta"),
    Mistake("rope_scale_bool", put("rope_scale", True), "rope_scale"),
    Mistake("q_int8", put("q_data_type", torch.int8), "q_data_type"),
    Mistake("q_float64", put("q_data_type", torch.float64), "q_data_type", EITHER),
    Mistake("q_unknown_name", put("q_data_type", "float17"), "q_data_type"),
    Mistake("kv_other_dtype", put("kv_data_type", torch.float16), "kv_data_type", EITHER),
    Mistake("q_e5m2", put("q_data_type", torch.float8_e5m2), "q_data_type"),
    Mistake("kv_fnuz", put("kv_data_type", torch.float8_e4m3fnuz), "kv_data_type"),
    Mistake("o_int8", put("o_data_type", torch.int8), "o_data_type", EITHER),
    Mistake("mask_short", mask_of(MASK_SIZE - 1), "custom_mask"),
    Mistake("mask_float", mask_of(MASK_SIZE, torch.float32), "custom_mask"),
    Mistake(
        "packed_short",
        mask_of(PACKED_SIZE - 1, torch.uint8, "packed_custom_mask"),
        "packed_custom_mask",
    ),
    Mistake(
        "packed_as_one_request",
        mask_of(-(-MASK_SIZE // 8), torch.uint8, "packed_custom_mask"),
        "packed_custom_mask",
    ),
    Mistake(
        "packed_dense",
        mask_of(MASK_SIZE, torch.uint8, "packed_custom_mask"),
        rf"packed_custom_mask has {MASK_SIZE} elements, as many as a dense mask .*custom_mask=.*"
        "segment_packbits",
    ),
    Mistake(
        "packed_bool", mask_of(PACKED_SIZE, torch.bool, "packed_custom_mask"), "packed_custom_mask"
    ),
    Mistake("split_size_text", put("fixed_split_size", "many"), "fixed_split_size"),
    Mistake(
        "seq_lens_q_wrong", put("seq_lens_q", torch.tensor([33, 5, 1, 70]).int()), "seq_lens_q"
    ),
    Mistake("seq_lens_wrong", put("seq_lens", torch.tensor([40, 90, 7, 71]).int()), "seq_lens"),
    Mistake("max_token_too_small", put("max_token_per_sequence", 69), "max_token_per_sequence"),
    Mistake("max_kv_too_small", put("max_sequence_kv", 89), "max_sequence_kv"),
    Mistake("uniform_q_len_wrong", put("uniform_q_len", 33), "uniform_q_len"),
    Mistake("unknown_option", put("flavour", "vanilla"), "flavour", TypeError),
]

PAGED_PLAN = [
    Mistake("kv_indptr_shorter", change("paged_kv_indptr", lambda t: t[:-1]), "paged_kv_indptr"),
    Mistake("kv_indptr_decreasing", entry("paged_kv_indptr", 2, 1), "paged_kv_indptr"),
    Mistake("kv_indptr_int64", change("paged_kv_indptr", torch.Tensor.long), "paged_kv_indptr"),
    Mistake(
        "indices_too_few",
        change("paged_kv_indices", lambda t: t[:-1]),
        "paged_kv_indices|paged_kv_indptr",
    ),
    Mistake("indices_int64", change("paged_kv_indices", torch.Tensor.long), "paged_kv_indices"),
    Mistake("indices_float", change("paged_kv_indices", torch.Tensor.float), "paged_kv_indices"),
    Mistake("indices_2d", change("paged_kv_indices", lambda t: t[None]), "paged_kv_indices"),
    Mistake(
        "last_page_short",
        change("paged_kv_last_page_len", lambda t: t[:-1]),
        "paged_kv_last_page_len",
    ),
    Mistake("last_page_over_page", entry("paged_kv_last_page_len", 0, 17), "last_page_len"),
    Mistake("last_page_zero", entry("paged_kv_last_page_len", 1, 0), "last_page_len"),
    Mistake("last_page_negative", entry("paged_kv_last_page_len", 3, -4), "last_page_len"),
    Mistake(
        "last_page_int64",
        change("paged_kv_last_page_len", torch.Tensor.long),
        "paged_kv_last_page_len",
    ),
    Mistake("page_size_zero", put("page_size", 0), "page_size"),
    Mistake("page_size_negative", put("page_size", -16), "page_size"),
]

RAGGED_PLAN = [
    Mistake("kv_indptr_shorter", change("kv_indptr", lambda t: t[:-1]), "kv_indptr"),
    Mistake("kv_indptr_decreasing", entry("kv_indptr", 2, 1), "kv_indptr"),
    Mistake("kv_indptr_int64", change("kv_indptr", torch.Tensor.long), "kv_indptr"),
    Mistake("kv_indptr_none", put("kv_indptr", None), "kv_indptr"),
]

COMMON_RUN = [
    Mistake("q_none", put("q", None), r"\bq\b"),
    Mistake("q_dtype", change("q", torch.Tensor.half), r"\bq\b"),
    Mistake("q_heads", change("q", lambda t: t[:, :2]), r"\bq\b"),
    Mistake("q_dim", change("q", lambda t: t[..., :56]), r"\bq\b"),
    Mistake("q_fewer_rows", change("q", lambda t: t[:-1]), r"\bq\b"),
    Mistake("q_2d", change("q", lambda t: t.flatten(1)), r"\bq\b"),
    Mistake("q_last_dim_strided", change("q", lambda t: t.repeat(1, 1, 2)[..., ::2]), r"\bq\b"),
    Mistake("q_misaligned", change("q", lambda t: misaligned(t)), r"\bq\b"),
    Mistake("out_dtype", change("out", torch.Tensor.float), r"\bout\b"),
    Mistake("out_rows", change("out", lambda t: t[:-1]), r"\bout\b"),
    Mistake("out_dim", change("out", lambda t: t[..., :32]), r"\bout\b"),
    Mistake(
        "out_last_dim_strided", change("out", lambda t: t.repeat(1, 1, 2)[..., ::2]), r"\bout\b"
    ),
    Mistake("lse_dtype", change("lse", torch.Tensor.half), r"\blse\b"),
    Mistake("lse_shape", change("lse", lambda t: t[:, :2]), r"\blse\b"),
    Mistake("lse_in_the_other_layout", put("lse_layout", "HN"), r"\blse\b"),
    Mistake("lse_base", put("lse_base", "log10"), "lse_base"),
    Mistake("lse_layout", put("lse_layout", "NHL"), "lse_layout"),
    Mistake("v_scale_text", put("v_scale", "loud"), "v_scale"),
    Mistake("k_scale_vector", put("k_scale", torch.ones(3)), "k_scale", EITHER),
    Mistake("sinks_too_many", put("sinks", torch.zeros(5)), "sinks"),
    Mistake("window_minus_3", put("window_left", -3), "window_left"),
    Mistake("unknown_option", put("flavour", "vanilla"), "flavour", TypeError),
]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Copy of the tensor, one element (2 bytes) off a 16-byte boundary."""
    storage = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    view = storage[1:].view(t.shape)
    view.copy_(t)
    return view


def both(function) -> Callable[[dict], object]:
    return change("paged_kv_cache", lambda cache: tuple(function(t) for t in cache))


def one(which: int, function) -> Callable[[dict], object]:
    def spoil(cache):
        spoiled = list(cache)
        spoiled[which] = function(cache[which])
        return tuple(spoiled)

    return change("paged_kv_cache", spoil)


CACHE = "paged_kv_cache|k_cache|v_cache"
PAGED_RUN = [
    Mistake("cache_none", put("paged_kv_cache", None), CACHE),
    Mistake("cache_dtype", both(torch.Tensor.half), CACHE),
    Mistake("cache_heads", both(lambda t: t[:, :, :1]), CACHE),
    Mistake("cache_page_size", both(lambda t: t[:, :8]), CACHE),
    Mistake("cache_dim", both(lambda t: t[..., :56]), CACHE),
    Mistake("cache_3d", both(lambda t: t[0]), CACHE),
    Mistake("cache_three", change("paged_kv_cache", lambda cache: (*cache, cache[0])), CACHE),
    Mistake("cache_stacked_wrongly", change("paged_kv_cache", torch.stack), CACHE),
    Mistake("v_has_fewer_pages", one(1, lambda t: t[:-1]), CACHE),
    Mistake("v_heads", one(1, lambda t: t[:, :, :1]), CACHE),
    Mistake("k_last_dim_strided", one(0, lambda t: t.repeat(1, 1, 1, 2)[..., ::2]), CACHE),
    Mistake("k_misaligned", one(0, misaligned), CACHE),
    Mistake("v_row_stride", one(1, lambda t: t.new_zeros(*t.shape[:-1], 65)[..., :64]), CACHE),
]
RAGGED_RUN = [
    Mistake("k_dtype", change("k", torch.Tensor.half), r"\bk\b"),
    Mistake("k_heads", change("k", lambda t: t[:, :1]), r"\bk\b"),
    Mistake("k_too_few_rows", change("k", lambda t: t[:206]), r"\bk\b"),
    Mistake("v_too_few_rows", change("v", lambda t: t[:206]), r"\bv\b"),
    Mistake("v_dim", change("v", lambda t: t[..., :32]), r"\bv\b"),
    Mistake("v_2d", change("v", lambda t: t.flatten(1)), r"\bv\b"),
    Mistake("k_misaligned", change("k", misaligned), r"\bk\b"),
    Mistake("v_last_dim_strided", change("v", lambda t: t.repeat(1, 1, 2)[..., ::2]), r"\bv\b"),
]


def ids(mistakes: list[Mistake]) -> list[str]:
    return [mistake.id for mistake in mistakes]


def plan_arguments(inputs) -> dict:
    names = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim")
    if inputs.case.paged:
        names = (
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "page_size",
        )
    positional, options = runner.plan_arguments(inputs)
    return {**dict(zip(names, positional, strict=True)), **options}


def run_arguments(inputs) -> dict:
    case = inputs.case
    shape = (inputs.q.shape[0], case.num_qo_heads)
    tensors = {"paged_kv_cache": inputs.cache} if case.paged else {"k": inputs.k, "v": inputs.v}
    return {
        "q": inputs.q,
        **tensors,
        "out": poison((*shape, case.dim_vo), case.dtype, inputs.q.device),
        "lse": poison(shape, torch.float32, inputs.q.device),
        "return_lse": True,
    }


def refuse_plan(case: Case, mistake: Mistake, target) -> None:
    inputs, wrapper = planned(case, target)
    before = repr(wrapper), wrapper.variant
    arguments = plan_arguments(inputs)
    mistake.spoil(arguments)
    with pytest.raises(mistake.error, match=mistake.match):
        wrapper.plan(**arguments)
    assert (repr(wrapper), wrapper.variant) == before
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def refuse_run(case: Case, mistake: Mistake, target) -> None:
    inputs, wrapper = planned(case, target)
    arguments = run_arguments(inputs)
    out, lse = arguments["out"], arguments["lse"]
    mistake.spoil(arguments)
    with pytest.raises(mistake.error, match=mistake.match):
        wrapper.run(**arguments)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("mistake", COMMON_PLAN + PAGED_PLAN, ids=ids(COMMON_PLAN + PAGED_PLAN))
def test_paged_plan(target, mistake):
    refuse_plan(PAGED, mistake, target)


@pytest.mark.parametrize("mistake", COMMON_PLAN + RAGGED_PLAN, ids=ids(COMMON_PLAN + RAGGED_PLAN))
def test_ragged_plan(target, mistake):
    refuse_plan(RAGGED, mistake, target)


@pytest.mark.parametrize("mistake", COMMON_RUN + PAGED_RUN, ids=ids(COMMON_RUN + PAGED_RUN))
def test_paged_run(target, mistake):
    refuse_run(PAGED, mistake, target)


@pytest.mark.parametrize("mistake", COMMON_RUN + RAGGED_RUN, ids=ids(COMMON_RUN + RAGGED_RUN))
def test_ragged_run(target, mistake):
    refuse_run(RAGGED, mistake, target)


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_run_before_plan(target, case):
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    arguments = run_arguments(inputs)
    with pytest.raises(REFUSED, match="plan"):
        wrapper.run(**arguments)
    assert bool(arguments["out"].isnan().all())
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_a_first_plan_refused_is_no_plan(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    with pytest.raises(REFUSED, match="page_size"):
        wrapper.plan(**{**plan_arguments(inputs), "page_size": 0})
    with pytest.raises(REFUSED, match="plan"):
        wrapper.run(**run_arguments(inputs))


def plan_and_run(wrapper, plan: dict, run: dict):
    wrapper.plan(**plan)
    return wrapper.run(**run)


def make_and_run(case: Case, inputs, backend: str):
    wrapper = runner.make_wrapper(case, backend=backend, device=inputs.q.device)
    runner.plan(wrapper, inputs)
    return runner.run(wrapper, inputs)


def check_page_indices(wrapper, inputs) -> None:
    """Page indices outside the pool are refused and nothing is written; good ones then work."""
    arguments = plan_arguments(inputs)
    good = arguments["paged_kv_indices"]
    for value in (inputs.k.shape[0], 2**31 - 1, -1):
        arguments["paged_kv_indices"] = good.clone()
        arguments["paged_kv_indices"][3] = value
        run = run_arguments(inputs)
        with pytest.raises(REFUSED, match="paged_kv_indices"):
            plan_and_run(wrapper, arguments, run)
        assert bool(run["out"].isnan().all())
    arguments["paged_kv_indices"] = good
    wrapper.plan(**arguments)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.gpu
def test_page_index_on_the_gpu_is_checked_on_demand(monkeypatch):
    """Looking at indices on the GPU costs a wait, so it is done with PREFLASH_DEBUG=1 alone."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    inputs = build(PAGED, device="cuda")
    wrapper = runner.make_wrapper(PAGED, backend="fa2", device="cuda")
    check_page_indices(wrapper, inputs)


def test_page_index_outside_the_pool():
    """Indices on the host are checked against the pool as soon as the pool is known."""
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    check_page_indices(wrapper, inputs)


def test_indices_behind_the_last_page_are_not_looked_at(target):
    """SGLang allocates 256 indices more than it uses."""
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    arguments = plan_arguments(inputs)
    spare = torch.full((256,), 2**31 - 1, dtype=torch.int32, device=target.device)
    arguments["paged_kv_indices"] = torch.cat([arguments["paged_kv_indices"], spare])
    wrapper.plan(**arguments)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


# --- constructors ------------------------------------------------------------

WRAPPERS = {
    "paged": preflash.BatchPrefillWithPagedKVCacheWrapper,
    "ragged": preflash.BatchPrefillWithRaggedKVCacheWrapper,
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize(
    ("options", "match", "error"),
    [
        ({"kv_layout": "NDH"}, "kv_layout", REFUSED),
        ({"kv_layout": None}, "kv_layout", REFUSED),
        ({"backend": "fa7"}, "backend", REFUSED),
        ({"backend": 2}, "backend", REFUSED),
        ({"use_cuda_graph": True}, "use_cuda_graph", EITHER),
    ],
    ids=["layout", "layout_none", "backend", "backend_type", "graph"],
)
def test_constructor(target, wrapper, options, match, error):
    """A backend that is known but not there may be refused as late as plan()."""
    name = "paged" if wrapper is WRAPPERS["paged"] else "ragged"
    inputs = build({"paged": PAGED, "ragged": RAGGED}[name], device=target.device)
    with pytest.raises(error, match=match):
        wrapper(runner.workspace(target.device), **options).plan(**plan_arguments(inputs))


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("buffer", [None, 1024, torch.empty(0)], ids=["none", "int", "empty_float"])
def test_constructor_workspace(wrapper, buffer):
    """An empty buffer is a workspace without room for splits, not a mistake."""
    if isinstance(buffer, torch.Tensor):
        assert wrapper(buffer) is not None
        return
    with pytest.raises(REFUSED, match="float_workspace_buffer"):
        wrapper(buffer)


def test_graph_buffers_without_graph(target):
    """A buffer that would be ignored is refused; None is not a buffer."""
    buffer = torch.zeros(5, dtype=torch.int32, device=target.device)
    work = runner.workspace(target.device)
    preflash.BatchPrefillWithPagedKVCacheWrapper(work, qo_indptr_buf=None)
    with pytest.raises(EITHER, match=r"qo_indptr_buf|use_cuda_graph"):
        preflash.BatchPrefillWithPagedKVCacheWrapper(
            work, use_cuda_graph=True, qo_indptr_buf=buffer
        )


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_gpu_kernels_refuse_tensors_on_the_cpu(case, backend):
    inputs = build(case)
    with pytest.raises(ValueError, match=f"^backend='{backend}' computes on CUDA tensors.* cpu: "):
        make_and_run(case, inputs, backend)


@pytest.mark.gpu
def test_cpu_backend_refuses_gpu_tensors():
    inputs = build(RAGGED, device="cuda")
    with pytest.raises(EITHER, match="cpu"):
        make_and_run(RAGGED, inputs, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_tensor_on_another_device(name):
    inputs = build(RAGGED, device="cuda")
    wrapper = runner.make_wrapper(RAGGED, backend="fa2", device="cuda")
    runner.plan(wrapper, inputs)
    arguments = run_arguments(inputs)
    arguments[name] = arguments[name].cpu()
    with pytest.raises(REFUSED, match=rf"\b{name}\b"):
        wrapper.run(**arguments)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


# --- single ------------------------------------------------------------------

SINGLE = [
    Mistake("q_none", put("q", None), r"\bq\b"),
    Mistake("q_2d", change("q", lambda t: t[0]), r"\bq\b"),
    Mistake("k_dtype", change("k", torch.Tensor.half), r"\bk\b"),
    Mistake("v_rows", change("v", lambda t: t[:-1]), r"\bv\b|\bk\b"),
    Mistake("heads", change("q", lambda t: t[:, :3]), r"\bq\b|num_qo_heads"),
    Mistake("k_dim", change("k", lambda t: t[..., :56]), r"\bk\b|head_dim"),
    Mistake("layout", put("kv_layout", "XYZ"), "kv_layout"),
    Mistake("mask_shape", put("custom_mask", torch.ones(9, 29).bool()), "custom_mask"),
    Mistake("mask_float", put("custom_mask", torch.ones(9, 30)), "custom_mask"),
    Mistake("packed_size", put("packed_custom_mask", torch.ones(33).byte()), "packed_custom_mask"),
    Mistake(
        "packed_dense",
        put("packed_custom_mask", torch.ones(9, 30).byte()),
        r"as many as a dense mask .*custom_mask=.*bitorder='little': packbits\(mask.flatten\(\)",
    ),
    Mistake("rope_scale_alone", put("rope_scale", 2.0), "rope_scale"),
    Mistake("rope_theta_zero", put("rope_theta", 0), "rope_theta"),
    Mistake("encoding", put("pos_encoding_mode", "?"), "pos_encoding_mode"),
    Mistake("window", put("window_left", -5), "window_left"),
    Mistake("backend", put("backend", "fa9"), "backend"),
    Mistake("lse_base", put("lse_base", "10"), "lse_base"),
    Mistake("out_shape", put("out", torch.zeros(9, 4, 56, dtype=torch.bfloat16)), r"\bout\b"),
    Mistake("k_misaligned", change("k", misaligned), r"\bk\b"),
    Mistake("unknown_option", put("flavour", 1), "flavour", TypeError),
]


@pytest.mark.parametrize("mistake", SINGLE, ids=ids(SINGLE))
def test_single(target, mistake):
    case = Case("single", (9,), (30,), 4, 2, 64, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    arguments = {"q": inputs.q, "k": inputs.k[:30].contiguous(), "v": inputs.v[:30].contiguous()}
    options = {"causal": True, "return_lse": True}
    right = dict(arguments)
    mistake.spoil(arguments)
    arguments = {
        name: value.to(target.device)
        if isinstance(value, torch.Tensor) and name not in right
        else value
        for name, value in arguments.items()
    }
    with pytest.raises(mistake.error, match=mistake.match):
        preflash.single_prefill_with_kv_cache(**options, **arguments)
    out, lse = preflash.single_prefill_with_kv_cache(**right, **options)
    runner.compare(inputs, out, lse, reference(inputs)).check()


def test_messages_tell_value_and_way_out():
    """Messages name the offending value and what is allowed, not only the argument."""
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    for spoiled, words in (
        ({"num_qo_heads": 5}, ("5", "2")),
        ({"page_size": 0}, ("0",)),
        ({"window_left": -2}, ("-2", "-1")),
        ({"pos_encoding_mode": "SINUS"}, ("SINUS", "NONE")),
        ({"head_dim": 100}, ("100", "8")),
        ({"head_dim": 520}, ("520", "512")),
        ({"q_data_type": torch.int8}, ("int8", "float16")),
    ):
        with pytest.raises(EITHER) as caught:
            wrapper.plan(**{**plan_arguments(inputs), **spoiled})
        for word in words:
            assert word in str(caught.value), (spoiled, str(caught.value))


def test_what_would_work_for_a_head_dim_of_100_works(target):
    """The padding that the message asks for computes what it is asked for."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 2, 100, generator=generator).half() for n in (5, 9, 9))
    with pytest.raises(ValueError, match=r"padded with zeros to 104 columns.* 1 / sqrt\(100\)"):
        preflash.single_prefill_with_kv_cache(
            *(t.to(target.device) for t in (q, k, v)), backend=target.backend
        )
    padded = [torch.nn.functional.pad(t, (0, 4)).to(target.device) for t in (q, k, v)]
    out = preflash.single_prefill_with_kv_cache(
        *padded, sm_scale=1 / math.sqrt(100), backend=target.backend
    )
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 10
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.double())
    torch.testing.assert_close(out[..., :100].cpu().double(), expected, rtol=2e-3, atol=2e-3)


def test_what_would_work_for_contiguous_8_bit_rows_of_72_bytes_works(target):
    """The view of wider rows that the message asks for computes what it is asked for."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 2, 72, generator=generator).half() for n in (5, 9, 9))
    k8, v8 = (t.to(torch.float8_e4m3fn).to(target.device) for t in (k, v))
    with pytest.raises(ValueError, match=r"72 bytes.*rows of 80 columns .* first 72$"):
        preflash.single_prefill_with_kv_cache(q.to(target.device), k8, v8, backend=target.backend)
    rows = [torch.empty(9, 2, 80, dtype=k8.dtype, device=k8.device)[..., :72] for _ in "kv"]
    for view, values in zip(rows, (k8, v8), strict=True):
        view.copy_(values)
    out = preflash.single_prefill_with_kv_cache(q.to(target.device), *rows, backend=target.backend)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k8.cpu().double()) / math.sqrt(72)
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v8.cpu().double())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-3, atol=2e-3)


def test_there_are_enough_refusals():
    distinct = {
        (group, m.id)
        for group, mistakes in {
            "plan": COMMON_PLAN,
            "paged_plan": PAGED_PLAN,
            "ragged_plan": RAGGED_PLAN,
            "run": COMMON_RUN,
            "paged_run": PAGED_RUN,
            "ragged_run": RAGGED_RUN,
            "single": SINGLE,
        }.items()
        for m in mistakes
    }
    assert len(distinct) >= 60
