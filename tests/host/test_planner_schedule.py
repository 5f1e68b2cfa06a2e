"""Items run longest first and in even lists, and K/V of one head is read close in time."""

import heapq
from itertools import pairwise

import numpy as np
import pytest
from planned import check, checked, indptr, plan, ragged

GQA = {"num_qo_heads": 32, "num_kv_heads": 8}
ONE_CTA = {"family": "sm90", "tile_m": 128, "tile_n": 128, "ctas_per_sm": 1}


def random_case(seed, **options):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(2, 12))
    qo_lens = rng.integers(1, 600, batch)
    kv_lens = qo_lens + rng.integers(0, 6000, batch)
    return ragged(qo_lens, kv_lens, causal=True, num_sms=int(rng.integers(1, 40)), **options)


@pytest.mark.parametrize("seed", range(12))
def test_lists_are_longest_first_and_even(seed):
    made = plan(**random_case(seed, schedule="persistent"))
    costs, loads = made.costs(), made.loads()
    assert all((np.diff(one) <= 0).all() for one in made.lists(costs))
    assert made.sizes["num_ctas"] == min(made.cta_slots(), made.sizes["num_items"])
    assert loads.min() > 0
    assert np.ceil(loads.max()) == made.sizes["makespan_kv_tiles"]
    # The CTA that got the last item of the busiest list was the least loaded one then.
    lasts = costs[made.cta_begin[1:] - 1]
    busiest = int(loads.argmax())
    assert loads[busiest] - lasts[busiest] <= loads.min()
    # Longest-first list scheduling: 4/3 of the best at most, which no bound below can exceed.
    bound = max(costs.max(), np.ceil(costs.sum() / made.sizes["num_ctas"]))
    assert loads.max() <= bound + costs.min() or loads.max() <= 4 / 3 * bound + 1


@pytest.mark.parametrize("seed", range(6))
def test_one_per_item_has_the_same_items_longest_first(seed):
    one_per_item = plan(**random_case(seed, schedule="one_per_item"))
    assert one_per_item.layout["cta_begin"] == -1
    assert (np.diff(one_per_item.costs()) <= 0).all()
    persistent = plan(**random_case(seed, schedule="persistent"))
    assert sorted(persistent.items.tolist()) == sorted(one_per_item.items.tolist())
    assert persistent.merges.tolist() == one_per_item.merges.tolist()


@pytest.mark.parametrize("lengths", [[8192] * 4, [4096, 700, 50], [300] * 8, [300] * 9])
def test_two_ctas_that_share_items_have_one_list(lengths):
    """132 SMs have 66 lists, and splits for as many: the plan of 66 SMs with a CTA an item."""
    case = ragged([1] * len(lengths), lengths, **GQA, family="sm90", ctas_per_sm=1)
    pairs, single = plan(**case, ctas_per_item=2), plan(**case | {"num_sms": 66})
    check(pairs)
    assert pairs.image == single.image
    assert pairs.sizes["num_ctas"] <= 66


@pytest.mark.parametrize(("batch", "num_sms"), [(3, 4), (11, 4), (12, 4), (40, 9), (7, 60)])
def test_equal_items_are_dealt_evenly(batch, num_sms):
    options = {"num_sms": num_sms, "schedule": "persistent", "disable_split_kv": True}
    made = checked([1] * batch, [300] * batch, **GQA, **options)
    assert np.ptp(np.diff(made.cta_begin)) <= 1
    # Each CTA takes its items in the order of the batch.
    assert all(heads == sorted(heads) for heads in made.lists(made.heads()))


@pytest.mark.parametrize("options", [{}, {"fixed_split_size": 256}, {"num_sms": 2}])
def test_requests_of_one_length_are_cut_alike(options):
    """Neighbours of the same lengths have the pieces of the first one, with rows of their own."""
    qo_lens = [1] * 3 + [0] * 2 + [70] * 3 + [1, 70, 1] + [5] * 2
    kv_lens = [900] * 3 + [40] * 2 + [2000] * 3 + [900, 2000, 900] + [900] * 2
    made = checked(qo_lens, kv_lens, causal=True, schedule="persistent", **options)
    pieces = {}
    for item in made.items:
        place = (int(item[name]) for name in ("row_begin", "kv_head", "chunk"))
        pieces.setdefault(int(item["request"]), set()).add(tuple(place))
    lengths = list(zip(qo_lens, kv_lens, strict=True))
    for request, length in enumerate(lengths):
        assert pieces.get(request) == pieces.get(lengths.index(length))


def test_default_schedule():
    """Kernels of sm90 and those of CUDA graphs are persistent."""
    for family, graph_max_rows, persistent in [
        ("cpu", 0, False), ("sm80", 0, False), ("sm80", 64, True), ("sm90", 0, True),
    ]:  # fmt: skip
        made = plan(**ragged([5], [80], family=family, graph_max_rows=graph_max_rows))
        assert (made.cta_begin is not None) == persistent


def test_equal_items_keep_request_and_head_together():
    heads = plan(**ragged([512] * 3, [512] * 3, **GQA, disable_split_kv=True)).heads()
    assert sum(a != b for a, b in pairwise(heads)) == len(set(heads)) - 1


