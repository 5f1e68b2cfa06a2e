"""Collects the faults of cpp/variants, so that one run of the generator reports all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vocabulary import SpecError


class Misses:
    """The sentences of one check of the data files, in the order in which they were found."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        self._sentences[sentence] = None

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects a SpecError of the block instead of raising it."""
        try:
            yield
        except SpecError as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """Raises one SpecError with a line per sentence, if there are any."""
        if self._sentences:
            raise SpecError("\n".join(self._sentences))
