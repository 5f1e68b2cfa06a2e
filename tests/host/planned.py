"""Plans as a kernel finds them: the int workspace decoded with the layout that came with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from preflash import _core
from preflash_harness import planner

FINAL = -1
ITEM_COST, PARTIAL_COST = 2, 1  # work.h, CostModel: what an item costs besides its KV tiles

REQUEST = np.dtype(
    [
        ("qo_begin", "<i4"),
        ("qo_len", "<i4"),
        ("kv_begin", "<i4"),
        ("kv_len", "<i4"),
        ("mask_begin", "<i8"),
        ("chunk_keys", "<i4"),
        ("segment", "<i4"),
    ]
)
ITEM = np.dtype(
    [
        ("request", "<i4"),
        ("row_begin", "<i4"),
        ("kv_head", "<i2"),
        ("chunk", "<i2"),
        ("partial_row", "<i4"),
    ]
)
MERGE = np.dtype(
    [
        ("request", "<i4"),
        ("row_begin", "<i4"),
        ("kv_head", "<i2"),
        ("num_chunks", "<i2"),
        ("first_row", "<i4"),
    ]
)

SEGMENT_DEFAULTS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "tile_m": 64,
    "tile_n": 64,
    "ctas_per_sm": 2,
    "causal": False,
    "window_left": -1,
    "chunk_size": 0,
}
LAUNCH_DEFAULTS = {"num_sms": 132, "float_workspace_bytes": 128 << 20}
DEFAULTS = SEGMENT_DEFAULTS | LAUNCH_DEFAULTS


def traits_of(case: dict) -> _core.FamilyTraits:
    return _core.traits_of(getattr(_core.Family, case.get("family", "sm80")))


def rows_per_tile(case: dict) -> int:
    """The packed rows of one query tile: token-aligned where the family says so and one fits."""
    tile_m, group = case["tile_m"], case["num_qo_heads"] // case["num_kv_heads"]
    if traits_of(case).token_aligned and group <= tile_m:
        return tile_m // group * group
    return tile_m


def partial_bytes(rows: int, head_dim: int = 128) -> int:
    """Float workspace of so many partial rows: head_dim floats and an LSE of two each."""
    return -(-rows * head_dim * 4 // 16) * 16 + -(-rows * 8 // 16) * 16


def indptr(lengths) -> list[int]:
    return [0, *accumulate(int(n) for n in lengths)]


def ragged(qo_lens, kv_lens, **options) -> dict:
    """Arguments of a ragged case with these lengths."""
    return DEFAULTS | {"qo_indptr": indptr(qo_lens), "kv_indptr": indptr(kv_lens)} | options


def keep_mask(
    qo_len: int, kv_len: int, *, causal: bool, window_left: int, chunk_size: int = 0
) -> np.ndarray:
    """keep[row, key] of one request, written from the definition."""
    row = np.arange(qo_len)[:, None]
    key = np.arange(kv_len)[None, :]
    diagonal = row + kv_len - qo_len
    keep = np.ones((qo_len, kv_len), bool)
    if causal:
        keep &= key <= diagonal
    if window_left >= 0:
        keep &= key >= diagonal - window_left
    if chunk_size > 0:
        keep &= key >= diagonal // chunk_size * chunk_size
    return keep


def segment(qo_lens, kv_lens, **options) -> dict:
    """Arguments of one of two segments."""
    return SEGMENT_DEFAULTS | {"qo_indptr": indptr(qo_lens), "kv_indptr": indptr(kv_lens)} | options


@dataclass
class Planned:
    """A plan and the arguments that it was made from. With one segment `case` has those of both."""

    case: dict
    segments: list[dict]
    sizes: dict
    layout: dict
    image: bytes
    canary: bytes
    requests: np.ndarray
    items: np.ndarray
    merges: np.ndarray
    cta_begin: np.ndarray | None

    @property
    def tile_rows(self) -> int:
        return rows_per_tile(self.case)

    def segment_of(self, item) -> dict:
        """The arguments of the segment that the item's or merge's request names."""
        return self.segments[self.requests[item["request"]]["segment"]]

    def group_of(self, item) -> int:
        options = self.segment_of(item)
        return options["num_qo_heads"] // options["num_kv_heads"]

    def tile_rows_of(self, item) -> int:
        return rows_per_tile(self.segment_of(item))

    def live_rows(self, item) -> int:
        """Rows of the item's or merge's tile: less than a tile has where the request ends."""
        rows = int(self.requests[item["request"]]["qo_len"]) * self.group_of(item)
        return min(self.tile_rows_of(item), rows - int(item["row_begin"]))

    def keys_of(self, item) -> tuple[int, int]:
        """The keys of the item's chunk, cut at the end of its request."""
        request = self.requests[item["request"]]
        begin = int(item["chunk"]) * int(request["chunk_keys"])
        return begin, min(begin + int(request["chunk_keys"]), int(request["kv_len"]))

    def kv_tiles_of(self, item) -> int:
        """KV tiles that the item's rows touch in its chunk, from touched_tiles()."""
        request, options = self.requests[item["request"]], self.segment_of(item)
        last = int(item["row_begin"]) + self.live_rows(item) - 1
        key_begin, key_end = self.keys_of(item)
        begin, _, _, end = planner.touched_tiles(
            qo_len=int(request["qo_len"]),
            kv_len=int(request["kv_len"]),
            window_left=options["window_left"],
            chunk_size=options["chunk_size"],
            causal=options["causal"],
            first=int(item["row_begin"]) // self.group_of(item),
            last=last // self.group_of(item),
            key_begin=key_begin,
            key_end=key_end,
            tile_n=options["tile_n"],
        )
        return end - begin

    def item_cost(self, options: dict) -> float:
        """In KV tiles."""
        keys = traits_of(self.case).item_keys
        return round(4 * keys / options["tile_n"]) / 4 if keys else ITEM_COST

    def cost_of(self, item) -> float:
        partial = PARTIAL_COST if item["partial_row"] != FINAL else 0
        return self.kv_tiles_of(item) + self.item_cost(self.segment_of(item)) + partial

    def costs(self) -> np.ndarray:
        """Costs of all items in order; equal (request, row, chunk) are looked up once."""
        known: dict = {}
        out = []
        for item in self.items:
            key = (int(item["request"]), int(item["row_begin"]), int(item["chunk"]))
            if key not in known:
                known[key] = self.cost_of(item)
            out.append(known[key])
        return np.array(out)

    def cta_slots(self) -> int:
        return self.case["num_sms"] * min(options["ctas_per_sm"] for options in self.segments)


