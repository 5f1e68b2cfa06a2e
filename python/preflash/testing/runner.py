"""Drives the public wrappers over `Inputs`, the way a caller would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .._plan import staging
from .._run.variant import PlannedVariant
from . import comparison
from .case import Case, Magnitude, Position
from .comparison import Report, poison
from .inputs import Inputs
from .oracle import Expected, reference

# What the ids of kernels begin with that multiply 8 bits as they are stored.
PRODUCTS_OF_8_BITS = "sm90_e4m3_"
WORKSPACE_BYTES = 32 * 1024 * 1024


def workspace(device: torch.device | str = "cpu", size: int = WORKSPACE_BYTES) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def make_wrapper(
    case: Case, *, backend: str, device: torch.device | str = "cpu", buffer=None, **options
):
    """A paged or ragged wrapper for the case, not planned."""
    import preflash

    buffer = workspace(device) if buffer is None else buffer
    kind = preflash.BatchPrefillWithRaggedKVCacheWrapper
    if case.paged:
        kind = preflash.BatchPrefillWithPagedKVCacheWrapper
    return kind(buffer, case.layout, backend=backend, **options)


def graph_options(inputs: Inputs) -> dict:
    """use_cuda_graph=True for a wrapper of such batches, with buffers, of which those that may be
    too large are."""
    case, device = inputs.case, inputs.q.device
    ints = {"dtype": torch.int32, "device": device}
    indptr = torch.full((case.batch_size + 1,), -7, **ints)
    found = {"use_cuda_graph": True, "qo_indptr_buf": indptr.clone()}
    if case.paged:
        found["paged_kv_indptr_buf"] = indptr.clone()
        found["paged_kv_indices_buf"] = torch.full((inputs.indices.numel() + 3,), -7, **ints)
        found["paged_kv_last_page_len_buf"] = indptr[1:].clone()
    else:
        found["kv_indptr_buf"] = indptr.clone()
    pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
    room = pairs // 8 + case.batch_size + 8
    found["custom_mask_buf"] = torch.full((room,), 255, dtype=torch.uint8, device=device)
    found["mask_indptr_buf"] = indptr.clone()
    return found


def hints(inputs: Inputs) -> dict:
    """What plan() may be told of the lengths and pages in other forms."""
    case, device = inputs.case, inputs.qo_indptr.device
    found = {
        "seq_lens_q": torch.tensor(case.qo_lens, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(case.kv_lens, dtype=torch.int64, device=device),
        "max_token_per_sequence": max(case.qo_lens),
        "max_sequence_kv": max(case.kv_lens) + 1,
        "uniform_q_len": case.qo_lens[0] if len(set(case.qo_lens)) == 1 else -1,
    }
    if case.paged:
        widest = max(map(len, inputs.page_table)) + 1
        table = torch.full((case.batch_size, widest), -7, dtype=torch.int32, device="cpu")
        for row, pages in zip(table, inputs.page_table, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        found["block_tables"] = table.to(device)
    return found


def plan_arguments(inputs: Inputs) -> tuple[tuple, dict]:
    """Positional and keyword arguments of plan()."""
    case = inputs.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    if case.paged:
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        positional = (*table, *heads, case.page_size)
    else:
        positional = (inputs.qo_indptr, inputs.kv_indptr, *heads)
    options = {
        "custom_mask": inputs.custom_mask,
        "packed_custom_mask": inputs.packed_custom_mask,
        "causal": inputs.pipeline.causal,
        "pos_encoding_mode": case.position.value,
        "rope_scale": case.rope_scale,
        "rope_theta": case.rope_theta,
        "sm_scale": case.sm_scale,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype_kv,
        "o_data_type": case.o_dtype,
        "fixed_split_size": case.fixed_split_size,
        "disable_split_kv": case.disable_split_kv,
    }
    if case.head_dim_vo is not None:
        options["head_dim_vo"] = case.head_dim_vo
    return positional, options


def plan(wrapper, inputs: Inputs, **overrides) -> None:
    positional, options = plan_arguments(inputs)
    wrapper.plan(*positional, **{**options, **overrides})


def run(wrapper, inputs: Inputs, **options):
    """wrapper.run on the inputs; poisoned output buffers unless the caller brings his own."""
    case = inputs.case
    shape = (inputs.q.shape[0], case.num_qo_heads)
    options.setdefault("out", poison((*shape, case.dim_vo), case.dtype_o, inputs.q.device))
    options.setdefault("lse", poison(shape, torch.float32, inputs.q.device))
    options.setdefault("return_lse", True)
    if inputs.sinks is not None:
        options.setdefault("sinks", inputs.sinks)
    if case.head_scales:
        options = {**_scale_arguments(inputs), **options}
    inputs.variant = wrapper.variant or ""
    if case.paged:
        return wrapper.run(inputs.q, inputs.cache, **options)
    return wrapper.run(inputs.q, inputs.k, inputs.v, **options)


@contextlib.contextmanager
def _variants_run() -> Iterator[list[str]]:
    """The ids of the kernels that run meanwhile, for calls that do not tell theirs."""
    found: list[str] = []
    attend_to = PlannedVariant.attend_to

    def noting(self: PlannedVariant, *args, **options):
        found.append(self.plan.id)
        return attend_to(self, *args, **options)

    PlannedVariant.attend_to = noting
    try:
        yield found
    finally:
        PlannedVariant.attend_to = attend_to


def noting_variant(inputs, call: Callable[[], object]):
    """call(), whose kernel becomes inputs.variant where bounds depend on that."""
    if inputs.case.dtype.itemsize > 1:
        return call()
    with _variants_run() as found:
        result = call()
    if found:  # a call like the last one may skip what tells
        inputs.variant = found[-1]
    return result


def note_sides(wrapper, prefill: Inputs, decode: Inputs) -> None:
    """Their variants, of a wrapper of prefill beside decode that has run in one launch or two."""
    ids = wrapper.variant.split(", ")
    prefill.variant, decode.variant = ids[0], ids[-1]


def _scale_arguments(inputs: Inputs) -> dict:
    scales = inputs.scales
    return {"scale_q": scales.q, "scale_k": scales.k, "scale_v": scales.v}


def single(inputs: Inputs, *, backend: str, **options):
    """single_prefill_with_kv_cache on a ragged case of one request; returns (out, lse)."""
    import preflash

    case = inputs.case
    if case.batch_size != 1 or case.paged:
        raise ValueError(f"{case.id} is not a single ragged request")
    kv_len = case.kv_lens[0]
    tokens = 0 if case.layout == "NHD" else 1
    arguments = {
        "custom_mask": None if inputs.custom_mask is None else inputs.masks[0],
        "packed_custom_mask": inputs.packed_custom_mask,
        "causal": inputs.pipeline.causal,
        "pos_encoding_mode": case.position.value,
        "rope_scale": case.rope_scale,
        "rope_theta": case.rope_theta,
        "kv_layout": case.layout,
        "sm_scale": case.sm_scale,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "return_lse": True,
        "backend": backend,
        "sinks": inputs.sinks,
        "o_dtype": case.o_dtype,
        **_scale_arguments(inputs),
    }
    tensors = (inputs.q, inputs.k.narrow(tokens, 0, kv_len), inputs.v.narrow(tokens, 0, kv_len))
    return noting_variant(
        inputs,
        lambda: preflash.single_prefill_with_kv_cache(*tensors, **{**arguments, **options}),
    )


def compare(inputs: Inputs, out, lse, expected: Expected | None = None, **options) -> Report:
    """Compares a result with the oracle's, within the bounds of the case."""
    case = inputs.case
    expected = reference(inputs) if expected is None else expected
    if case.magnitude is Magnitude.VERY_NEGATIVE:
        # Products and sums are exact there: only the multiplications by scale and log2 e round.
        options.setdefault("logit_rounding", 4.0)
    options.setdefault("logit_rounding", comparison.logit_roundings(case.head_dim))
    if inputs.variant.startswith(PRODUCTS_OF_8_BITS):
        options.setdefault("p_dtype", torch.float8_e4m3fn)
    if out.dtype.itemsize == 1:
        # Probabilities of 8 bits would be seen at the output's roundoff.
        options.setdefault("p_dtype", torch.bfloat16)
    copied = staging.policy() == "always" and case.has_staged_form
    if case.position is Position.ROPE and (out.is_cuda or copied):
        # Tensor cores and copies have 16 bits, the CPU float32. 8-bit queries are float16 by then,
        # in copies of the output's dtype.
        rotated = case.dtype if case.dtype.itemsize == 2 else torch.float16
        if case.dtype.itemsize == 1 and copied:
            rotated = case.dtype_o
        options.setdefault("rotated_dtype", rotated)
    return comparison.compare(out, lse, expected, soft_cap=case.soft_cap or 0.0, **options)


def check(
    inputs: Inputs, *, backend: str, expected: Expected | None = None, **plan_overrides
) -> Report:
    """Plans and runs a fresh wrapper and raises unless output and LSE are right."""
    wrapper = make_wrapper(inputs.case, backend=backend, device=inputs.q.device)
    if inputs.case.fixed_split_size:
        # A fixed split is kept whatever it costs: as much as the wrapper says that it takes.
        positional, options = plan_arguments(inputs)
        needed, _ = wrapper.workspace_size(*positional, **{**options, **plan_overrides})
        buffer = workspace(inputs.q.device, max(needed, WORKSPACE_BYTES))
        wrapper = make_wrapper(inputs.case, backend=backend, device=inputs.q.device, buffer=buffer)
    plan(wrapper, inputs, **plan_overrides)
    out, lse = run(wrapper, inputs)
    report = compare(inputs, out, lse, expected)
    report.check()
    return report
