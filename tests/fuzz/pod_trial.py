"""Problems for prefill beside decode: both wrappers, both sides with lengths and options of their
own as far as the wrapper has them, with garbage around both sides."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from unittest import mock

import preflash
import torch
from preflash._pod import pod_plan
from preflash.testing import runner
from preflash.testing.case import Case, MaskKind
from preflash.testing.inputs import Inputs, build
from preflash.testing.oracle import reference

from . import guarded
from .altered_inputs import surrounded
from .guarded import GivenOutputs, Result, watched_inputs
from .problems import Brought, RunOptions
from .random_cases import (
    Limits,
    contradiction,
    drawn,
    first_request,
    random_case,
    random_fields,
    unflattened,
    with_defaults,
)
from .wrapper_trial import Verdict, add_garbage, inverted_mask, judged, scale_arguments

_ABSENT = ("head_dim_vo", "soft_cap", "sinks", "head_scales", "o_dtype", "fixed_split_size",
           "disable_split_kv", "batch_invariant", "q_quantization")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PodCall(RunOptions):
    """Arguments and forms of both cases' call. Pairs are (prefill, decode)."""

    return_lse: tuple[bool, bool] = drawn((True, True), *itertools.product((True, False), repeat=2))
    out: tuple[Brought, Brought] = drawn(*itertools.product(Brought, repeat=2))
    lse: tuple[Brought, Brought] = drawn(*itertools.product(Brought, repeat=2))
    lse_layout: str = drawn("NH", "HN")
    workspace: int = drawn(1 << 22, 1 << 14, 0)
    replan: bool = drawn(*[False] * 4, True)  # the wrapper had another plan and prefill before
    repeat: bool = drawn(*[False] * 4, True)  # two runs give the same bits
    two_launches: bool = drawn(False, False, True)  # also where a kernel takes both sides
    # Of one request: the plan has another prefill before; run() gets the decode options again.
    shorter_before: bool = drawn(*[False] * 4, True)
    repeated: bool = drawn(False, False, True)
    other_mask: bool = drawn(False, True)  # beside a packed mask a dense one, which does not count
    padding: int = drawn(0, 0, 2)  # rows of q before and after those of requests, with a qo_indptr


@dataclasses.dataclass(frozen=True)
class PodProblem:
    """Both sides, with options that the wrapper has."""

    single: bool  # PODWithPagedKVCacheWrapper: a prefill of one request, ragged
    prefill: Case
    decode: Case
    call: PodCall
    seed: int

    @property
    def padding(self) -> int:
        """Rows around those of requests, which only batches with a qo_indptr may have."""
        return 0 if self.single else self.call.padding


def draw(seed: int, index: int, limits: Limits) -> PodProblem:
    """Draws problem `index` of `seed`."""
    rng = random.Random(f"pod {seed} {index}")
    single = rng.random() < 0.5
    work = dataclasses.replace(limits, work=limits.work / 2)
    prefill, decode = (
        with_defaults(random_case(rng, name, work), _ABSENT) for name in ("prefill", "decode")
    )
    most = int(limits.work / (2 * prefill.num_qo_heads * prefill.head_dim * 8))
    kv_lens = _at_most(decode.kv_lens, most)
    queries = [1] if single else [0, 1, 1, 1, 1, 3]
    decode = dataclasses.replace(
        decode,
        qo_lens=tuple(rng.choice(queries) for _ in kv_lens),
        kv_lens=kv_lens,
        num_qo_heads=prefill.num_qo_heads,
        num_kv_heads=prefill.num_kv_heads,
        head_dim=prefill.head_dim,
        mask=MaskKind.NONE,
        page_size=decode.page_size or rng.choice([1, 3, 16, 64]),
    )
    if rng.random() < 0.06:
        decode = dataclasses.replace(decode, qo_lens=(), kv_lens=())
    call = PodCall(**random_fields(rng, PodCall))
    if single:
        prefill = first_request(prefill)
    else:  # run() has one return_lse
        prefill = _like(prefill, decode, rng)
        call = dataclasses.replace(call, return_lse=call.return_lse[:1] * 2)
    return PodProblem(single, _possible(prefill), _possible(decode), call, rng.randrange(2**31))


