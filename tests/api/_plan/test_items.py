"""Multi-item scoring, a prefix and items that see it and themselves, against the float64 oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from graph_stage import Limits, Stage, capture, recorder  # noqa: F401
from preflash.testing import Case, MaskKind, Position, build, runner

# 17 tokens of prefix, two items between delimiters; 12, of which some lie before the queries.
IN_ITEMS = [[*range(17), *range(19), 0], [*range(9), *range(5), 0, 0, 3]]
PREFIX = [17, 12]
ROWS = 40  # of token_pos_in_items_ptr for each request

PAGED = Case(
    "items", (37, 11), (54, 29), 4, 2, 64, dtype=torch.float16, mask=MaskKind.CUSTOM, page_size=5
)
RAGGED = dataclasses.replace(PAGED, page_size=0)


def mask_of(request: int, rows: int, keys: int) -> torch.Tensor:
    """Computes the mask from its definition, element by element."""
    prefix, in_items = PREFIX[request], IN_ITEMS[request]
    kept = torch.zeros(rows, keys, dtype=torch.bool)
    for row in range(rows):
        token = keys - rows + row
        for key in range(token + 1):
            own = token >= prefix and key > token - in_items[token - prefix]
            kept[row, key] = token < prefix or key < prefix or own
    return kept


def made(case: Case, target):
    inputs = build(case, device=target.device)
    lengths = zip(case.qo_lens, case.kv_lens, strict=True)
    inputs.masks = [mask_of(i, *pair) for i, pair in enumerate(lengths)]
    inputs.custom_mask = None
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    return inputs, wrapper


def items(device, kind=torch.uint16) -> dict:
    padded = [[*row, *[0] * (ROWS - len(row))] for row in IN_ITEMS]
    flat = torch.tensor(padded).flatten()[: ROWS + len(IN_ITEMS[1])]
    return {
        "prefix_len_ptr": torch.tensor(PREFIX).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": flat.to(kind).to(device),
        "token_pos_in_items_len": ROWS,
        "max_item_len_ptr": torch.tensor([18, 8]).to(kind).to(device),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 0}, {"position": Position.ROPE}, {"window_left": 9}, {"soft_cap": 30.0}],
    ids=["paged", "ragged", "rope", "window", "cap"],
)
def test_items(target, changes, causal):
    inputs, wrapper = made(dataclasses.replace(PAGED, **changes), target)
    runner.plan(wrapper, inputs, causal=causal, **items(target.device))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_arrays_on_the_host_and_of_other_dtypes(target):
    inputs, wrapper = made(RAGGED, target)
    runner.plan(wrapper, inputs, **items("cpu", torch.int32))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_tokens_behind_the_last_position_are_delimiters(target):
    inputs, wrapper = made(RAGGED, target)
    short = items("cpu")
    short["token_pos_in_items_ptr"] = torch.tensor([row[:16] for row in IN_ITEMS]).flatten()
    short["token_pos_in_items_len"] = 16
    runner.plan(wrapper, inputs, **short)
    inputs.masks[0][16:, 17:] = False
    inputs.masks[1][10:, 12:] = False
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_a_length_beyond_the_array_takes_no_memory(target):
    inputs, wrapper = made(dataclasses.replace(RAGGED, qo_lens=(37,), kv_lens=(54,)), target)
    first = {name: value[:1] for name, value in items("cpu").items() if name.endswith("ptr")}
    first["token_pos_in_items_ptr"] = torch.tensor(IN_ITEMS[0])
    runner.plan(wrapper, inputs, **first, token_pos_in_items_len=2**31 - 1)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_a_graph_replays_other_items(target, recorder):  # noqa: F811
    stage = Stage(PAGED, Limits(2, rows=48, pages=64), target, masked=True)
    plain = stage.make(PAGED.qo_lens, PAGED.kv_lens)
    stage.plan(plain)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    graph.replay()
    stage.check(plain)
    inputs = stage.make(PAGED.qo_lens, PAGED.kv_lens, seed=1)
    lengths = zip(PAGED.qo_lens, PAGED.kv_lens, strict=True)
    inputs.masks = [mask_of(i, *pair) for i, pair in enumerate(lengths)]
    stage.plan(inputs, custom_mask=None, **items(target.device))
    graph.replay()
    stage.check(inputs)


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_attributes_show_the_arrays(target, case):
    inputs, wrapper = made(case, target)
    given = items(target.device)
    neutral = {name: 0 if name.endswith("_len") else None for name in given}
    for planned in (neutral, given, neutral):
        runner.plan(wrapper, inputs, causal=True, **planned)
        for name, value in planned.items():
            assert getattr(wrapper, f"_{name}") is value
            setattr(wrapper, f"_{name}", value)
            other = neutral[name] if planned is given else given[name]
            with pytest.raises(NotImplementedError, match="multi-item"):
                setattr(wrapper, f"_{name}", other)


REFUSED = {
    "prefix_len_ptr": {"prefix_len_ptr": None},
    "prefix_len_ptr has shape": {"prefix_len_ptr": torch.ones(1).int()},
    "prefix_len_ptr is": {"prefix_len_ptr": torch.ones(2)},
    "token_pos_in_items_ptr=None": {"token_pos_in_items_ptr": None},
    "token_pos_in_items_ptr is": {"token_pos_in_items_ptr": torch.ones(80)},
    "token_pos_in_items_len must": {"token_pos_in_items_len": 1.5},
    "max_item_len_ptr": {"max_item_len_ptr": torch.ones(1).int()},
    "custom_mask": {"custom_mask": torch.ones(37 * 54 + 11 * 29, dtype=torch.bool)},
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=REFUSED)
@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_refusals(target, case, message, options):
    inputs, wrapper = made(case, target)
    runner.plan(wrapper, inputs, **items(target.device))
    options = {name: target.to(v) if hasattr(v, "to") else v for name, v in options.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        runner.plan(wrapper, inputs, **{**items(target.device), **options})
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
