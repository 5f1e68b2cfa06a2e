"""Two segments share one work list: each row, head and key once, in one order and one balance."""

import numpy as np
import pytest
from planned import ITEM_COST, check, indptr, partial_bytes, plan, planner, segment
from test_planner_coverage import random_lengths, random_options

LAUNCH_OPTIONS = ("num_sms", "l2_bytes", "family", "schedule")


def random_pair(rng):
    """Returns two segments with lengths, heads, tiles, masks and splits of their own."""
    segments, launch = [], {}
    for _ in range(2):
        options = random_options(rng)
        launch = {name: options.pop(name) for name in LAUNCH_OPTIONS}
        segments.append(segment(*random_lengths(rng), **options))
    return {"segments": segments, **launch}


@pytest.mark.parametrize("seed", range(120))
def test_random_pairs(seed):
    check(plan(**random_pair(np.random.default_rng(seed))))


@pytest.mark.parametrize("seed", range(30))
def test_random_workspace(seed):
    """Both segments' partials share what there is, however little."""
    rng = np.random.default_rng(seed)
    pair = random_pair(rng)
    for one in pair["segments"]:
        one.pop("fixed_split_size", None)
    check(plan(**pair, float_workspace_bytes=int(rng.integers(0, 1 << 22))))


@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 512}])
@pytest.mark.parametrize("seed", range(10))
def test_graph_layouts_are_the_same_for_every_plan(seed, split):
    rng = np.random.default_rng(seed)
    first = None
    for _ in range(3):
        decode_kv, prefill_kv = rng.integers(0, 3000, 6), rng.integers(0, 2000, 2)
        prefill_rows = rng.integers(0, 60, 2)
        pair = [
            segment(prefill_rows, prefill_kv, tile_m=128, graph_max_rows=120, causal=True),
            segment([1] * 6, decode_kv, num_qo_heads=8, graph_max_rows=6, **split),
        ]
        made = plan(segments=pair, schedule="persistent", num_sms=8)
        check(made)
        fixed = (made.sizes["num_ctas"], made.sizes["segments"], made.layout)
        first = first or fixed
        assert fixed == first


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


def test_requests_name_their_segments():
    made = launch(prefill(), decode())
    assert made.requests["segment"].tolist() == [0, 0] + [1] * 8
    assert made.requests["qo_begin"].tolist() == [0, 700, *range(8)]


def test_empty_segments():
    nothing = segment([], [])
    launch(prefill(), nothing)
    launch(nothing, nothing)
    alone, beside = plan(**decode(), num_sms=132), launch(nothing, decode())
    assert beside.sizes["num_items"] == alone.sizes["num_items"]
    assert (beside.items["row_begin"] == alone.items["row_begin"]).all()
    assert (beside.items["chunk"] == alone.items["chunk"]).all()


@pytest.mark.parametrize("order", [0, 1])
def test_segments_run_side_by_side(order):
    """Each longest first, both all the time: at any item each has done its share of its work."""
    pair = [prefill([7000], [7000]), decode(batch=200)]
    pair = [one | {"disable_split_kv": True} for one in pair]
    made = plan(segments=pair[:: 1 - 2 * order], schedule="one_per_item", num_sms=4)
    costs = made.costs()
    segments = made.requests["segment"][made.items["request"]]
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
    assert loads.sum() == costs.sum()
    assert loads.max() - loads.min() <= costs.max()
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


MANY = [prefill([900] * 6, [900] * 6, ctas_per_sm=1), decode(300, 700, ctas_per_sm=1)]


def test_the_last_tenth_begins_late():
    """Lists behind those of the slots hold a tenth of the work, each a part of what is left."""
    slots = 6
    made = persistent(*MANY, num_sms=slots)
    costs, loads = made.costs(), made.loads()
    late = loads[slots:]
    assert len(late) > slots
    assert abs(late.sum() - costs.sum() / 10) <= costs.max()
    assert loads[:slots].max() - loads[:slots].min() <= costs.max()
    left = late.sum() - np.concatenate([[0], np.cumsum(late)[:-1]])
    assert (late <= left / slots + costs.max()).all()
    # As slots become free.
    ends = np.sort(loads[:slots])
    for load in late:
        ends[0] += load
        ends.sort()
    assert ends[-1] <= costs.sum() / slots + costs.max()
    assert made.sizes["makespan_kv_tiles"] <= np.ceil(costs.sum() / slots + costs.max())


def test_little_work_one_segment_and_graphs_begin_at_once():
    few = persistent(prefill([60], [900], ctas_per_sm=1), decode(4), num_sms=8)
    assert few.sizes["num_ctas"] == 8
    for lone in MANY:
        made = plan(**lone, schedule="persistent", num_sms=6)
        assert made.sizes["num_ctas"] == 6
    graph = [{**one, "graph_max_rows": 6000} for one in MANY]
    assert persistent(*graph, num_sms=6).sizes["num_ctas"] == 6


REFUSED = [
    ({"num_qo_heads": 7}, "segment 1: num_qo_heads = 7 is not a multiple of num_kv_heads = 2"),
    ({"qo_indptr": [0, 5, 3]}, r"segment 1: qo_indptr\[2\] = 3 is less than"),
    ({"window_left": -3}, "segment 1: window_left = -3"),
    ({"graph_max_rows": 9}, "segment 1: graph_max_rows = 9, segment 0 has 0: a CUDA graph holds"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refusals_name_the_segment(change, message):
    with pytest.raises(ValueError, match=message):
        planner.validate(segments=[prefill(), decode(batch=2) | change])


def test_fixed_splits_that_fit_only_alone():
    """The workspace is for both."""
    split = {"fixed_split_size": 512}
    pair = [decode(**split), decode(batch=4, **split)]
    rows = [8 * 16 * 8, 4 * 16 * 8]  # requests, heads, chunks of 4000 keys
    needed = sum(partial_bytes(count) for count in rows)
    assert launch(*pair, float_workspace_bytes=needed).layout["float_bytes"] == needed
    both = "has {} bytes; the fixed_split_size of both segments need " + str(needed)
    for bytes_left, message in (
        (needed - 16, both),
        (partial_bytes(rows[0]), both),
        (partial_bytes(rows[0]) - 16, "fixed_split_size = 512 needs"),
    ):
        with pytest.raises(ValueError, match=message.format(bytes_left)):
            plan(segments=pair, float_workspace_bytes=bytes_left)


def test_a_launch_numbers_its_items_together():
    """Either segment has fewer than 2^31 items, both have more."""
    half = segment([1 << 24] * 4, [1] * 4, num_qo_heads=32, num_kv_heads=32, tile_m=1)
    planner.validate(segments=[half, half])
    with pytest.raises(ValueError, match="work items for each of 32 KV heads"):
        plan(segments=[half, half])


def test_pages():
    paged = {"kv_indptr": indptr([3, 1]), "last_page_len": [5, 16], "page_size": 16}
    made = launch(prefill(), segment([1, 1], [], **paged))
    assert made.requests["kv_len"].tolist() == [900, 300, 37, 16]
