"""Problems for the decode functions: those of the wrappers with one query per request, by
BatchDecodeWithPagedKVCacheWrapper, with the buffers of a CUDA graph too, or by
single_decode_with_kv_cache."""

from __future__ import annotations

import dataclasses
import functools
import random

import preflash
import torch
from preflash.testing import runner
from preflash.testing.case import Case, KvForm, MaskKind, Sinks

from . import wrapper_trial
from .problems import Also, Brought, Entry, Problem, Scratch
from .problems import draw as draw_problem
from .random_cases import Limits
from .wrapper_trial import SCALE_NAMES, Trial, Verdict, judged

_LOOKED_AT = (Also.NOTHING, Also.REPEAT, Also.SPOILT, Also.ALONE)


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """Entry.SINGLE is single_decode_with_kv_cache."""

    problem: Problem
    graph: bool = False  # the wrapper has the buffers of a CUDA graph
    tensor_cores: bool = False


def draw(seed: int, index: int, limits: Limits) -> DecodeProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"decode {seed} {index}")
    drawn = draw_problem(seed, index, limits)
    case, also = _adapted(rng, drawn.case, drawn.call.entry), drawn.also
    of_plan = ("graph", "hints", "bounds", "other_mask", "long_mask")
    call = dataclasses.replace(drawn.call, padding=0, **dict.fromkeys(of_plan, False))
    if call.entry is Entry.SINGLE:  # makes its outputs
        absent = Brought.ABSENT
        call = dataclasses.replace(call, out=absent, lse=absent, lse_base="log2", lse_layout="NH")
    if case.is_invariant:
        call = dataclasses.replace(call, scratch=Scratch.WHOLE)
    meaningless = (also is Also.SPOILT and case.batch_size < 2) or (
        also is Also.ALONE and not case.is_invariant
    )
    if also not in _LOOKED_AT or meaningless:
        also = Also.NOTHING
    return DecodeProblem(
        Problem(case, call, also, drawn.seed),
        graph=call.entry is not Entry.SINGLE and rng.random() < 0.3,
        tensor_cores=rng.random() < 0.5,
    )


def _adapted(rng: random.Random, case: Case, entry: Entry) -> Case:
    """The case with one query per request, without what the function does not take."""
    if entry is Entry.SINGLE:
        form = KvForm.SEPARATE if case.form is KvForm.FLAT else case.form
        plain = {"sinks": Sinks.NONE, "head_scales": False, "o_dtype": None, "form": form}
    else:
        plain = {"page_size": case.page_size or rng.choice([1, 3, 16, 64])}
    return dataclasses.replace(
        case,
        qo_lens=(1,) * case.batch_size,
        head_dim_vo=None,
        mask=MaskKind.NONE,
        **plain,
    )


@judged
def examine(problem: DecodeProblem, backend: str, device: torch.device) -> Verdict:
    make = functools.partial(_DecodeTrial, decode=problem)
    return wrapper_trial.examine_with(make, problem.problem, backend, device)


class _DecodeTrial(Trial):
    """A problem ready to run: its wrapper planned, with a workspace that holds NaN."""

    def __init__(self, problem: Problem, inputs, backend: str, decode: DecodeProblem) -> None:
        self._decode = decode
        super().__init__(problem, inputs, backend)

    def another(self, inputs) -> Trial:
        return _DecodeTrial(self.problem, inputs, self.backend, self._decode)

    def _plan_with(self, overrides: dict[str, object]) -> None:
        arguments, options = self._plan_arguments()
        self.wrapper.plan(*arguments, **{**options, **overrides})

    def _plan_overrides(self) -> dict[str, object]:
        overrides = super()._plan_overrides()
        overrides.pop("causal", None)
        return overrides

    def _wrapper(self, buffer: torch.Tensor):
        inputs = self.inputs
        options = {}
        if self._decode.graph:
            for name, array, spare in (
                ("indptr", inputs.kv_indptr, 0),
                ("indices", inputs.indices, 5),
                ("last_page_len", inputs.last_page_len, 0),
            ):
                size, device = array.numel() + spare, inputs.q.device
                options[f"paged_kv_{name}_buffer"] = torch.zeros(
                    size, dtype=torch.int32, device=device
                )
        return preflash.BatchDecodeWithPagedKVCacheWrapper(
            buffer,
            inputs.case.layout,
            use_cuda_graph=self._decode.graph,
            use_tensor_cores=self._decode.tensor_cores,
            backend=self.backend,
            **options,
        )

    def _plan_arguments(self) -> tuple[tuple, dict]:
        (_, *arguments), options = runner.plan_arguments(self.inputs)
        for name in ("custom_mask", "packed_custom_mask", "causal"):
            del options[name]
        return tuple(arguments), options

    def call(self, **overrides):
        if self.problem.call.entry is not Entry.SINGLE:
            return super().call(**overrides)
        inputs, case, call = self.inputs, self.inputs.case, self.problem.call
        tokens = 0 if case.layout == "NHD" else 1
        returned = preflash.single_decode_with_kv_cache(
            inputs.q[0],
            *(t.narrow(tokens, 0, case.kv_lens[0]) for t in (inputs.k, inputs.v)),
            kv_layout=case.layout,
            use_tensor_cores=self._decode.tensor_cores,
            **self._logits_options(),
            **self._scales(*SCALE_NAMES),
            return_lse=call.return_lse,
        )
        if call.return_lse:
            return tuple(one.unsqueeze(0) for one in returned)
        return returned.unsqueeze(0)

    def _forward(self):
        call = self.problem.call
        forward = self.wrapper.forward_return_lse if call.return_lse else self.wrapper.forward
        return forward(
            self.inputs.q,
            self.inputs.cache,
            **self._logits_options(),
            **self._scales("k_scale", "v_scale"),
        )

    def _logits_options(self) -> dict[str, object]:
        case = self.inputs.case
        return {
            "pos_encoding_mode": case.position.value,
            "window_left": case.window_left,
            "logits_soft_cap": case.soft_cap,
            "sm_scale": case.sm_scale,
            "rope_scale": case.rope_scale,
            "rope_theta": case.rope_theta,
        }
