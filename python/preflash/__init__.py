"""Prebuilt attention kernels for LLM inference, on NVIDIA GPUs and on the CPU.

`import preflash as flashinfer` runs code written for flashinfer's prefill, decode, attention,
cascade, page and quantization modules: the kernels are compiled ahead of time and are part of this
package. `patch_flashinfer()` puts them into an installed flashinfer, for engines that import it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from . import _command

# Help, the version, usage errors and `config` end the process here, before torch is imported. Every
# other import is eager: programs rely on it that `import preflash` registers its torch operators.
if _command.is_starting() and _command.parse(sys.argv[1:]).command == "config":
    from .cli import main

    sys.exit(main())

from . import _core, attention, cascade, cudnn, decode, page, pod, prefill, quantization, sparse
from ._compat.patch import patch_flashinfer
from ._device import gpus as _gpus
from ._torch import operators  # noqa: F401
from .attention import *  # noqa: F403
from .cascade import *  # noqa: F403
from .decode import *  # noqa: F403
from .page import *  # noqa: F403
from .pod import *  # noqa: F403
from .prefill import *  # noqa: F403
from .quantization import *  # noqa: F403
from .sparse import *  # noqa: F403

_core.set_library_dir(str(Path(__file__).parent / "lib"))

__version__: str = _core.__version__
_gpus.warn_of_versions(__version__)

__all__ = ["__version__", "patch_flashinfer"]
__all__ += ["attention", "cascade", "cudnn", "decode", "page", "pod", "prefill", "quantization"]
__all__ += ["sparse"]
__all__ += attention.__all__
__all__ += cascade.__all__
__all__ += decode.__all__
__all__ += page.__all__
__all__ += pod.__all__
__all__ += prefill.__all__
__all__ += quantization.__all__
__all__ += sparse.__all__


if not TYPE_CHECKING:  # for which a module with __getattr__ has every name

    def __getattr__(name: str) -> NoReturn:
        """Raises AttributeError; of a name of FlashInfer it says where that name is served."""
        message = f"module 'preflash' has no attribute {name!r}"
        if not name.startswith("_"):
            message += (
                ": it serves FlashInfer's attention (docs/flashinfer.md, Names). For the rest, "
                "such as norm, sampling, rope or MLA, `import flashinfer` itself; "
                "preflash.patch_flashinfer() puts preflash's names into it"
            )
        raise AttributeError(message, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Lists the public names: __all__ and those of every module (__file__, ...)."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
