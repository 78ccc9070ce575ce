"""The notebooks and the README's quick start run as they stand, each with a Ray of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """In which no running Ray is found, so that the document starts its own."""
    with tempfile.TemporaryDirectory(prefix="kvr") as directory:
        yield {**os.environ, "RAY_TMPDIR": directory}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, environment):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(env=environment)


def quick_start() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(next(block for block in blocks if "kvfleet.start" in block))


def test_readme_quick_start(environment):
    command = [sys.executable, "-c", quick_start()]
    done = subprocess.run(command, env=environment, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip().endswith("48 tokens loaded, bit for bit: True")
