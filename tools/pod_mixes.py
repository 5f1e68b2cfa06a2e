"""Random mixes of prefill and decode: one launch for both beside a launch for each.

    python tools/pod_mixes.py 50 --backend fa3 --seed 7 [--seconds 200] [--json FILE]

Kernel time by graph replay in microseconds, both interleaved, each slot after some milliseconds of
matrix product; median of 9. `planned` is what plan() takes. The last line is the largest part that
what is planned takes of the sequence's time: not above 1.02 is wanted.
"""

import argparse
import json
import math
import random
import statistics
import time

import preflash
import torch
from preflash._device import backends
from preflash.cli.batches import batches
from preflash.testing import runner, timing
from preflash.testing.case import Case, KvForm, MaskKind

_MOST_BYTES = 6 << 30  # of K and V on either side
_HEADS = ((32, 8), (64, 8), (28, 4), (16, 16), (8, 1))
_HONEST = backends.Backend.prefer_two_launches


def _log_uniform(rng, low, high):
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw(rng: random.Random) -> tuple[Case, Case]:
    """A prefill, of whole prompts or of chunks behind past keys, and a decode batch."""
    heads = rng.choice(_HEADS)
    dim = rng.choice([128] * 4 + [64, 256])
    page_size = rng.choice([16, 16, 64, 1])
    count, tokens = rng.choice([1, 1, 2, 4]), _log_uniform(rng, 256, 12000)
    past = rng.choice([0, 0, _log_uniform(rng, 256, 30000)])
    batch, keys = _log_uniform(rng, 2, 256), _log_uniform(rng, 256, 16000)
    row = 2 * 2 * heads[1] * dim
    batch = max(1, min(batch, _MOST_BYTES // (row * keys)))
    shared = {"page_size": page_size, "form": KvForm.COMBINED, "dtype": torch.bfloat16}
    prefill = Case(
        "prefill", (tokens,) * count, (tokens + past,) * count, *heads, dim,
        mask=MaskKind.CAUSAL, **shared,
    )  # fmt: skip
    kv_lens = tuple(max(1, round(keys * rng.uniform(0.7, 1.3))) for _ in range(batch))
    return prefill, Case("decode", (1,) * batch, kv_lens, *heads, dim, **shared)


def planned(sides, backend, apart):
    """A run of both, as one launch, as one for each, or (None) as plan() decides; its launches."""
    if apart is not None:
        backends.Backend.prefer_two_launches = lambda *_: apart
    try:
        buffer = runner.workspace(torch.device("cuda"), 256 << 20)
        wrapper = preflash.BatchPODWithPagedKVCacheWrapper(buffer, backend=backend)
        case = sides[0].case
        tables = [
            table
            for one in sides
            for table in (one.qo_indptr, one.kv_indptr, one.indices, one.last_page_len)
        ]
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        wrapper.plan(*tables, *heads, q_data_type=case.dtype)
        tensors = [tensor for one in sides for tensor in (one.q, one.cache)]
        outputs = {
            f"out_{side}": torch.empty_like(one.q) for side, one in zip("pd", sides, strict=True)
        }
        run = lambda: wrapper.run(*tensors, causal_p=True, **outputs)  # noqa: E731
        run()
        return run, wrapper.launches
    finally:
        backends.Backend.prefer_two_launches = _HONEST


def measure(sides, backend, product) -> dict:
    calls = {"one": planned(sides, backend, False), "two": planned(sides, backend, True)}
    launches = {name: count for name, (_, count) in calls.items()}
    if launches["one"] != 1:
        return {}
    of_plan = planned(sides, backend, None)[1]
    replays = {name: timing.GraphReplay(call, 4) for name, (call, _) in calls.items()}
    taken = {name: [] for name in replays}
    for turn in range(9):
        for name in sorted(replays, reverse=turn % 2 == 1):
            product()
            taken[name].append(replays[name].sample())
    us = {name: statistics.median(samples) for name, samples in taken.items()}
    return us | {"planned": "one" if of_plan == 1 else "two"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json")
    args = parser.parse_args()
    rng, until = random.Random(args.seed), time.monotonic() + args.seconds
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    results = []
    while len(results) < args.count and time.monotonic() < until:
        cases = draw(rng)
        sides = [next(batches(case, torch.device("cuda"))) for case in cases]
        us = measure(sides, args.backend, lambda: [torch.mm(a, a) for _ in range(4)])
        if not us:
            continue
        prefill, decode = cases
        results.append(
            us
            | {
                "heads": (prefill.num_qo_heads, prefill.num_kv_heads, prefill.head_dim),
                "page_size": prefill.page_size,
                "prefill": (prefill.qo_lens, prefill.kv_lens),
                "decode": decode.kv_lens,
            }
        )
        tokens, keys = prefill.qo_lens, prefill.kv_lens
        print(
            f"{prefill.num_qo_heads}/{prefill.num_kv_heads} d{prefill.head_dim} "
            f"p{prefill.page_size} {len(tokens)}x{tokens[0]} on {keys[0]} + "
            f"{len(decode.kv_lens)}x{sum(decode.kv_lens) // len(decode.kv_lens)}: one "
            f"{us['one']:.1f}, two {us['two']:.1f}, {us['one'] / us['two']:.3f}, "
            f"planned {us['planned']}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)
    worst = max(us[us["planned"]] / us["two"] for us in results)
    mean = statistics.mean(us[us["planned"]] / us["two"] for us in results)
    best = statistics.mean(min(us["one"], us["two"]) / us["two"] for us in results)
    print(f"{len(results)} mixes: planned / sequence {mean:.3f} in the mean, at best {best:.3f}; "
          f"worst {worst:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