def in_flight(made, slots, share=1.0):
    """Returns the most (request, head) pairs of `slots` items in a row, of the first `share`."""
    heads = made.heads()[: int(len(made.items) * share)]
    return max(len(set(heads[i : i + slots])) for i in range(0, len(heads) - slots, slots // 4))


def test_sections_keep_kv_inside_the_l2():
    """Equal causal requests: longest-first alone goes round all their heads at each length."""
    case = ragged([8192] * 4, [8192] * 4, causal=True, **GQA, tile_m=128)
    budget_pairs = 12
    kv_bytes = 8192 * 256 * 2
    plain = plan(**case, l2_bytes=0)
    grouped = plan(**case, l2_bytes=budget_pairs * kv_bytes * 8 // 5)
    assert sorted(plain.items.tolist()) == sorted(grouped.items.tolist())
    assert in_flight(plain, 264) > 30
    # Both sections are in flight at the boundary between them.
    assert in_flight(grouped, 264) <= 2 * budget_pairs
    assert len(set(grouped.heads()[264 : 2 * 264])) <= budget_pairs


SHORT = ragged([1024] * 16, [1024] * 16, causal=True, num_qo_heads=16, num_kv_heads=16)
SHORT |= {"tile_m": 128, "tile_n": 128, "ctas_per_sm": 1, "l2_bytes": 50 << 20}


def test_sections_of_short_items_are_read_in_time():
    """60 pairs would fit the L2, but not be read from memory while items of 8 tiles run."""
    made = plan(**SHORT, schedule="one_per_item")
    # The last section is larger, so that it ends evenly.
    assert in_flight(made, 132, share=0.75) <= 4 * 8, "four sections of 8 pairs, 4 MiB"
    assert in_flight(plan(**SHORT | {"l2_bytes": 0}, schedule="one_per_item"), 132) > 100


def test_sm90_lists_are_even_in_measured_time():
    made = plan(**SHORT, family="sm90")
    loads = made.loads()
    assert loads.max() <= 1.02 * loads.mean()
    assert np.ptp(np.diff(made.cta_begin)) >= 3, "even in items is another thing"


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "lens", "most"),
    [
        (32, 8, [4096], 1.04),
        (32, 8, [300, 4000, 2000], 1.1),
        (32, 8, [8192, 1000, 500, 500, 3000], 1.06),
        (32, 32, [1024] * 4, 1.04),
        (16, 16, [16384], 1.04),
        (16, 16, [1024] * 4, 1.04),  # four items for each CTA
    ],
)
def test_lists_are_even_whatever_a_custom_mask_keeps(num_qo_heads, num_kv_heads, lens, most):
    """The planner does not see the bits: a causal mask and a full one have to spread evenly."""
    heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
    mask_indptr = indptr(n**2 // 8 for n in lens)
    case = ragged(lens, lens, mask_indptr=mask_indptr, **heads, **ONE_CTA)
    made = plan(**case, l2_bytes=50 << 20)
    num_keys = np.array(lens)[made.items["request"]]
    last_token = (made.items["row_begin"] + 127) * num_kv_heads // num_qo_heads
    overhead = 1.3  # in KV tiles
    of_causal = -(-np.minimum(last_token + 1, num_keys) // 128)
    for tiles in (of_causal, -(-num_keys // 128)):
        loads = np.array([one.sum() for one in made.lists(tiles + overhead)])
        assert loads.max() <= most * loads.mean()


def test_a_small_last_section_joins_the_one_before():
    """One (request, head) pair left over must not run its longest items last of all."""
    pairs = 8 * GQA["num_kv_heads"]
    case = ragged([4096] * 8, [4096] * 8, causal=True, **GQA, tile_m=128)
    l2_bytes = (pairs - 1) // 3 * 4096 * 256 * 2 * 8 // 5 + 1
    costs = plan(**case, l2_bytes=l2_bytes).costs()
    assert (np.diff(costs) > 0).any()
    free = [0] * 264  # each item goes to the slot that is free first
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    assert max(free) <= -(-costs.sum() // 264) + 8


def long_and_short(heads, lengths):
    """Returns short requests that fill the machine, but not while the long ones run."""
    options = {"num_qo_heads": heads, "num_kv_heads": heads, **ONE_CTA}
    return ragged(lengths, lengths, causal=True, **options)


@pytest.mark.parametrize(
    ("case", "l2_bytes", "most"),
    [
        *((random_case(i, schedule="persistent", **GQA), 4 << 20, 1.1) for i in range(6)),
        (long_and_short(2, [4096] * 5 + [256] * 40), 50 << 20, 1.05),
        (long_and_short(8, [8192] + [256] * 12), 50 << 20, 1.05),
        (long_and_short(16, [8192] + [512] * 16), 50 << 20, 1.05),
    ],
)
def test_sections_do_not_cost_balance(case, l2_bytes, most):
    plain, grouped = (plan(**case, l2_bytes=bytes_) for bytes_ in (0, l2_bytes))
    assert sorted(plain.items.tolist()) == sorted(grouped.items.tolist())
    assert grouped.sizes["makespan_kv_tiles"] <= most * plain.sizes["makespan_kv_tiles"]


ONE_REQUEST = ragged([16384], [16384], causal=True, **GQA, tile_m=128)
DECODE = ragged([1] * 16, [9000 + 64 * i for i in range(16)], **GQA, fixed_split_size=1024)


@pytest.mark.parametrize(
    ("case", "l2_bytes"),
    [(ONE_REQUEST, 1 << 40), (DECODE | {"num_sms": 1}, 1 << 20)],
    ids=["everything fits", "decode reads nothing twice"],
)
def test_batches_that_are_not_grouped(case, l2_bytes):
    assert np.array_equal(plan(**case, l2_bytes=l2_bytes).items, plan(**case, l2_bytes=0).items)


def test_very_unequal_costs_stay_in_order():
    """Beyond the sort's resolution items may swap, by less than 1/2048 of the longest."""
    lengths = [70_001 * i for i in range(200)]
    made = plan(**ragged([1] * 200, lengths, disable_split_kv=True), schedule="persistent")
    costs = made.costs()
    assert all((np.diff(one) <= costs.max() / 2048).all() for one in made.lists(costs))
