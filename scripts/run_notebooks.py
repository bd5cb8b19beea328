"""Executes the notebooks from their first cell to the last, and writes their outputs into them.

python scripts/run_notebooks.py                    # all of them
python scripts/run_notebooks.py 01 05              # those whose names begin so

Each runs in a new Python in an empty folder. Outputs are written without what changes with every run: times of cells,
and progress bars, of which the last line remains. Needs `pip install 'jaxrlhf[notebooks]'`.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PARAMETERS = "parameters"
"""The tag of the cell with the sizes of a run, which tests replace by small ones."""
MOST_BYTES = 300_000
"""The most bytes that the outputs of a notebook take in the repository."""


def execute(
    path: Path, folder: Path, *, values: Mapping[str, Any] | None = None, seconds: float = 3600.0
) -> nbformat.NotebookNode:
    """A notebook with the outputs of all of its cells.

    Args:
        folder: Where it runs; the repository is on Python's path.
        values: Values of names that its cell tagged `parameters` assigns, in place of those.
        seconds: The most that one cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised. Its traceback is in the message.
        ValueError: `values` has names that the cell does not assign.
    """
    notebook = nbformat.read(path, as_version=4)
    if values:
        _replace(notebook, values, path.name)
    packages = os.pathsep.join([str(NOTEBOOKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": packages})
    return notebook


def _replace(notebook: nbformat.NotebookNode, values: Mapping[str, Any], name: str) -> None:
    """Appends other values to the cell with parameters."""
    cells = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{name}: one cell must have the tag {PARAMETERS!r}. Got {len(cells)}.")
    assigned = re.findall(r"^(\w+) *=", cells[0].source, flags=re.MULTILINE)
    if unknown := sorted(values.keys() - set(assigned)):
        raise ValueError(f"{name}: the cell {PARAMETERS!r} assigns {', '.join(assigned)}. Got {', '.join(unknown)}.")
    cells[0].source += "\n" + "\n".join(f"{key} = {value!r}" for key, value in values.items())


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what changes with every run or with the machine."""
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = "\n".join(line.rpartition("\r")[2] for line in output.text.split("\n"))
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs of a cell, with consecutive pieces of one stream in one."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.get("name") is not None and joined[-1].get("name") == output.get("name"):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def output_bytes(notebook: nbformat.NotebookNode) -> int:
    """Bytes of all outputs."""
    return sum(len(str(cell.get("outputs", ""))) for cell in notebook.cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and write their outputs into them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names; otherwise all")
    options = parser.parse_args(arguments)
    chosen = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.name.startswith(tuple(options.names or [""]))]
    if not chosen:
        print(f"No notebook begins with {' or '.join(options.names)}.", file=sys.stderr)
        return 1
    for path in chosen:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = tidied(execute(path, Path(folder)))
        size = output_bytes(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, outputs of {size / 1e3:.0f} kB")
        if size > MOST_BYTES:
            print(f"{path.name}: outputs must take at most {MOST_BYTES / 1e3:.0f} kB.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
