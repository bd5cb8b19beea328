"""Runs in a notebook: one bar that changes in place, no flood of lines, no warnings; and the stop button."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]

SETUP = """
import os, signal
import jaxrlhf as rl
from jaxrlhf.testing import small_run

interrupt = False

def length(completions):
    global interrupt
    if interrupt:
        interrupt = False
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(text)) for text in completions]

run = rl.Run(
    small_run("rloo", steps=40, num_layers=1), reward=length, devices="cpu:2",
    output={"folder": "runs", "tensorboard": False, "checkpoint_every": 0}
)
"""
PAUSED = """
interrupt = True
try:
    run.train()
except rl.RunStopped as stopped:
    print(stopped)
"""


def executed(cells: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
    return [cell.outputs for cell in notebook.cells]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    shown = ["run.plan", "run.graph", "run.timeline()", "run", "run.generate(['1+1='])"]
    cells = [SETUP, "run.train(30)", PAUSED, "run.train()", *shown]
    return executed(cells, tmp_path_factory.mktemp("notebook"))


def test_a_run_has_one_bar_and_few_lines(outputs):
    made, trained, *_ = outputs
    assert not made, "nothing to say"
    assert [x.output_type for x in trained if x.output_type != "stream"] == ["display_data", "execute_result"]
    (bar,) = (output for output in trained if output.output_type == "display_data")
    assert "step 30/40  reward" in bar.data["text/plain"] and '<progress value="0.7500"' in bar.data["text/html"]
    said = "".join(output.text for output in trained if output.output_type == "stream")
    assert said == "\n\x1b[1mrloo: 40 steps of 16 prompts\x1b[0m\n"
    assert not any("ipywidgets" in str(output) or output.get("name") == "stderr" for cell in outputs for output in cell)


def test_the_stop_button_pauses_a_run_that_then_goes_on(outputs):
    paused = "".join(output.text for output in outputs[2] if output.output_type == "stream")
    assert "Ctrl-C: the run stops after this step, and saves." in paused and "Saved after 31 of 40 steps" in paused
    finished = "".join(output.text for output in outputs[3] if output.output_type == "stream")
    assert "Done in" in finished and "Written to" in finished
    assert sum(output.output_type == "display_data" for output in outputs[3]) == 1


def test_plans_graphs_timelines_and_runs_are_pictures(outputs):
    for (shown,) in outputs[4:8]:
        assert "<svg" in shown.data["text/html"] and shown.data["text/plain"]
    assert outputs[8][0].data["text/plain"].startswith("[")
