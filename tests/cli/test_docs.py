"""The documents keep up with the code: links lead somewhere, examples run."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def python_blocks(document):
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


def test_readme_example_runs():
    (example,) = python_blocks(ROOT / "README.md")
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["o"].shape == (8, 32, 128)
    assert names["lse"].shape == (8, 32)
    assert names["o"].isfinite().all()


def test_guide_example_of_one_request_runs():
    names = {}
    exec(compile(python_blocks(ROOT / "docs" / "guide.md")[0], "guide.md", "exec"), names)
    assert names["o"].shape == (128, 32, 128)
    assert names["lse"].shape == (128, 32)


def test_readme_starts_with_the_two_commands():
    top = ROOT.joinpath("README.md").read_text()[:800]
    assert "make demo" in top
    assert "make test" in top
