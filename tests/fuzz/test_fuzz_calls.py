"""`--call NAME`: problems of every NAME pass, faults of it are found, and the printed
commands find them again."""

import functools
import re

import preflash
import pytest
import torch

from . import calls, command
from .printed import commands, out_of


def test_problems_of_the_fmha_call(monkeypatch, capsys):
    call = ["--call", "trtllm_fmha_v2_prefill"]
    assert command.main(["--backend", "cpu", *call, "--fuzz", "5", "--seed", "8:40"]) == 0
    assert "cpu on cpu: 5 passed, 0 failed" in capsys.readouterr().out

    def halved(**arguments):
        result = preflash.prefill.trtllm_fmha_v2_prefill(**arguments)
        out, *stats = result if isinstance(result, tuple) else (result,)
        return (out * 0.5, *stats) if stats else out * 0.5

    monkeypatch.setattr(preflash, "trtllm_fmha_v2_prefill", halved)
    assert command.main(["--backend", "cpu", *call, "--fuzz", "9", "--seed", "8:40"]) == 1
    printed = capsys.readouterr().out
    assert "outside their bound" in printed
    again = commands(printed)[0]
    assert again[:4] == ["--backend", "cpu", *call]
    assert command.main(again) == 1


CUDNN_CALL = "cudnn_batch_prefill_with_kv_cache"


def cudnn_faults():
    honest = preflash.prefill.cudnn_batch_prefill_with_kv_cache

    def halved(**arguments):
        out, lse = honest(**arguments)
        return (out.float() * 0.5).to(out.dtype), lse

    def natural(**arguments):
        return honest(**{**arguments, "lse_base": "ln"})

    def all_keys(**arguments):
        return honest(**{**arguments, "causal": False})

    def unscaled(**arguments):
        return honest(**{**arguments, "k_scale": None})

    def last_row(**arguments):
        given = arguments["out"]
        out, lse = honest(**arguments)
        if given is not None:
            given[-1:] = 0.0
        return out, lse

    def padded_with_zeros(**arguments):
        out, lse = honest(**arguments)
        return out, None if lse is None else lse.masked_fill_(lse == -torch.inf, 0.0)

    def other_lse(**arguments):
        out, lse = honest(**arguments)
        return out, None if lse is None else lse.clone()

    return {
        halved: "outside their bound",
        natural: "lse: .* outside",
        all_keys: "out: .* outside",
        unscaled: "outside their bound",
        last_row: "rows that no request has are written",
        padded_with_zeros: "are not -inf",
        other_lse: "lse is not the tensor that was given",
    }


