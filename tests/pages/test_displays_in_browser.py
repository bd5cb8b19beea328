"""What `import jaxrlhf as rl` gives to a notebook: runs, plans, graphs, timelines and forecasts, in a browser."""

from pathlib import Path
from typing import Any

import pytest

import jaxrlhf as rl
from jaxrlhf.pages.graph_html import graph_edges, next_iteration
from jaxrlhf.testing import small_run
from tests.pages.browser import Opened

STEPS = 2


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A page of all displays of a small run and a forecast, and what they were made of. Made before the browser starts,
    whose event loop a run's checkpoints could not use."""
    folder = tmp_path_factory.mktemp("displays")
    config = rl.read_config(small_run("rloo", steps=STEPS, num_layers=1), output={"folder": str(folder)})
    with rl.Run(config, quiet=True) as run:
        assert run._repr_html_() is None, "nothing was done yet: a notebook shows its text"
        run.train()
        forecast = rl.forecast("ppo_arithmetic", cluster="1x8:h100", method="interleaving", quiet=True)
        displays = [run, run.plan, run.graph, run.timeline(), run.timeline(STEPS), forecast]
        fragments = [display._repr_html_() for display in displays]
        page = folder / "notebook.html"
        page.write_text(f"<!DOCTYPE html><html><body>{''.join(fragments)}</body></html>", encoding="utf-8")
        return {
            "page": page, "calls": run.graph.graph.to_rows(), "events": run.timeline(STEPS).rows,
            "forecast": forecast.calls, "rewards": len(run.rewards),
        }  # fmt: skip


@pytest.mark.parametrize(("width", "scheme"), [(960, "light"), (1440, "dark")])
def test_displays_of_a_run_and_a_forecast(shown, browser, width, scheme):
    assert isinstance(shown["page"], Path)
    opened = Opened(browser, shown["page"], width=width, scheme=scheme)
    opened.check()
    calls = shown["calls"]
    assert opened.count(".jaxrlhf-graph .node") == opened.count(".jaxrlhf-plan tbody tr") == len(calls)
    assert opened.count(".jaxrlhf-graph .edge") == len(graph_edges(calls)) + len(next_iteration(calls))
    assert opened.outside(".jaxrlhf-graph .node", "text", "rect") == []
    assert opened.count(".jaxrlhf-run .curve") >= 1 and shown["rewards"] == STEPS
    timelines = opened.page.locator(".jaxrlhf-timeline")
    assert timelines.count() == 2
    whole, last = (timelines.nth(i).locator(".event title").all_text_contents() for i in range(2))
    assert len(whole) > len(last) > 0
    for event in shown["events"]:
        if event["phase"] == "step" and event["kind"] != "wait":
            assert any(text.startswith(f"{event['name']}, step {STEPS}: ") for text in last)
    assert opened.count(".jaxrlhf-forecast table:first-of-type") >= 1
    names = opened.texts(".jaxrlhf-forecast td:first-child")
    assert [row["call"] for row in shown["forecast"]] == names[: len(shown["forecast"])]
