"""Options that are wrong in every problem, each of which must raise and write nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from preflash.testing.inputs import Inputs

from .guarded import watched

_REFUSED = (TypeError, ValueError, NotImplementedError)


def of_run(inputs: Inputs) -> list[tuple[str, object]]:
    """Wrong values of arguments that run() and the single function share."""
    case, device = inputs.case, inputs.q.device
    rows, heads = inputs.q.shape[0], case.num_qo_heads
    float32 = {"dtype": torch.float32, "device": device}
    return [
        ("lse_base", "log10"),
        ("lse_layout", "NHD"),
        ("return_lse", 2),
        ("q_scale", math.nan),
        ("k_scale", torch.ones(2, **float32)),
        ("v_scale", "loud"),
        ("window_left", -2),
        ("sinks", torch.zeros(heads + 1, **float32)),
        ("sinks", torch.zeros(heads, dtype=torch.float16, device=device)),
        ("scale_q", torch.ones(heads + 1, **float32)),
        ("scale_k", torch.ones(case.num_kv_heads, dtype=torch.float16, device=device)),
        ("scale_v", torch.ones(case.num_kv_heads + 1, **float32)),
        ("out", torch.empty(rows, heads, case.dim_vo, dtype=torch.float64, device=device)),
        ("out", torch.empty(rows + 1, heads, case.dim_vo, dtype=case.dtype_o, device=device)),
        ("lse", torch.empty(rows + 1, heads + 2, **float32)),
    ]


def of_plan(inputs: Inputs) -> list[tuple[str, object]]:
    """Wrong values of arguments of plan()."""
    case, device = inputs.case, inputs.q.device
    found = [
        ("window_left", -2),
        ("logits_soft_cap", 1e31),
        ("logits_soft_cap", math.nan),
        ("sm_scale", math.inf),
        ("pos_encoding_mode", "SINUS"),
        ("rope_scale", -1.0),
        ("rope_theta", 0.0),
        ("fixed_split_size", -2),
        ("kv_data_type", torch.bfloat16 if case.dtype is torch.float16 else torch.float16),
        ("q_data_type", torch.int8),
        ("o_data_type", torch.float8_e5m2),
        ("causal", 2),
    ]
    if longest := max(case.kv_lens):
        found.append(("max_sequence_kv", longest - 1))
    pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
    # Other problems would be refused for the mask itself, where a backend serves none, or for the
    # larger workspace of a split that is not causal any more.
    if pairs and case.has_custom_mask:
        few = torch.ones(pairs - 1, dtype=torch.bool, device=device)
        found.append(("packed_custom_mask", few[: (pairs - 1) // 8].to(torch.uint8)))
        if inputs.packed_custom_mask is None:  # which would take precedence
            found.append(("custom_mask", few))
    return found


def missing(name: str, value: object, call: Callable[..., object]) -> list[str]:
    """Returns what is wrong with the way `call` refuses a value of an argument."""
    wrong = f"{name}={getattr(value, 'shape', value)!r}"
    changed = watched({name: value})
    try:
        call(**{name: value})
    except _REFUSED as error:
        if changed():
            return [f"{wrong} was refused, and written"]
        return [] if name in str(error) else [f"{wrong}: the refusal does not name it: {error}"]
    return [f"{wrong} was accepted"]