@pytest.mark.parametrize("fault", cudnn_faults(), ids=lambda fault: fault.__name__)
def test_a_fault_of_the_cudnn_call_is_found(monkeypatch, capsys, fault):
    call = ["--backend", "cpu", "--call", CUDNN_CALL]
    monkeypatch.setattr(command, "_MOST_FAILURES", 1)
    monkeypatch.setattr(calls, "_WORK", 1e6)
    monkeypatch.setattr(preflash, CUDNN_CALL, fault)
    assert command.main([*call, "--fuzz", "100", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    messages = {found.__name__: message for found, message in cudnn_faults().items()}
    assert re.search(messages[fault.__name__], printed), printed
    (again,) = commands(printed)
    assert again[:4] == call
    assert command.main(again) == 1
    monkeypatch.setattr(preflash, CUDNN_CALL, preflash.prefill.cudnn_batch_prefill_with_kv_cache)
    assert command.main(again) == 0


def test_problems_of_the_cudnn_call(monkeypatch, capsys):
    monkeypatch.setattr(calls, "_WORK", 3e6)
    call = ["--call", CUDNN_CALL]
    assert command.main([*call, "--backend", "cpu", "--fuzz", "80", "--seed", "21"]) == 0
    assert "80 passed, 0 failed" in capsys.readouterr().out


def pod_faults():
    """Maps faults of either wrapper's run(), in a keyword or the results, to their messages."""

    def without(name, neutral):
        def fault(honest, *args, **options):
            if name in options:
                options[name] = neutral
            return honest(*args, **options)

        fault.__name__ = f"without {name}"
        return fault

    def halved(honest, *args, **options):
        prefill, decode = honest(*args, **options)
        out_of(decode).copy_(out_of(decode).float() * 0.5)
        return prefill, decode

    def sides_changed(honest, *args, **options):
        prefill, decode = honest(*args, **options)
        return decode, prefill

    def written(honest, *args, **options):
        returned = honest(*args, **options)
        args[0].untyped_storage()[:1] = 7
        return returned

    def written_padding(honest, *args, **options):
        """The last row of q is nobody's if it is garbage."""
        returned = honest(*args, **options)
        if bool(args[-2][-1:].isnan().any()):
            out_of(returned[1])[-1:] = 0
        return returned

    return {
        without("causal_p", False): "prefill: (out|lse):",
        without("custom_mask_p", None): "prefill: (out|lse):",
        without("packed_custom_mask_p", None): "prefill: (out|lse):",
        without("sm_scale_p", None): "prefill: (out|lse):",
        without("window_left_p", -1): "prefill: (out|lse):",
        without("k_scale", None): "decode: (out|lse):",
        without("v_scale", None): "decode: out:",
        without("lse_base", "log2"): "lse:",
        halved: "decode: out:",
        sides_changed: "prefill: out",
        written: "prefill: q, an input, was written",
        written_padding: "decode: out: .* elements around it were written",
    }


@pytest.mark.parametrize("fault", pod_faults(), ids=lambda fault: fault.__name__)
def test_a_fault_beside_decode_is_found(monkeypatch, capsys, fault):
    call = ["--backend", "cpu", "--call", "pod"]
    monkeypatch.setattr(command, "_MOST_FAILURES", 1)
    monkeypatch.setattr(calls, "_WORK", 2e6)
    with monkeypatch.context() as patch:
        for name in ("PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"):
            made = getattr(preflash, name)

            def run(self, *args, honest=made.run, **options):
                return fault(functools.partial(honest, self), *args, **options)

            patch.setattr(made, "run", run)
        assert command.main([*call, "--fuzz", "100", "--seed", "3"]) == 1
        printed = capsys.readouterr().out
        messages = {found.__name__: message for found, message in pod_faults().items()}
        assert re.search(messages[fault.__name__], printed), printed
        (again,) = commands(printed)
        assert again[:4] == call
        assert command.main(again) == 1
    assert command.main(again) == 0


def test_problems_beside_decode(monkeypatch, capsys):
    monkeypatch.setattr(calls, "_WORK", 3e6)
    call = ["--backend", "cpu", "--call", "pod"]
    assert command.main([*call, "--fuzz", "50", "--seed", "21"]) == 0
    assert "50 passed, 0 failed" in capsys.readouterr().out


def bytes_of(t):
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def test_problems_of_an_append(monkeypatch, capsys):
    call = ["--backend", "cpu", "--call", "append_paged_kv_cache"]
    assert command.main([*call, "--fuzz", "60", "--seed", "21"]) == 0
    assert "60 passed, 0 failed" in capsys.readouterr().out
    honest = preflash.page.append_paged_kv_cache

    def spilled(key, value, owners, positions, cache, **table):
        honest(key, value, owners, positions, cache, **table)
        bytes_of(cache if isinstance(cache, torch.Tensor) else cache[0])[-1] ^= 1

    def without_last(key, value, owners, positions, cache, **table):
        owners = owners.clone()
        owners[owners >= 0] = torch.where(owners == owners.max(), -1, owners)[owners >= 0]
        honest(key, value, owners, positions, cache, **table)

    for fault in (spilled, without_last):
        monkeypatch.setattr(preflash, "append_paged_kv_cache", fault)
        assert command.main([*call, "--fuzz", "20", "--seed", "3"]) == 1
        printed = capsys.readouterr().out
        assert "bytes differ from a loop's" in printed
        assert command.main(commands(printed)[0]) == 1
        capsys.readouterr()


@pytest.mark.parametrize("name", ["window_left", "logits_soft_cap", "sm_scale", "sinks", "k_scale"])
def test_a_fault_of_decode_is_found(monkeypatch, capsys, name):
    call = ["--backend", "cpu", "--call", "decode"]
    monkeypatch.setattr(command, "_MOST_FAILURES", 1)
    monkeypatch.setattr(calls, "_WORK", 2e6)
    neutral = {"window_left": -1}.get(name)
    made = preflash.BatchDecodeWithPagedKVCacheWrapper
    method = "run" if name in ("sinks", "k_scale") else "plan"
    honest = getattr(made, method)

    def fault(self, *args, **options):
        return honest(self, *args, **{**options, name: neutral})

    with monkeypatch.context() as patch:
        patch.setattr(made, method, fault)
        assert command.main([*call, "--fuzz", "150", "--seed", "3"]) == 1
        printed = capsys.readouterr().out
        assert re.search("out:|lse:", printed), printed
        (again,) = commands(printed)
        assert again[:4] == call
        assert command.main(again) == 1
    assert command.main(again) == 0


def test_problems_of_decode(monkeypatch, capsys):
    monkeypatch.setattr(calls, "_WORK", 3e6)
    call = ["--backend", "cpu", "--call", "decode"]
    assert command.main([*call, "--fuzz", "80", "--seed", "21"]) == 0
    assert "80 passed, 0 failed" in capsys.readouterr().out