def _table(image: bytes, offset: int, count: int, dtype) -> np.ndarray:
    return np.frombuffer(image, dtype=dtype, offset=max(offset, 0), count=count)


def plan(**case) -> Planned:
    """Plans a case and decodes the image that a kernel would read. Two segments are given as
    segments=[segment(...), segment(...)], beside what the launch has."""
    case = (LAUNCH_DEFAULTS if "segments" in case else DEFAULTS) | case
    segments = case.get("segments", [case])
    made = planner.plan(**case)
    sizes, layout = made["sizes"], made["layout"]
    image = made["image"][: layout["int_bytes"]]
    merges = [
        _table(image, place["merges"], size["num_merges"] if place["merges"] >= 0 else 0, MERGE)
        for place, size in zip(layout["segments"], sizes["segments"], strict=True)
    ]
    if "segments" not in case:
        layout |= layout["segments"][0]
    has_ctas = layout["cta_begin"] >= 0
    return Planned(
        case=case,
        segments=[one | {"family": case.get("family", "sm80")} for one in segments],
        sizes=sizes,
        layout=layout,
        image=image,
        canary=made["image"][layout["int_bytes"] :],
        requests=_table(image, layout["requests"], sizes["num_requests"], REQUEST),
        items=_table(image, layout["items"], sizes["num_items"], ITEM),
        merges=np.concatenate(merges),
        cta_begin=_table(image, layout["cta_begin"], sizes["num_ctas"] + 1, "<i4")
        if has_ctas
        else None,
    )


