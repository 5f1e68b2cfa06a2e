"""The name preflash among SGLang's attention backends."""

from __future__ import annotations

import importlib
from typing import Any

from .. import _plugin

NAME = "preflash"
_CHOICES = "sglang.srt.arg_groups.choices"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_HOOKS = "sglang.srt.plugins.hook_registry"
_DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_registered = False


def load_plugin() -> None:
    """Entry point `sglang.srt.plugins`."""
    _plugin.load(register, f"{NAME} in SGLang")


def register() -> None:
    """Makes `--attention-backend preflash` known to SGLang in this process.

    A second call changes nothing. SGLang imports the backend's class when it makes the backend.

    Raises:
        ImportError: SGLang is not installed, or a release without this registry.
    """
    global _registered
    if _registered:
        return
    choices, registry = importlib.import_module(_CHOICES), importlib.import_module(_REGISTRY)
    hooks = importlib.import_module(_HOOKS)
    registry.register_attention_backend(NAME)(_make_backend)
    choices.add_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    # SGLang's factory of draft backends has a dictionary of its own in each of its calls.
    hooks.HookRegistry.register(_DRAFT_BACKENDS, _add_draft_backend, hooks.HookType.BEFORE)
    _registered = True


def _make_backend(model_runner: Any) -> Any:
    from .backend import PreflashAttnBackend

    return PreflashAttnBackend(model_runner)


def _add_draft_backend(
    factory: Any,
    backend_name: str,
    backend_map: dict,
    error_template: str,
    stamps_children: bool = False,
) -> tuple[tuple, dict]:
    """Hook before DraftBackendFactory._create_backend(): adds preflash to backend_map.

    stamps_children: the backend is that of the decode steps; False: of the draft-extend step.
    """

    def make() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if not stamps_children:
            return NAME, _make_backend(runner)
        from .draft import PreflashMultiStepDraftBackend

        return NAME, PreflashMultiStepDraftBackend(
            runner, factory.topk, factory.speculative_num_steps
        )

    arguments = (factory, backend_name, {**backend_map, NAME: make}, error_template)
    return arguments, {"stamps_children": stamps_children}
