"""Drives the public wrappers over `Inputs`, the way a caller would."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

import preflash

from .. import _core
from .._check.calls import PagedPlanArguments, RaggedPlanArguments, SingleArguments
from .._plan import prepass
from . import comparison
from .case import Case, Magnitude, Position
from .comparison import Report, poison
from .inputs import Inputs
from .oracle import Expected, reference

WORKSPACE_BYTES = 32 * 1024 * 1024


def workspace(device: torch.device | str = "cpu", size: int = WORKSPACE_BYTES) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def make_wrapper(
    case: Case, *, backend: str, device="cpu", buffer=None, package=preflash, **options
):
    """A paged or ragged wrapper for the case, not planned; package: one that has the API."""
    kind = f"BatchPrefillWith{'Paged' if case.paged else 'Ragged'}KVCacheWrapper"
    buffer = workspace(device) if buffer is None else buffer
    return getattr(package, kind)(buffer, case.layout, backend=backend, **options)


def plan_arguments(inputs: Inputs) -> tuple[tuple, dict]:
    """Positional and keyword arguments of plan()."""
    case = inputs.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    kind, positional = RaggedPlanArguments, (inputs.qo_indptr, inputs.kv_indptr, *heads)
    if case.paged:
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        kind, positional = PagedPlanArguments, (*table, *heads, case.page_size)
    options = {
        **_options_of(inputs, kind),
        "custom_mask": inputs.custom_mask,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype_kv,
        "o_data_type": case.o_dtype,
    }
    if case.head_dim_vo is not None:
        options["head_dim_vo"] = case.head_dim_vo
    return positional, options


def _options_of(inputs: Inputs, kind: type) -> dict:
    """Options that have the same name in plan() and in the single function."""
    case = inputs.case
    elsewhere = {"num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo", "page_size", "o_dtype"}
    names = {field.name for field in dataclasses.fields(case)} - elsewhere
    return {
        **{name: getattr(case, name) for name in kind.__slots__ if name in names},
        "packed_custom_mask": inputs.packed_custom_mask,
        "causal": inputs.pipeline.causal,
        "pos_encoding_mode": case.position.value,
        "logits_soft_cap": case.soft_cap,
    }


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
    return wrapper.run(*_tensors(inputs), **options)


def _tensors(inputs: Inputs) -> tuple:
    """The first arguments of run(): q, and the cache or k and v."""
    return (inputs.q, inputs.cache) if inputs.case.paged else (inputs.q, inputs.k, inputs.v)


def _scale_arguments(inputs: Inputs) -> dict:
    return {f"scale_{name}": scale for name, scale in vars(inputs.scales).items()}


def single(inputs: Inputs, *, backend: str, **options):
    """single_prefill_with_kv_cache on a ragged case of one request; returns (out, lse)."""
    case = inputs.case
    if case.batch_size != 1 or case.paged:
        raise ValueError(f"{case.id} is not a single ragged request")
    kv_len = case.kv_lens[0]
    tokens = 0 if case.layout == "NHD" else 1
    arguments = {
        **_options_of(inputs, SingleArguments),
        "custom_mask": None if inputs.custom_mask is None else inputs.masks[0],
        "kv_layout": case.layout,
        "return_lse": True,
        "backend": backend,
        "sinks": inputs.sinks,
        "o_dtype": case.o_dtype,
        **_scale_arguments(inputs),
    }
    tensors = (inputs.q, inputs.k.narrow(tokens, 0, kv_len), inputs.v.narrow(tokens, 0, kv_len))
    result = preflash.single_prefill_with_kv_cache(*tensors, **{**arguments, **options})
    inputs.variant = _core.last_variant()
    return result


def compare(inputs: Inputs, out, lse, expected: Expected | None = None, **options) -> Report:
    """Compares a result with the oracle's, within the bounds of the case."""
    case = inputs.case
    expected = reference(inputs) if expected is None else expected
    if case.magnitude is Magnitude.VERY_NEGATIVE:
        # Products and sums are exact there: only the multiplications by scale and log2 e round.
        options.setdefault("logit_rounding", 4.0)
    options.setdefault("logit_rounding", comparison.logit_roundings(case.head_dim))
    if inputs.products_of_8_bits:
        options.setdefault("p_dtype", torch.float8_e4m3fn)
    if out.dtype.itemsize == 1:
        # Probabilities of 8 bits would be seen at the output's roundoff.
        options.setdefault("p_dtype", torch.bfloat16)
    if case.dtype_kv.itemsize == 1 and max(case.kv_lens, default=0) == 1:
        options.setdefault("equal_values", True)
    copied = prepass.policy() == "always" and case.has_prepass_form
    if case.position is Position.ROPE and (out.is_cuda or copied):
        # Tensor cores and copies have 16 bits, the CPU float32. 8-bit queries are float16 by then,
        # in copies of the output's dtype.
        rotated = case.dtype if case.dtype.itemsize == 2 else torch.float16
        if case.dtype.itemsize == 1 and copied:
            rotated = case.dtype_o
        options.setdefault("rotated_dtype", rotated)
    return comparison.compare(out, lse, expected, soft_cap=case.soft_cap or 0.0, **options)


def planned(inputs: Inputs, *, backend: str, size: int = WORKSPACE_BYTES, **plan_overrides):
    """Returns a new wrapper, planned, with a workspace of `size` bytes."""
    case, device = inputs.case, inputs.q.device
    wrapper = make_wrapper(case, backend=backend, device=device, buffer=workspace(device, size))
    plan(wrapper, inputs, **plan_overrides)
    return wrapper


def launcher(wrapper, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A call of run() on the inputs with an output of its own, for timing."""
    out = inputs.q.new_empty(*inputs.q.shape[:2], inputs.case.dim_vo, dtype=inputs.case.dtype_o)
    return functools.partial(wrapper.run, *_tensors(inputs), out=out)


def check(inputs: Inputs, *, expected: Expected | None = None, **planned_with) -> None:
    """Plans and runs a fresh wrapper and raises unless output and LSE are right."""
    out, lse = run(planned(inputs, **planned_with), inputs)
    compare(inputs, out, lse, expected).check()