def _at_most(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    lengths = list(lengths)
    while sum(lengths) > max(total, len(lengths)):
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
    return tuple(lengths)


def _like(prefill: Case, decode: Case, rng: random.Random) -> Case:
    """Takes over the options that plan() has once for both sides."""
    shared = ("dtype", "kv_dtype", "page_size", "layout", "window_left", "sm_scale", "position",
              "rope_scale", "rope_theta")  # fmt: skip
    if decode.page_size != 1:
        prefill = unflattened(prefill)
    prefill = dataclasses.replace(prefill, **{name: getattr(decode, name) for name in shared})
    none = {"qo_lens": (), "kv_lens": (), "mask": MaskKind.NONE} if rng.random() < 0.06 else {}
    return dataclasses.replace(prefill, **none)


def _possible(case: Case) -> Case:
    """Returns the case with dtypes and numbers that go together."""
    if contradiction(case):
        case = with_defaults(case, ["magnitude"])
    if contradiction(case):
        dtype = torch.bfloat16 if case.dtype.itemsize == 1 else case.dtype
        case = dataclasses.replace(case, dtype=dtype, kv_dtype=None)
    return case


def _logits_options(case: Case) -> dict[str, object]:
    names = ("window_left", "sm_scale", "rope_scale", "rope_theta")
    return {"pos_encoding_mode": case.position.value} | {n: getattr(case, n) for n in names}


def plan_decode(wrapper, inputs: Inputs, arrays: Sequence = (), **overrides) -> None:
    """Plans a decode batch, or the decode side of a POD wrapper. arrays: by default its table."""
    case = inputs.case
    arrays = arrays or (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype_kv}
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    wrapper.plan(*arrays, *heads, **_logits_options(case) | dtypes | overrides)


class Pod:
    """PODWithPagedKVCacheWrapper on inputs of a prefill of one request and of a decode batch."""

    make = preflash.PODWithPagedKVCacheWrapper

    def __init__(
        self, prefill: Inputs, decode: Inputs, buffer: torch.Tensor, backend: str, **options
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.wrapper = self.make(buffer, decode.case.layout, backend=backend, **options)

    def plan(self, **overrides) -> None:
        plan_decode(self.wrapper, self.decode, **overrides)

    def tensors(self) -> dict:
        prefill, decode = self.prefill, self.decode
        tokens, kv_len = int(prefill.case.layout == "HND"), prefill.case.kv_lens[0]
        k, v = (t.narrow(tokens, 0, kv_len) for t in (prefill.k, prefill.v))
        return {
            "q_p": prefill.q, "k_p": k, "v_p": v, "q_d": decode.q,
            "paged_kv_cache_d": decode.cache,
        }  # fmt: skip

    def mask(self, dense: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a mask of all elements in the shape that run() takes."""
        case = self.prefill.case
        return None if dense is None else dense.view(case.qo_lens[0], case.kv_lens[0])

    def options(self) -> dict:
        """Returns the options of run() that the case of the prefill has."""
        return {
            "custom_mask_p": self.mask(self.prefill.custom_mask),
            "packed_custom_mask_p": self.prefill.packed_custom_mask,
            "causal_p": self.prefill.pipeline.causal,
            **_options_of(self.prefill.case, "p"),
            "return_lse_p": True,
            "return_lse_d": True,
        }

    def launch(self, options: dict) -> tuple:
        """Runs once, and sets the variants of both sides, of one launch or of two."""
        results = self.wrapper.run(**options)
        ids = self.wrapper.variant.split(", ")
        self.prefill.variant, self.decode.variant = ids[0], ids[-1]
        return results


class BatchPod(Pod):
    """BatchPODWithPagedKVCacheWrapper on inputs of a prefill batch and of a decode batch."""

    make = preflash.BatchPODWithPagedKVCacheWrapper

    def arrays(self) -> list[torch.Tensor]:
        names = ("qo_indptr", "kv_indptr", "indices", "last_page_len")
        return [getattr(inputs, name) for inputs in (self.prefill, self.decode) for name in names]

    def plan(self, arrays: Sequence = (), **overrides) -> None:
        plan_decode(self.wrapper, self.decode, arrays or self.arrays(), **overrides)

    def tensors(self) -> dict:
        prefill, decode = self.prefill, self.decode
        caches = {"paged_kv_cache_p": prefill.cache, "paged_kv_cache_d": decode.cache}
        return {"q_p": prefill.q, "q_d": decode.q, **caches}

    def mask(self, dense: torch.Tensor | None) -> torch.Tensor | None:
        return dense

    def options(self) -> dict:
        names = ("custom_mask_p", "packed_custom_mask_p", "causal_p")
        options = super().options()
        return {"return_lse": True} | {name: options[name] for name in names}


@judged
def examine(problem: PodProblem, backend: str, device: torch.device) -> Verdict:
    """Plans and runs the wrapper."""
    call, single = problem.call, problem.single
    sides = [_Side(problem, name, device) for name in ("prefill", "decode")]
    changes = [watched_inputs(side.inputs) for side in sides]
    workspace = guarded.workspace(call.workspace, device)
    make = Pod if single else BatchPod
    with mock.patch.object(pod_plan, "_forced_apart", call.two_launches):
        pod = make(sides[0].given, sides[1].given, workspace.given, backend)
        if call.replan:
            window = 3 if problem.decode.window_left < 0 else -1
            pod.plan(window_left=window, sm_scale=0.1)
            _run(pod, call, sides, causal_p=not sides[0].inputs.pipeline.causal, v_scale=3.0)
        pod.plan()
        if call.shorter_before and single:
            given, tokens = pod.tensors(), int(problem.prefill.layout == "HND")
            given["q_p"] = given["q_p"][: problem.prefill.qo_lens[0] // 2]
            for name in ("k_p", "v_p"):
                given[name] = given[name].narrow(tokens, 0, problem.prefill.kv_lens[0] // 2)
            pod.wrapper.run(**given, kv_layout_p=problem.prefill.layout)
        # Options of the decode side that run() may be given again.
        repeated = {"causal_d": True, **_options_of(problem.decode, "d")}
        repeated = repeated if call.repeated and single else {}
        results = _results(pod, call, sides, repeated)
        again = _results(pod, call, sides, repeated) if call.repeat else results
    verdict = Verdict(workspace.failures("workspace"))
    together = all(sum(side.inputs.case.qo_lens) for side in sides) and not call.two_launches
    if backend == "cpu" and pod.wrapper.launches != (1 if together else 2):
        verdict.failures.append(f"{pod.wrapper.launches} launches")
    for side, result, other, changed in zip(sides, results, again, changes, strict=True):
        failures = result.failures + changed()
        if result.out.shape[0]:
            report = side.compare(result)
            failures += report.failures
            verdict.worst = max(verdict.worst, report.worst)
        if not other.same_bits(result):
            failures.append("a second run has other bits")
        verdict.failures += [f"{side.name}: {failure}" for failure in failures]
    return verdict


class _Side:
    """Inputs and outputs of one side, and its expected result."""

    def __init__(self, problem: PodProblem, name: str, device: torch.device) -> None:
        self.name, self._call, self._padding = name, problem.call, problem.padding
        self._index = int(name == "decode")
        options = {"index_device": "cpu", "seed": problem.seed + self._index}
        self.inputs = build(getattr(problem, name), device=device, **options)
        add_garbage(self.inputs)
        self.given = surrounded(self.inputs, self._padding)

    def fresh_outputs(self) -> dict[str, object]:
        """Options of run() for new outputs of this side."""
        call, suffix = self._call, self.name[0]
        given = {"out": call.out[self._index], "lse": call.lse[self._index]}
        self._outputs = GivenOutputs(self.inputs, call.lse_layout, self._padding, **given)
        return {f"out_{suffix}": self._outputs.out, f"lse_{suffix}": self._outputs.lse}

    def settle(self, returned) -> Result:
        self.inputs.variant = self.given.variant
        return self._outputs.settle(returned, with_lse=self._call.return_lse[self._index])

    def compare(self, result: Result):
        pipeline, call = self.inputs.pipeline, self._call
        if self.name == "decode":
            pipeline = call.scaled(pipeline)
        expected = reference(self.inputs, pipeline=pipeline)
        return runner.compare(self.inputs, result.out, result.lse, expected, lse_base=call.lse_base)


def _results(pod: Pod, call: PodCall, sides: list[_Side], repeated: dict) -> list[Result]:
    returned = _run(pod, call, sides, **repeated)
    if pod.wrapper.device.type == "cuda":
        torch.cuda.synchronize(pod.wrapper.device)
    return [side.settle(one) for side, one in zip(sides, returned, strict=True)]


def _run(pod: Pod, call: PodCall, sides: list[_Side], **overrides) -> tuple:
    options = {
        **pod.tensors(), **pod.options(),
        "lse_base": call.lse_base, "lse_layout": call.lse_layout,
        **scale_arguments(call, pod.wrapper.device),
        **sides[0].fresh_outputs(), **sides[1].fresh_outputs(),
    }  # fmt: skip
    if call.other_mask and options["packed_custom_mask_p"] is not None:
        options["custom_mask_p"] = pod.mask(inverted_mask(pod.prefill))
    for name, value in zip(("return_lse_p", "return_lse_d"), call.return_lse, strict=True):
        options["return_lse" if "return_lse" in options else name] = value
    return pod.launch(options | overrides)


def _options_of(case: Case, side: str) -> dict[str, object]:
    """Returns options of one side that run() has with one request."""
    options = {"kv_layout": case.layout, **_logits_options(case)}
    return {f"{name}_{side}": value for name, value in options.items()}
