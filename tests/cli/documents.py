"""Finds the documents of the repository, and the Python blocks that they print."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "cpp/**/*.md", "wheels/*.md", "third_party/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def python_blocks() -> dict[str, str]:
    """Returns every block by its place, as in "docs/guide.md:18"."""
    found = {}
    for document in DOCUMENTS:
        text = document.read_text()
        for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            line = text[: block.start(1)].count("\n") + 1
            found[f"{document.relative_to(ROOT).as_posix()}:{line}"] = block[1]
    return found
