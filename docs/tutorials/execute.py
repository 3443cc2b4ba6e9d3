"""Runs a tutorial's cells in a fresh kernel, in this folder, and writes the notebook with what they print.

python docs/tutorials/execute.py [NAME ...]     default: all of them; `make notebooks` does that
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
TUTORIALS = ("five_minutes", "fine_tune_gemma", "generate_with_gemma", "four_adapters")
SECONDS_PER_CELL = 600
# Progress bars and hints, which would be of this machine or this minute.
QUIET = {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore:IProgress not found,ignore:`is_gradient_checkpointing` is deprecated",
}
FIRST_LINE = "import logging; logging.getLogger('bitsandbytes').setLevel('ERROR')"


def source(name: str) -> NotebookNode:
    """The tutorial's cells, without outputs."""
    notebook = jupytext.read(HERE / f"{name}.py")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{name}-{number}"
    return notebook


def execute(name: str) -> NotebookNode:
    """The tutorial with its outputs.

    Raises:
        CellExecutionError: a cell raised; the message has its source and traceback.
    """
    os.environ.update(QUIET)
    notebook = source(name)
    NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        startup_timeout=SECONDS_PER_CELL,
        # By default what a busy kernel prints more than four seconds after a cell's end is dropped in silence.
        iopub_timeout=SECONDS_PER_CELL,
        raise_on_iopub_timeout=True,
        coalesce_streams=True,
        extra_arguments=[f"--IPKernelApp.exec_lines={FIRST_LINE}"],
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.pop("jupytext", None)
    # Of the interpreter that ran it.
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> None:
    for name in sys.argv[1:] or TUTORIALS:
        jupytext.write(execute(name), HERE / f"{name}.ipynb")


if __name__ == "__main__":
    main()
