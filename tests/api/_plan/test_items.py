"""Multi-item scoring: items see their prefix and themselves, as the float64 oracle does."""

import dataclasses

import pytest
import torch
from graph_stage import Limits, Stage, capture
from planned_cases import check_run, planned
from preflash.testing import Case, MaskKind, Position, runner
from refusals import refused

# 17 tokens of prefix, two items between delimiters; 12, some of them before the queries.
IN_ITEMS = [[*range(17), *range(19), 0], [*range(9), *range(5), 0, 0, 3]]
PREFIX = [17, 12]
ROWS = 40  # of token_pos_in_items_ptr for each request

PAGED = Case(
    "items", (37, 11), (54, 29), 4, 2, 64, dtype=torch.float16, mask=MaskKind.CUSTOM, page_size=5
)
RAGGED = dataclasses.replace(PAGED, page_size=0)


def masks_of(case: Case) -> list[torch.Tensor]:
    masks = []
    for prefix, in_items, rows, keys in zip(
        PREFIX, IN_ITEMS, case.qo_lens, case.kv_lens, strict=False
    ):
        kept = torch.zeros(rows, keys, dtype=torch.bool)
        for row in range(rows):
            token = keys - rows + row
            for key in range(token + 1):
                own = token >= prefix and key > token - in_items[token - prefix]
                kept[row, key] = token < prefix or key < prefix or own
        masks.append(kept)
    return masks


def items(device, kind=torch.uint16) -> dict:
    padded = [[*row, *[0] * (ROWS - len(row))] for row in IN_ITEMS]
    flat = torch.tensor(padded).flatten()[: ROWS + len(IN_ITEMS[1])]
    return {
        "prefix_len_ptr": torch.tensor(PREFIX).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": flat.to(kind).to(device),
        "token_pos_in_items_len": ROWS,
        "max_item_len_ptr": torch.tensor([18, 8]).to(kind).to(device),
    }


def made(case: Case, target):
    """Returns inputs with the mask of the items, and a wrapper that is planned without one."""
    inputs, wrapper = planned(dataclasses.replace(case, mask=MaskKind.NONE), target)
    inputs = dataclasses.replace(inputs, case=case, masks=masks_of(case))
    return inputs, wrapper


@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 0}, {"position": Position.ROPE}, {"window_left": 9}, {"soft_cap": 30.0}],
    ids=["paged", "ragged", "rope", "window", "cap"],
)
def test_items(target, changes):
    inputs, wrapper = made(dataclasses.replace(PAGED, **changes), target)
    for causal, given in ((False, items(target.device)), (True, items("cpu", torch.int32))):
        runner.plan(wrapper, inputs, causal=causal, **given)
        check_run(inputs, wrapper)


def test_tokens_after_the_last_position_are_delimiters(target):
    inputs, wrapper = made(RAGGED, target)
    short = torch.tensor([row[:16] for row in IN_ITEMS]).flatten()
    changed = {"token_pos_in_items_ptr": short, "token_pos_in_items_len": 16}
    runner.plan(wrapper, inputs, **items("cpu") | changed)
    inputs.masks[0][16:, 17:] = False
    inputs.masks[1][10:, 12:] = False
    check_run(inputs, wrapper)


def test_a_length_beyond_the_array_takes_no_memory(target):
    inputs, wrapper = made(dataclasses.replace(RAGGED, qo_lens=(37,), kv_lens=(54,)), target)
    first = {name: value[:1] for name, value in items("cpu").items() if name.endswith("ptr")}
    first["token_pos_in_items_ptr"] = torch.tensor(IN_ITEMS[0])
    runner.plan(wrapper, inputs, **first, token_pos_in_items_len=2**31 - 1)
    check_run(inputs, wrapper)


def test_a_graph_replays_other_items(target, recorder):
    stage = Stage(PAGED, Limits(2, rows=48, pages=64), target, masked=True)
    plain = stage.make(PAGED.qo_lens, PAGED.kv_lens)
    stage.plan(plain)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    graph.replay()
    stage.check(plain)
    inputs = stage.make(PAGED.qo_lens, PAGED.kv_lens, seed=1)
    inputs.masks = masks_of(PAGED)
    stage.plan(inputs, custom_mask=None, **items(target.device))
    graph.replay()
    stage.check(inputs)


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=["paged", "ragged"])
def test_attributes_show_the_arrays(target, case):
    inputs, wrapper = made(case, target)
    given = items(target.device)
    neutral = {name: 0 if name.endswith("_len") else None for name in given}
    for plan in (neutral, given, neutral):
        runner.plan(wrapper, inputs, causal=True, **plan)
        for name, value in plan.items():
            assert getattr(wrapper, f"_{name}") is value
            setattr(wrapper, f"_{name}", value)
            other = (neutral if plan is given else given)[name]
            refused("multi-item", setattr, wrapper, f"_{name}", other, error=NotImplementedError)
