"""Memory around a tensor that nobody may write, and memory that nobody may write at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from preflash.testing.case import Garbage
from preflash.testing.inputs import PAD_COLUMNS, Inputs, fill_poison

_BESIDE = 256  # bytes on each side of a workspace
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, in which NaN equals itself and -0 is not 0."""
    return t.view(_INTEGERS[t.element_size()])


class Guarded:
    """A tensor cut out of a larger one; what is left of that must stay as it is.

    given: what a call gets, which may have more around `view`.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        cut: Callable[[torch.Tensor], torch.Tensor],
        given: torch.Tensor | None = None,
    ) -> None:
        self._whole = whole
        self._cut = cut
        self._before = whole.clone()
        self.view = cut(whole)
        self.given = self.view if given is None else given

    def spilled(self) -> int:
        """Number of changed elements around the tensor."""
        changed = bits(self._whole) != bits(self._before)
        self._cut(changed).fill_(False)
        return int(changed.sum())

    def failures(self, name: str, got: torch.Tensor | None) -> list[str]:
        """Returns what is wrong with an output that a call was given. got: the returned tensor."""
        found = []
        if got is not None and got is not self.given:
            found.append(f"{name} is not the tensor that was given")
        if spilled := self.spilled():
            found.append(f"{name}: {spilled} elements around it were written")
        return found


@dataclass(frozen=True)
class Padding:
    """Tokens of q and of what comes of it that no request has."""

    before: int = 0
    behind: int = 0

    def around(self, tokens: int) -> int:
        return self.before + tokens + self.behind


def output(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    garbage: Garbage,
    *,
    strided: bool,
    padding: Padding = Padding(),
    tokens_last: bool = False,
) -> Guarded:
    """Garbage of a shape with memory of somebody else before and behind it, and with `strided` also
    behind every row. The call is given the padding around its tokens, too."""
    tokens = len(shape) - 1 if tokens_last else 0
    given = list(shape)
    given[tokens] = padding.around(shape[tokens])
    rows, *middle, columns = given
    behind = PAD_COLUMNS if strided else 0
    whole = torch.empty(rows + 2, *middle, columns + behind, dtype=dtype, device=device)
    fill_poison(whole, torch.Generator().manual_seed(0), garbage)

    def outer(t: torch.Tensor) -> torch.Tensor:
        return t[1 : 1 + rows, ..., :columns]

    def cut(t: torch.Tensor) -> torch.Tensor:
        return outer(t).narrow(tokens, padding.before, shape[tokens])

    return Guarded(whole, cut, outer(whole))


def workspace(num_bytes: int, device: torch.device | str) -> Guarded:
    """Exactly that much scratch memory. All bits are set, so that whatever reads it gets NaN."""
    whole = torch.full((num_bytes + 2 * _BESIDE,), 255, dtype=torch.uint8, device=device)
    return Guarded(whole, lambda t: t[_BESIDE : _BESIDE + num_bytes])


class Untouched:
    """The whole memory of some tensors, which must stay as it is."""

    def __init__(self, tensors: dict[str, torch.Tensor | None]) -> None:
        given = {name: t for name, t in tensors.items() if t is not None}
        self._memory = {name: _storage_of(t) for name, t in given.items()}
        self._before = {name: t.clone() for name, t in self._memory.items()}

    def changed(self) -> list[str]:
        """Returns a failure for each tensor that something was written into."""
        return [
            f"{name}, an input, was written"
            for name, t in self._memory.items()
            if not torch.equal(t, self._before[name])
        ]


def untouched_inputs(inputs: Inputs) -> Untouched:
    scales = {f"scale_{name}": getattr(inputs.scales, name) for name in "qkv"}
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks")}
    return Untouched(tensors | scales | {"packed mask": inputs.packed_custom_mask})


def around_workspace(workspace: Guarded) -> list[str]:
    spilled = workspace.spilled()
    return [f"{spilled} bytes around the workspace were written"] if spilled else []


def _storage_of(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
