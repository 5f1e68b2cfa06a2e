"""A wheel names a torch or a driver of another CUDA version when it is imported."""

import re

import pytest
from preflash._device import gpus
from test_import import python


@pytest.mark.parametrize(
    ("version", "torch_cuda", "driver", "expected"),
    [
        ("0.1.0+cu130", "13.0", 13000, None),
        ("0.1.0+cu130", "13.2", 13010, None),
        ("0.1.0+cu130", "13.0", None, None),  # no driver: a machine without a GPU
        ("0.1.0+cu130", None, 12040, None),  # a torch without CUDA needs no driver
        ("0.1.0+cu129", "12.4", 12040, None),
        ("0.1.0+cu129", "12.6", 13000, None),
        ("0.1.0", "12.6", 12040, None),  # built where it runs
        ("0.1.0+cu130", "12.8", 13000, r"CUDA 13\.0, torch .* for CUDA 12\.8\. .* for CUDA 12, or"),
        ("0.1.0+cu129", "13.0", 13000, r"CUDA 12\.9, torch .* for CUDA 13\.0"),
        ("0.1.0+cu130", "12.4", 12040, r"serves CUDA 12\.4 at most.* driver 580 .* for CUDA 12$"),
        ("0.1.0+cu130", "13.0", 12080, r"serves CUDA 12\.8 at most"),
        ("0.1.0+cu140", "14.0", 13000, r"Install a newer driver"),
    ],
)
def test_complaint(version, torch_cuda, driver, expected):
    sentence = gpus.version_mismatch(version, torch_cuda, driver)
    assert sentence is None if expected is None else re.search(expected, sentence)


def test_the_import_says_it_and_the_cpu_computes():
    """The binding is loaded first, to give it the version of a wheel."""
    out = python(
        """
        import importlib.util, sys, types, warnings
        import torch
        torch.version.cuda = "12.8"
        package = types.ModuleType("preflash")
        package.__path__ = list(importlib.util.find_spec("preflash").submodule_search_locations)
        sys.modules["preflash"] = package
        from preflash import _core
        _core.__version__ = "0.1.0+cu130"
        del sys.modules["preflash"]
        with warnings.catch_warnings(record=True) as caught:
            import preflash
        print([w.category.__name__ for w in caught], caught[0].message)
        q = torch.ones(3, 2, 64); kv = torch.ones(5, 1, 64)
        print(preflash.single_prefill_with_kv_cache(q, kv, kv).sum().item())
        """
    )
    said, total = out.splitlines()
    assert said.startswith("['RuntimeWarning'] preflash 0.1.0+cu130 is built for CUDA 13.0, torch")
    assert float(total) == pytest.approx(3 * 2 * 64)
