"""Two segments share one work list: each row, head and key once, in one order and one balance."""

import numpy as np
import pytest
from planned import ITEM_COST, check, plan, segment


def prefill(qo_lens=(700, 300), kv_lens=(900, 300), **options):
    return segment(qo_lens, kv_lens, **{"causal": True, "tile_m": 128} | options)


def decode(batch=8, kv_len=4000, **options):
    return segment([1] * batch, [kv_len] * batch, num_qo_heads=16, **options)


def launch(*pair, **options):
    """Plans two segments and checks what holds for any plan."""
    made = plan(segments=list(pair), **options)
    check(made)
    return made


def persistent(*pair, num_sms):
    return launch(*pair, schedule="persistent", num_sms=num_sms)


def test_empty_segments():
    nothing = segment([], [])
    launch(prefill(), nothing)
    launch(nothing, nothing)
    alone, beside = plan(**decode(), num_sms=132), launch(nothing, decode())
    assert (beside.items[["row_begin", "chunk"]] == alone.items[["row_begin", "chunk"]]).all()


@pytest.mark.parametrize("order", [1, -1])
def test_segments_run_side_by_side(order):
    """Each longest first, both all the time: at any item each has done its share of its work."""
    pair = [prefill([7000], [7000]), decode(batch=200)][::order]
    pair = [one | {"disable_split_kv": True} for one in pair]
    made = plan(segments=pair, schedule="one_per_item", num_sms=4)
    costs, segments = made.costs(), made.requests["segment"][made.items["request"]]
    shares = []
    for s in range(2):
        of_segment = np.where(segments == s, costs, 0)
        assert (np.diff(costs[segments == s]) <= 0).all()
        shares.append(np.cumsum(of_segment) / of_segment.sum())
    assert np.abs(shares[0] - shares[1]).max() < 0.03


def test_nothing_begins_too_late():
    """An item of 30000 keys takes four fifths of the launch's time: all four begin with it."""
    long = decode(batch=2, kv_len=30_000, disable_split_kv=True)
    made = plan(segments=[prefill([4000] * 4, [4000] * 4), long], schedule="persistent", num_sms=16)
    loads = made.loads()
    assert loads.max() <= 1.1 * loads.mean()


def test_one_balance():
    """No CTA has much more than its share of both kinds of work."""
    made = persistent(prefill(), decode(), num_sms=4)
    costs, loads = made.costs(), made.loads()
    assert np.ptp(loads) <= costs.max()
    assert made.sizes["makespan_kv_tiles"] == np.ceil(loads.max())
    segments = made.requests["segment"][made.items["request"]]
    assert any(len(set(one)) == 2 for one in made.lists(segments))


def test_a_full_machine_leaves_decode_whole():
    """A decode batch that is split alone is not where prefill fills the machine anyway."""
    assert plan(**decode(batch=2), num_sms=132).sizes["num_merges"] > 0
    full = prefill([8000] * 4, [8000] * 4, num_qo_heads=32, num_kv_heads=32)
    assert plan(segments=[full, decode(batch=2)]).sizes["num_merges"] == 0


def test_a_decode_that_outlasts_the_prefill_is_split():
    made = launch(prefill(), decode(batch=1, kv_len=100_000))
    assert made.sizes["segments"][1]["num_merges"] > 0
    assert made.costs().max() < 100_000 / 64 / 4 + ITEM_COST


@pytest.mark.parametrize("beside", [prefill(), decode(3, 50_000), segment([], [])])
def test_a_fixed_split_does_not_look_at_its_neighbour(beside):
    made = launch(beside, decode(fixed_split_size=512))
    assert set(made.requests["chunk_keys"][made.requests["segment"] == 1]) == {512}
    assert made.sizes["segments"][1]["num_merges"] == 8 * 2


def test_the_smaller_number_of_ctas_counts():
    """A CTA runs items of both segments."""
    made = persistent(prefill(ctas_per_sm=1), decode(ctas_per_sm=4), num_sms=3)
    loads = made.loads()
    assert loads[:2].sum() < 0.85 * loads.sum() < loads[:3].sum()


@pytest.mark.parametrize("schedule", ["persistent", "one_per_item"])
def test_equal_items_of_segments_with_other_numbers_of_heads(schedule):
    """36 items of a KV tile on twelve slots."""
    pair = [segment([1] * 6, [64] * 6, num_qo_heads=n, num_kv_heads=n) for n in (2, 4)]
    made = launch(*pair, schedule=schedule, num_sms=6)
    assert made.sizes["makespan_kv_tiles"] == 3 * (1 + ITEM_COST)


MANY = [prefill([900] * 6, [900] * 6, ctas_per_sm=1), decode(300, 700, ctas_per_sm=1)]


def test_the_last_tenth_begins_late():
    """Lists behind those of the slots hold a tenth of the work, each a part of what is left."""
    slots = 6
    made = persistent(*MANY, num_sms=slots)
    costs, loads = made.costs(), made.loads()
    late = loads[slots:]
    assert len(late) > slots
    assert abs(late.sum() - costs.sum() / 10) <= costs.max()
    assert np.ptp(loads[:slots]) <= costs.max()
    left = late.sum() - np.concatenate([[0], np.cumsum(late)[:-1]])
    assert (late <= left / slots + costs.max()).all()
    ends = np.sort(loads[:slots])  # late lists run as slots become free
    for load in late:
        ends[0] += load
        ends.sort()
    assert ends[-1] <= costs.sum() / slots + costs.max()
    assert made.sizes["makespan_kv_tiles"] <= np.ceil(costs.sum() / slots + costs.max())


def test_little_work_one_segment_and_graphs_begin_at_once():
    few = persistent(prefill([60], [900], ctas_per_sm=1), decode(4), num_sms=8)
    graph = persistent(*({**one, "graph_max_rows": 6000} for one in MANY), num_sms=6)
    lone = [plan(**one, schedule="persistent", num_sms=6) for one in MANY]
    assert [made.sizes["num_ctas"] for made in (few, graph, *lone)] == [8, 6, 6, 6]
