"""Options that are wrong in every problem, each of which must raise and write nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from preflash.testing.inputs import Inputs

from . import guarded

_REFUSED = (TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Mistake:
    """A wrong value of an argument, beside others that are right."""

    argument: str
    value: object

    def __str__(self) -> str:
        if isinstance(self.value, torch.Tensor):
            return f"{self.argument} of shape {tuple(self.value.shape)}, {self.value.dtype}"
        return f"{self.argument}={self.value!r}"


def of_run(inputs: Inputs) -> list[Mistake]:
    """Mistakes in the arguments that run() and the single function share."""
    case, device = inputs.case, inputs.q.device
    rows, heads = inputs.q.shape[0], case.num_qo_heads
    float32 = {"dtype": torch.float32, "device": device}
    return [
        Mistake("lse_base", "log10"),
        Mistake("lse_layout", "NHD"),
        Mistake("return_lse", 2),
        Mistake("q_scale", math.nan),
        Mistake("k_scale", torch.ones(2, **float32)),
        Mistake("v_scale", "loud"),
        Mistake("window_left", -2),
        Mistake("sinks", torch.zeros(heads + 1, **float32)),
        Mistake("sinks", torch.zeros(heads, dtype=torch.float16, device=device)),
        Mistake("out", torch.empty(rows, heads, case.dim_vo, dtype=torch.float64, device=device)),
        Mistake("scale_q", torch.ones(heads + 1, **float32)),
        Mistake("scale_k", torch.ones(case.num_kv_heads, dtype=torch.float16, device=device)),
        Mistake("scale_v", torch.ones(case.num_kv_heads + 1, **float32)),
        Mistake(
            "out", torch.empty(rows + 1, heads, case.dim_vo, dtype=case.dtype_o, device=device)
        ),
        Mistake("lse", torch.empty(rows + 1, heads + 2, **float32)),
    ]


def of_plan(inputs: Inputs) -> list[Mistake]:
    """Mistakes in the arguments of plan()."""
    case, device = inputs.case, inputs.q.device
    other = torch.float16 if case.dtype is not torch.float16 else torch.bfloat16
    found = [
        Mistake("window_left", -2),
        Mistake("logits_soft_cap", 1e31),
        Mistake("logits_soft_cap", math.nan),
        Mistake("sm_scale", math.inf),
        Mistake("pos_encoding_mode", "SINUS"),
        Mistake("rope_scale", -1.0),
        Mistake("rope_theta", 0.0),
        Mistake("fixed_split_size", -2),
        Mistake("kv_data_type", other),
        Mistake("q_data_type", torch.int8),
        Mistake("o_data_type", torch.float8_e5m2),
        Mistake("causal", 2),
    ]
    if longest := max(case.kv_lens):
        found.append(Mistake("max_sequence_kv", longest - 1))
    pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
    # Other problems would be refused for the mask itself, where a backend serves none, or for the
    # larger workspace of a split that is not causal any more.
    if pairs and case.has_custom_mask:
        few = torch.ones(pairs - 1, dtype=torch.bool, device=device)
        found.append(Mistake("packed_custom_mask", few[: (pairs - 1) // 8].to(torch.uint8)))
        if inputs.packed_custom_mask is None:  # which would take precedence
            found.append(Mistake("custom_mask", few))
    return found


def missing(mistake: Mistake, call: Callable[..., object]) -> list[str]:
    """Returns what is wrong with the way `call` refuses a mistake."""
    wrong = mistake.value
    output = guarded.Untouched({"it": wrong if isinstance(wrong, torch.Tensor) else None})
    try:
        call(**{mistake.argument: wrong})
    except _REFUSED as error:
        named = mistake.argument in str(error)
        if output.changed():
            return [f"{mistake} was refused, and written"]
        return [] if named else [f"{mistake}: the refusal does not name it: {error}"]
    return [f"{mistake} was accepted"]
