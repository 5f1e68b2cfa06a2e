"""Commands are refused before any work: exit code 2, and a message that names the argument."""

import json
import os
import shlex

import prepass_policy
import pytest

DTYPES = "there are bf16 (bfloat16), f16 (float16)"
QUICK = "bench --quick --backend cpu"
COMPARE = "bench --compare mixed.json mixed.json"
REFUSED = [
    ("benchmark", "benchmark"),
    ("benchmark", "variants"),
    *((f"{name} --backend fa7", "--backend fa7: must be one of cpu, fa2, fa3")
      for name in ("check", "bench", "demo")),
    (f"{QUICK} --rows 'nothing like it' --json mixed.json", "names no row"),
    (f"{QUICK} --rows 'nothing like it' --json new.json", "names no row"),
    (f"{QUICK} --dtype f64", f"--dtype f64: {DTYPES}"),
    (f"{QUICK} --dtype bf16,e4m3", f"--dtype e4m3: {DTYPES}"),
    *((f"{QUICK} {option} {file}", f"{option} {file}: {why}")
      for option in ("--trace", "--json")
      for file, why in (
          ("/proc/report.json", "cannot be written"),
          ("directory.json", ""),
          ("no/report.json", "there is no directory no"),
      )),
    ("bench --quick --json bench.json --trace trace.json", "--trace measures nothing"),
    (f"{QUICK} --trace pod.txt", ".txt is neither .json nor a picture"),
    ("bench --plot a.gif --quick", "must end with .png, .svg or .pdf"),
    ("bench --plot a.png --quick --rows mixed", "--rows mixed names none"),
    ("bench --plot a.png --quick --rows pod,fmha", "--rows pod,fmha names none"),
    (f"{COMPARE} --plot a.gif", "must end with .png"),
    (f"{COMPARE} --plot a.png", "nothing is written"),
    ("bench --compare none.json none.json", "none.json: cannot be read"),
    ("bench --compare a b --json c.json", "--json c.json: --compare measures nothing"),
    ("bench --compare a b --trace c.json", "--trace c.json: --compare runs nothing"),
    ("demo --text no-such-file", "--text no-such-file: cannot be read"),
    ("demo --text /dev/null", "--text /dev/null: has no line with text"),
    ("demo --find words", "--find needs --text FILE"),
    *((f"variants --head-dim={size}", f"--head-dim {size}: must be a multiple of 8")
      for size in ("0", "7", "12", "128x", "192x12", "d128", "-8", "128,64")),
    # A choice that is empty says what there is.
    *((f"variants {choice}", words)
      for choice in ("--family sm70", "--dtype f64", "--head-dim 520")
      for words in (choice, "families", "cpu")),
    *((f"{name}=bogus {command}", f"{name}='bogus' in the environment")
      for name in ("PREFLASH_BACKEND", "PREFLASH_PREPASS")
      for command in ("check --quick", "bench --quick", "demo")),
    # A check of cpu never passes for another backend, and a check of nothing is no success.
    *((f"PREFLASH_BACKEND={given} check --quick --backend {asked}",
       f"--backend {asked}: PREFLASH_BACKEND={given} in the env")
      for given, asked in (("cpu", "fa2"), ("fa2", "cpu"))),
]  # fmt: skip


def written(folder) -> dict:
    return {path: path.is_file() and path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_refusals(preflash_command, monkeypatch, tmp_path, command, message):
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    words = shlex.split(command)
    if words[0].startswith("PREFLASH_"):
        monkeypatch.setenv(*words.pop(0).split("="))
    (tmp_path / "directory.json").mkdir()
    mixed, dense = ({"name": name, "dtype": "f32"} for name in ("mixed", "dense d64 s512 full"))
    mixed |= {"speed": {"preflash": 1.0}, "us": {"preflash": 1.0}}
    rows = [mixed, {**dense, "speed": {}, "us": {}}]
    machine = {"preflash": "1", "backend": "cpu", "name": "CPU"}
    (tmp_path / "mixed.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    before = written(tmp_path)
    with prepass_policy.forced(os.environ.get("PREFLASH_PREPASS", "auto")):
        done = preflash_command("", *words)
    assert done.code == 2
    assert message in done.err
    assert "usage: " in done.err or done.err.count("\n") == 1
    assert done.out == ""
    assert written(tmp_path) == before
