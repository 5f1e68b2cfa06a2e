"""Cases whose operands are rotated or dequantised on load: every form with every option."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import torch
from preflash.testing import Case, KvForm, MaskKind, Sinks
from preflash.testing.case import Position

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROPE = {"position": Position.ROPE}
WHAT = {
    "rope": ROPE,
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2},
    "rope_e4m3": ROPE | {"kv_dtype": E4M3},
    "rope_e5m2": ROPE | {"kv_dtype": E5M2},
    "q_e4m3": {"dtype": E4M3},
    "q_e4m3_of16": {"dtype": E4M3, "o_dtype": torch.float16},
    "q_e4m3_oe4m3": {"dtype": E4M3, "o_dtype": E4M3},
    "rope_q_e4m3": ROPE | {"dtype": E4M3},
    "rope_q_e4m3_oe4m3": ROPE | {"dtype": E4M3, "o_dtype": E4M3},
}
ALIBI = {"position": Position.ALIBI}
OPTIONS = {
    "causal": {},
    "full": {"mask": MaskKind.NONE},
    "window": {"window_left": 60},
    "soft_cap": {"soft_cap": 20.0},
    "sinks": {"sinks": Sinks.MIXED},
    "negative_scale": {"sm_scale": -0.05},
    "fixed_split": {"fixed_split_size": 128},
    "custom": {"mask": MaskKind.CUSTOM},
    "packed_window": {"mask": MaskKind.PACKED, "window_left": 100},
    "custom_soft_cap": {"mask": MaskKind.CUSTOM, "soft_cap": 20.0},
    "custom_sinks": {"mask": MaskKind.PACKED, "sinks": Sinks.MIXED},
    "custom_fixed_split": {"mask": MaskKind.CUSTOM, "fixed_split_size": 64},
    "alibi": ALIBI,
    "alibi_soft_cap": ALIBI | {"soft_cap": 20.0},
    "alibi_custom": ALIBI | {"mask": MaskKind.CUSTOM},
    "head_scales": {"head_scales": True},
    "custom_head_scales": {"mask": MaskKind.CUSTOM, "head_scales": True},
}
HEAD_DIMS = ((512, None), (320, None), (192, 128), (128, None))
LENGTHS = {
    "prefill": ((190, 0, 77, 3), (470, 9, 77, 0)),
    "decode": ((1,) * 6, (1, 63, 64, 700, 0, 2049)),
    "append": ((1, 33, 5), (3001, 40, 5)),
    "split": ((3,), (9001,)),
}
PAGES = (0, 0, 1, 3, 16, 64)


def _is_a_case(options: dict) -> bool:
    fp8 = "kv_dtype" in options or options.get("dtype") == E4M3
    return fp8 or not options.get("head_scales")


def cases() -> Iterator[Case]:
    """WHAT x OPTIONS x HEAD_DIMS; lengths, heads and storage are drawn: each meets most others."""
    rng = random.Random(25)
    for what, changes in WHAT.items():
        for option, more in OPTIONS.items():
            for dims in HEAD_DIMS:
                lengths = rng.choice(list(LENGTHS))
                page_size, layout = rng.choice(PAGES), rng.choice(("NHD", "HND"))
                heads = rng.choice(((4, 2), (7, 1), (3, 3), (16, 1)))
                form = rng.choice((KvForm.SEPARATE, KvForm.TRANSPOSED, KvForm.PADDED))
                dtype = rng.choice((torch.float16, torch.bfloat16))
                if "position" in more and "position" in changes:
                    continue
                options = {"dtype": dtype, "mask": MaskKind.CAUSAL} | more | changes
                if not _is_a_case(options):
                    continue
                yield Case(
                    f"{what}-{option}-{lengths}",
                    *LENGTHS[lengths],
                    *heads,
                    *dims,
                    page_size=page_size,
                    layout=layout,
                    form=form if dims[1] is None else KvForm.SEPARATE,
                    **options,
                )


def decode_steps() -> Iterator[Case]:
    """Decode steps over 8 bits have a kernel of their own on fa3: with every option."""
    for option, head_dim in itertools.product(OPTIONS, (64, 128, 256)):
        options = {"mask": MaskKind.CAUSAL, "kv_dtype": E4M3} | OPTIONS[option]
        yield Case(f"step-{option}", *LENGTHS["decode"], 8, 2, head_dim, page_size=16, **options)


def negative_positions() -> Iterator[Case]:
    """Queries before the first key see keys where there is no mask."""
    for what in ("rope", "rope_e4m3"):
        options = WHAT[what] | {"mask": MaskKind.NONE}
        yield Case(f"before-{what}", (150, 7), (64, 3), 4, 2, 128, **options)


CASES = random.Random(26).sample(list(cases()), 320)  # on two backends they take a minute
CASES += [*decode_steps(), *negative_positions()]


def large_prefill(head_dim: int, **options) -> Case:
    """Copies of it pay."""
    case = Case("large", (1500,), (3133,), 8, 8, head_dim, mask=MaskKind.CAUSAL, page_size=16)
    return dataclasses.replace(case, **options)
