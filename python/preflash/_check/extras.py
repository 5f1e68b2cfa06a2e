"""Packages that preflash imports where they are installed, and the extra that brings each."""

from __future__ import annotations

import importlib.util

# The extra of pyproject.toml that installs a module.
EXTRAS = {
    "matplotlib": "trace",
    "rich": "rich",
    "transformers": "transformers",
}


def pip_line(module: str) -> str:
    """Returns the command that installs a module of EXTRAS."""
    return f"pip install 'preflash[{EXTRAS[module]}]'"


def is_installed(module: str) -> bool:
    """Returns True if a module is found; does not import it."""
    return importlib.util.find_spec(module) is not None


def not_imported(module: str, error: Exception) -> str:
    """Returns the sentence for a module whose import raised `error`."""
    return f"the module {module} does not import ({error}): {pip_line(module)}"
