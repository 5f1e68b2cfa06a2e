"""The name PREFLASH among vLLM's attention backends."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import Any

from .. import _plugin

NAME = "PREFLASH"
CLASS_PATH = f"{__package__}.backend.PreflashBackend"
_REGISTRY = "vllm.v1.attention.backends.registry"


def load_plugin() -> None:
    """Entry point `vllm.general_plugins`."""
    _plugin.load(register, f"{NAME} in vLLM")


def register() -> Enum:
    """Makes `--attention-backend PREFLASH` known to vLLM in this process.

    A second call changes nothing. vLLM imports the backend's class when it selects the backend.

    Returns:
        AttentionBackendEnum.PREFLASH.

    Raises:
        ImportError: vLLM is not installed, or a release without this registry.
    """
    backends = importlib.import_module(_REGISTRY).AttentionBackendEnum
    member = backends.__members__.get(NAME)
    if member is None:
        add = getattr(backends, "register", None)
        member = _add_member(backends, NAME, CLASS_PATH) if add is None else add(NAME, CLASS_PATH)
        member.__reduce_ex__ = _reduce
    return member


def _reduce(_protocol: int) -> tuple[Any, tuple]:
    """Pickles the member as a call of register(). NOTE: vLLM spawns processes that unpickle its
    configuration before they load plugins, when the enum does not have the member yet."""
    return register, ()


def _add_member(backends: Any, name: str, value: str) -> Enum:
    """Adds a member to the enum as AttentionBackendEnum.register() of later releases does."""
    member = object.__new__(backends)
    member._name_, member._value_ = name, value
    setattr(backends, name, member)
    backends._member_map_[name] = member
    backends._value2member_map_[value] = member
    backends._member_names_.append(name)
    return member
