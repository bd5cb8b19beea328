"""The notebooks run from their first cell to the last, on small sizes, and their figures have all of their marks."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from jaxrlhf.data.tokenizer import train_bpe
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import save_params
from scripts.run_notebooks import MOST_BYTES, NOTEBOOKS, execute, output_bytes, tidied
from tests.conftest import CACHE
from tests.random_weights import params_of

SMALL = ModelConfig(
    vocab_size=320, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
    max_position_embeddings=128,
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "01_quickstart": {"STEPS": 4, "PROMPTS": 32, "WARM_START": 10, "EVERY": 4, "HELD_OUT": 16},
    "03_an_algorithm_of_your_own": {"STEPS": 3, "PROMPTS": 8, "WARM_START": 10, "SEEDS": 1, "PLANS": 1},
    "02_every_call_on_its_own_mesh": {"PROMPTS": 32},
    "06_pipelines_and_fusion": {"STEPS": 2, "PROMPTS": 16},
    "04_planning_128_gpus_on_a_laptop": {
        "ACTOR": "gemma3-270m", "CRITIC": "gemma3-270m", "NODES": 1, "GPUS": 4, "METHOD": "hybridflow",
        "RESPONSES": [512, 1024],
    },
    "05_a_real_model": {"STEPS": 2, "PROMPTS": 2, "HELD_OUT": 4},
    "07_reward_models_and_preferences": {
        "SFT": {"steps": 1, "batch_size": 256}, "REWARD_MODEL": {"steps": 4, "batch_size": 128},
        "PPO": {"steps": 2, "batch_size": 32}, "DPO": {"steps": 2, "batch_size": 32}, "HELD_OUT": 16, "EVERY": 2,
    },
}
"""Notebook -> small values of its parameters. Every cell is executed all the same."""
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MARKS = "marks"
"""The key of a cell's metadata with the least marks of its figure, by SVG element: {"polyline": 2}."""


def figure(cell: nbformat.NotebookNode) -> str:
    """All HTML and SVG that a cell shows."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    return "".join(str(each.get(kind, "")) for each in data for kind in ("text/html", "image/svg+xml"))


def lacking(notebook: nbformat.NotebookNode) -> list[str]:
    """Marks that figures must have and do not."""
    found = []
    for index, cell in enumerate(notebook.cells):
        for element, least in cell.metadata.get(MARKS, {}).items():
            count = len(re.findall(rf"<{element}[\s/>]", figure(cell)))
            if count < least:
                found.append(f"cell {index}: {count} <{element}>, {least} expected")
    return found


ANALYZER = """
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {"compound": (text.count("a") - text.count("e")) / max(1, len(text))}
"""


def make_small_model(folder: Path) -> None:
    """In the place of what notebook 05 fetches: a model with random weights, and a scorer that counts letters."""
    tokenizer = train_bpe([f"Movie review: The plot of {i} is a good one" for i in range(99)], vocab_size=320)
    save_params(params_of(SMALL), SMALL, folder / "smollm2", dtype="float32", end_id=tokenizer.end_id)
    tokenizer.save(folder / "smollm2" / "tokenizer.json")
    package = folder / "packages" / "vaderSentiment"
    package.mkdir(parents=True)
    (package / "vaderSentiment.py").write_text(ANALYZER)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = CACHE.parent / "home"  # runs have their cache of compilations there, by default
    home.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if path.stem == "05_a_real_model":
        make_small_model(tmp_path)
    notebook = execute(path, tmp_path, values=SIZES.get(path.stem), seconds=500)
    assert not lacking(notebook)
    warned = [
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ]
    assert not warned


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_stored(path: Path) -> None:
    """The stored outputs are whole, free of errors and small, and have their figures."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run scripts/run_notebooks.py"
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert not lacking(notebook)
    assert output_bytes(notebook) <= MOST_BYTES
    assert any(cell.metadata.get(MARKS) for cell in code), "no figure"
    assert "pip install" in code[0].source, "the first cell installs jaxrlhf where it is missing, as in Colab"
    assert str(Path.home()) not in str(notebook) and "/tmp/" not in str(notebook)


def test_of_a_progress_bar_the_last_line_remains() -> None:
    cell = nbformat.v4.new_code_cell("")
    pieces = ["first\n", "\rstep 1 of 2", "\rstep 2 of 2", "\nlast\n"]
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in pieces]
    outputs = tidied(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs
    assert [output.text for output in outputs] == ["first\nstep 2 of 2\nlast\n"]
