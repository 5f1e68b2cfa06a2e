"""Plans with another policy of the pre-pass than that of the environment."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from preflash._plan import prepass


def forced(name: str) -> AbstractContextManager:
    """Inside of it: "auto", "never" or "always"."""
    return mock.patch.object(prepass, "_given", name)
