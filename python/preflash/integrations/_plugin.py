"""The plugin that an engine loads from preflash's entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._compat.patch import patch_engine


def load(register: Callable[[], Any], backend: str) -> None:
    """Patches flashinfer if PREFLASH_PATCH is set, and registers an engine's attention backend.

    A failure is printed: a plugin must not keep the engine from starting. backend: its name and the
    engine's, for that message.
    """
    patch_engine()
    try:
        register()
    except Exception as error:
        print(f"preflash: no attention backend {backend}: {error}", file=sys.stderr)