def check_covered(plan: Planned) -> None:
    """Every kept (row, key) of every KV head is in exactly one item, every row is written once."""
    keys_seen, rows_written = [], []
    for request in plan.requests:
        options = plan.segments[request["segment"]]
        heads = options["num_kv_heads"]
        rows = int(request["qo_len"]) * (options["num_qo_heads"] // heads)
        keys_seen.append(np.zeros((heads, rows, int(request["kv_len"])), np.int16))
        rows_written.append(np.zeros((heads, rows), np.int16))

    for item in plan.items:
        r, head, row = int(item["request"]), int(item["kv_head"]), int(item["row_begin"])
        tile_rows = plan.tile_rows_of(item)
        begin, end = plan.keys_of(item)
        assert row % tile_rows == 0
        assert row < rows_written[r].shape[1]
        keys_seen[r][head, row : row + tile_rows, begin:end] += 1
        if item["partial_row"] == FINAL:
            rows_written[r][head, row : row + tile_rows] += 1
    for merge in plan.merges:
        rows = rows_written[int(merge["request"])][int(merge["kv_head"])]
        rows[int(merge["row_begin"]) : int(merge["row_begin"]) + plan.tile_rows_of(merge)] += 1

    for request, seen, written in zip(plan.requests, keys_seen, rows_written, strict=True):
        options = plan.segments[request["segment"]]
        keep = keep_mask(
            int(request["qo_len"]),
            int(request["kv_len"]),
            causal=options["causal"],
            window_left=options["window_left"],
            chunk_size=options["chunk_size"],
        )
        kept_rows = np.repeat(keep, options["num_qo_heads"] // options["num_kv_heads"], axis=0)
        assert (seen[:, kept_rows] == 1).all()
        assert (seen <= 1).all()
        assert (written == 1).all()


def check_chunks(plan: Planned) -> None:
    """Chunk lengths are whole tiles, and partial items never run over nothing."""
    for request in plan.requests:
        assert request["chunk_keys"] > 0
        assert request["chunk_keys"] % plan.segments[request["segment"]]["tile_n"] == 0
    for item in plan.items:
        if item["partial_row"] != FINAL:
            assert plan.kv_tiles_of(item) > 0


def check_merges(plan: Planned) -> None:
    """Partial rows are disjoint, used once, in chunk order, and inside the float workspace."""
    for index in range(len(plan.segments)):
        _check_merges_of(plan, index)
    begins_and_ends, float_bytes = [], 0
    for options, place, size in zip(
        plan.segments, plan.layout["segments"], plan.sizes["segments"], strict=True
    ):
        rows, head_dim = size["num_partial_rows"], options.get("head_dim_vo", 128)
        float_bytes += partial_bytes(rows, head_dim)
        if rows:
            o, lse = place["partial_o"], place["partial_lse"]
            begins_and_ends += [(o, o + rows * head_dim * 4), (lse, lse + rows * 8)]
    assert plan.layout["float_bytes"] == float_bytes <= plan.case["float_workspace_bytes"]
    assert not begins_and_ends or begins_and_ends[0][0] == 0
    for (_, end), (begin, _) in pairwise([*begins_and_ends, (float_bytes, float_bytes)]):
        assert begin % 16 == 0
        assert end <= begin


def _check_merges_of(plan: Planned, index: int) -> None:
    """Each segment numbers its partial rows from 0."""
    by_row, taken = {}, []
    for item in plan.items:
        row = int(item["partial_row"])
        if row == FINAL or plan.requests[item["request"]]["segment"] != index:
            continue
        by_row[row] = item
        taken.append((row, row + plan.live_rows(item)))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert not taken or taken[0][0] == 0
    used, room = taken[-1][1] if taken else 0, plan.sizes["segments"][index]["num_partial_rows"]
    assert used == sum(end - begin for begin, end in taken) <= room
    if not plan.segments[index].get("graph_max_rows"):
        assert used == room
    merged = []
    for merge in plan.merges:
        if plan.requests[merge["request"]]["segment"] != index:
            continue
        if merge["num_chunks"] == 0:
            rows = int(plan.requests[merge["request"]]["qo_len"]) * plan.group_of(merge)
            assert merge["row_begin"] >= rows, "a surplus merge must have no rows"
            continue
        assert merge["num_chunks"] > 1
        first, rows = int(merge["first_row"]), plan.live_rows(merge)
        begins = [first + chunk * rows for chunk in range(merge["num_chunks"])]
        merged.extend(begins)
        parts = [by_row[begin] for begin in begins]
        for part in parts:
            for name in ("request", "row_begin", "kv_head"):
                assert part[name] == merge[name]
        chunks = [int(part["chunk"]) for part in parts]
        assert chunks == list(range(chunks[0], chunks[0] + len(chunks)))
    assert sorted(merged) == sorted(by_row)
    assert len(set(merged)) == len(merged)


def check_image(plan: Planned) -> None:
    """Tables are aligned, in order, apart, and nothing is written behind the last one."""
    assert plan.canary == b"\xa5" * len(plan.canary)
    assert len(plan.canary) >= 64
    ends = [
        (plan.layout["requests"], plan.requests.nbytes),
        (plan.layout["items"], plan.items.nbytes),
        (plan.layout["cta_begin"], 0 if plan.cta_begin is None else plan.cta_begin.nbytes),
    ]
    for place, size in zip(plan.layout["segments"], plan.sizes["segments"], strict=True):
        ends.append((place["merges"], size["num_merges"] * MERGE.itemsize))
    places = [(begin, size) for begin, size in ends if begin >= 0]
    assert all(begin % 16 == 0 for begin, _ in places)
    for (begin, size), (following, _) in pairwise(places):
        assert begin + size <= following
    assert places[-1][0] + places[-1][1] <= plan.layout["int_bytes"]


def check(plan: Planned) -> None:
    """All that holds for any plan."""
    check_image(plan)
    check_chunks(plan)
    check_covered(plan)
    check_merges(plan)
    tiles = sum(plan.kv_tiles_of(item) for item in plan.items)
    assert plan.sizes["num_kv_tiles"] == tiles
    if plan.cta_begin is not None:
        assert plan.cta_begin[0] == 0
        assert plan.cta_begin[-1] == plan.sizes["num_items"]
        assert (np.diff(plan.cta_begin) >= 0).all()
    else:
        assert plan.sizes["num_ctas"] == plan.sizes["num_items"]
