"""preflash as an attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend preflash

is the whole switch: SGLang loads the plugin of the wheel in each of its processes, and the plugin
registers the backend. This module imports nothing of SGLang; `backend` and the modules that it
imports are loaded when SGLang makes the backend.
"""

from __future__ import annotations

from .registration import NAME, load_plugin, register

__all__ = ["NAME", "load_plugin", "register"]
