"""Tests of each option share head dims, masks, splits and single requests."""

import itertools
from collections.abc import Iterator

import torch
from preflash.testing import Case, Inputs, KvForm, MaskKind, build, poison, runner

CAUSAL = MaskKind.CAUSAL

# head_dim: head_dim_vo
DIMS = {64: None, 96: None, 128: None, 192: 128, 256: None, 320: None, 512: None}
# mask, window_left
MASKS = {
    "full": (MaskKind.NONE, -1),
    "causal": (CAUSAL, -1),
    "window": (CAUSAL, 37),
    "left_only": (MaskKind.NONE, 50),
    "custom": (MaskKind.CUSTOM, -1),
    "custom_window": (MaskKind.PACKED, 60),
}
SINGLE = [
    Case("full", (70,), (133,), 4, 2, 64),
    Case("causal", (70,), (133,), 6, 2, 128, mask=CAUSAL, window_left=40),
    Case("hnd", (70,), (133,), 8, 1, 96, layout="HND", mask=CAUSAL, form=KvForm.PADDED),
    Case("custom", (33,), (65,), 12, 4, 256, mask=MaskKind.CUSTOM, soft_cap=20.0),
    Case("mla", (13,), (165,), 4, 1, 192, 128, mask=CAUSAL),
    Case("decode", (1,), (999,), 5, 1, 128),
    Case("longer_q", (90,), (33,), 2, 2, 64),
    Case("longer_q_hnd", (90,), (33,), 2, 2, 64, layout="HND", mask=CAUSAL),
    Case("no_query", (0,), (33,), 2, 2, 64),
    Case("no_key", (5,), (0,), 2, 2, 64),
    Case("one_key", (5,), (1,), 4, 2, 64),
]


def grid(*takes_turns: dict, **options) -> Iterator[Case]:
    """Yields dims x masks x soft caps with these options; dtype, storage and layout take turns."""
    turns = itertools.cycle(
        itertools.product(
            (0, 16),
            (torch.bfloat16, torch.float16),
            ("NHD", "HND"),
            (KvForm.SEPARATE, KvForm.PADDED),
            takes_turns or ({},),
        )
    )
    for dims, name, cap in itertools.product(DIMS.items(), MASKS, (None, 15.0)):
        page_size, dtype, layout, form, others = next(turns)
        how = (dtype, page_size, layout, form, *MASKS[name], cap)
        yield Case(name, (1, 70, 0, 33), (40, 131, 9, 33), 6, 2, *dims, *how, **options, **others)


def check_single(target, case: Case) -> tuple[Inputs, torch.Tensor]:
    """Runs one request into poisoned outputs and compares it; returns its inputs, and out."""
    inputs = build(case, device=target.device)
    rows = (*case.qo_lens, case.num_qo_heads)
    out = poison((*rows, case.dim_vo), case.dtype_o, target.device)
    lse = poison(rows, torch.float32, target.device)
    runner.single(inputs, backend=target.backend, out=out, lse=lse)
    runner.compare(inputs, out, lse).check()
    return inputs, out
