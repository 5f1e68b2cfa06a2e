"""A wheel names a torch or a driver of another CUDA version when it is imported."""

import importlib.util
import re

import preflash
import pytest
import torch
from preflash._device import gpus


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


def test_the_import_says_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(preflash._core, "__version__", "0.1.0+cu130")
    spec = importlib.util.find_spec("preflash")
    with pytest.warns(RuntimeWarning, match=r"^preflash 0\.1\.0\+cu130 is built for CUDA 13\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
