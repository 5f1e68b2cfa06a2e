"""preflash as an attention backend of vLLM's v1 engine.

    vllm serve MODEL --attention-backend PREFLASH

is the whole switch: vLLM loads the plugin of the wheel in each of its processes, and the plugin
registers the backend. This module imports nothing of vLLM; `backend` and the modules that it
imports are loaded when vLLM selects the backend.
"""

from __future__ import annotations

from .registration import NAME, load_plugin, register

__all__ = ["NAME", "load_plugin", "register"]
