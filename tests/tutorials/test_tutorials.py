"""Every tutorial runs from top to bottom in a fresh kernel, and what is committed of it is what it says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jupytext
import pytest
from nbformat import NotebookNode

pytestmark = pytest.mark.long

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = load("execute")
# The report says by which tokenizer the small Gemma was made.
TOKENIZER = "gemma-tokenizer" if load("small_gemma").has_own_tokenizer() else "small-tokenizer"


def committed(name: str) -> NotebookNode:
    return jupytext.read(TUTORIALS / f"{name}.ipynb")


def outputs(notebook: NotebookNode) -> Iterator[tuple[str, ...]]:
    """Of each cell the kinds of what it prints and shows: text differs in times, and in the last digits."""
    for cell in notebook.cells:
        yield tuple(output.get("name", output.output_type) for output in cell.get("outputs", ()))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# A minute of processor time and more; a machine may be busy with other tests.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", execute.TUTORIALS, ids=lambda name: f"{name}-{TOKENIZER}")
def test_a_tutorial_runs_in_a_fresh_kernel_and_shows_what_its_committed_notebook_shows(name: str) -> None:
    ran = execute.execute(name)
    assert list(outputs(ran)) == list(outputs(committed(name)))


@pytest.mark.parametrize("name", execute.TUTORIALS)
def test_a_committed_notebook_has_the_cells_of_its_source_and_nothing_of_a_machine(name: str) -> None:
    notebook = committed(name)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in execute.source(name).cells]
    assert not [kind for cell in outputs(notebook) for kind in cell if kind in ("stderr", "error")]
    text = (TUTORIALS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert not [part for part in ("/tmp/", "/home/", "/root/", "site-packages") if part in text]
