"""Pages and fragments in a browser: marks, texts within boxes, what clicks do, no complaints, no requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrlhf.pages.curves import curves_svg
from jaxrlhf.pages.forecast_html import forecast_html
from jaxrlhf.pages.graph_html import graph_edges, graph_html, next_iteration
from jaxrlhf.pages.plan_html import plan_html
from jaxrlhf.pages.run_html import run_html
from jaxrlhf.pages.timeline_html import timeline_html
from jaxrlhf.report import main
from tests.pages.browser import Opened
from tests.pages.made_up_runs import CALLS, HOSTILE, events, planned_step, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, seed=seed) for seed, name in enumerate(("first", "second", "third"))]


def opened_report(browser: Any, runs: list[Path], tmp_path: Path, **options: Any) -> Opened:
    page = tmp_path / "report.html"
    assert main([*map(str, runs), "--out", str(page)]) == 0
    return Opened(browser, page, **options)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (700, "dark")])
def test_fragments_in_a_page_of_a_notebook(browser, runs, tmp_path, width, scheme):
    step, planned, plan = planned_step()
    fragments = [
        graph_html(step.graph, plan), plan_html(plan, step.graph, step.models), timeline_html(events(5)),
        forecast_html(planned), run_html(runs[0]), curves_svg({"a": [(0, 1.0), (1, 2.0)], "b": [(0, 3.0)]}),
    ]  # fmt: skip
    page = tmp_path / "notebook.html"
    page.write_text(f"<!DOCTYPE html><html><body>{''.join(fragments)}</body></html>", encoding="utf-8")
    opened = Opened(browser, page, width=width, scheme=scheme)
    opened.check()

    calls = step.graph.to_rows()
    assert opened.count(".jaxrlhf-graph .node") == len(CALLS)
    assert opened.count(".jaxrlhf-graph .edge") == len(graph_edges(calls)) + len(next_iteration(calls))
    assert opened.outside(".jaxrlhf-graph .node", "text", "rect") == []
    assert opened.count(".jaxrlhf-plan tbody tr") == opened.count(".jaxrlhf-plan svg .call") == len(CALLS)
    assert opened.outside(".jaxrlhf-plan svg .call g", "text", "rect") == []
    assert opened.count(".jaxrlhf-timeline .event") == 3 * (3 * 4 + 2)
    assert opened.outside(".jaxrlhf-timeline .event", "text", "rect") == []
    assert opened.count(".jaxrlhf-forecast table") == 2
    assert opened.count(".jaxrlhf-run .curve") == 2
    assert opened.count("body > svg .curve") == 2
    for fragment in opened.page.locator(".jaxrlhf").all():
        assert fragment.bounding_box()["width"] <= 900


def test_the_report_of_a_run(browser, runs, tmp_path):
    opened = opened_report(browser, runs[:1], tmp_path)
    opened.check()
    cards = opened.texts(".chart-card h4")
    assert cards[:2] == ["critic/score/mean", "eval/exact_match"]
    assert opened.count("#charts .curve") == len(cards)
    assert opened.count("#timeline .event") == 3 * (3 * 4 + 2)
    assert opened.count("#plan tbody tr") == opened.count("#plan .node") == len(CALLS)
    assert opened.outside("#plan .node", "text", "rect") == []
    assert opened.count("#time tbody tr") == 2
    assert opened.texts("#forecast tbody td:first-child")[-1] == "step"
    assert opened.count("#sample-step option") == 4


def test_a_metric_is_found_shown_and_hidden(browser, runs, tmp_path):
    opened = opened_report(browser, runs[:1], tmp_path)
    page, before = opened.page, opened.count(".chart-card")
    page.fill("#search", "grad")
    assert opened.texts("#names button") == ["actor/grad_norm"]
    page.click("#names button")
    assert opened.texts(".chart-card h4")[-1] == "actor/grad_norm" and opened.count(".chart-card") == before + 1
    gap = page.locator('[data-name="actor/grad_norm"] .curve').get_attribute("d")
    assert gap.count("M") == 2, "where it was not finite"
    page.click('[data-name="actor/grad_norm"] .close')
    assert opened.count(".chart-card") == before
    assert page.locator("#names button").get_attribute("aria-pressed") == "false"
    assert opened.complaints == []


def test_curves_are_smoothed_logarithmic_and_tell_their_values(browser, runs, tmp_path):
    opened = opened_report(browser, runs, tmp_path)
    page, cards = opened.page, opened.count(".chart-card")
    assert opened.count(".smoothed") == 0
    page.check("#smooth")
    assert opened.count(".smoothed") == opened.count("#charts .curve") == 3 * cards
    page.uncheck("#smooth")
    page.check("#log")
    lost = page.locator('[data-name="actor/loss"]')
    assert "18 values that are not positive left out" in lost.inner_text() and "no values" in lost.inner_text()
    page.uncheck("#log")
    card = page.locator('[data-name="kl/mean"] svg')
    card.scroll_into_view_if_needed()
    box = card.bounding_box()
    page.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + box["height"] / 2)
    assert page.locator("#tip").inner_text() == "step 6\nfirst: 0.06\nsecond: 0.06\nthird: 0.06"
    page.mouse.move(2, 2)
    assert not page.locator("#tip").is_visible()
    assert opened.complaints == []


def test_the_report_of_three_runs(browser, runs, tmp_path):
    opened = opened_report(browser, runs, tmp_path, width=1440, scheme="dark")
    opened.check()
    assert opened.count("#charts .curve") == 3 * opened.count(".chart-card")
    assert opened.texts("#overview .facts-table thead th")[1:] == ["first", "second", "third"]
    assert opened.count("#timeline .event") == 3 * 3 * (3 * 4 + 2)
    assert opened.count("#plan tbody tr") == 3 * len(CALLS)
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(paper)
    opened.page.click("#theme")
    assert opened.page.evaluate(paper) == "rgb(255, 255, 255)" != dark


def test_samples_of_a_step_stand_side_by_side_by_prompt(browser, runs, tmp_path):
    opened = opened_report(browser, runs, tmp_path)
    page = opened.page
    assert page.locator("#sample-step").input_value() == "6, train"
    assert opened.texts("#sample-table thead th") == ["prompt", "first", "second", "third"]
    rows = opened.texts("#sample-table tbody tr td:first-child")
    assert rows == ["train 0", "train 1", HOSTILE]
    page.select_option("#sample-step", "2, held-out")
    cells = opened.texts("#sample-table tbody tr:first-child td .text")
    assert cells == ["held-out 0", "after 2, seed 0", "after 2, seed 1", "after 2, seed 2"]
    page.click("#sample-after")
    assert page.locator("#sample-step").input_value() == "2, train"
    assert opened.complaints == []


def test_without_scripts_the_main_curves_are_there(browser, runs, tmp_path):
    opened = opened_report(browser, runs[:2], tmp_path, scripts=False)
    assert opened.count(".static svg") >= 6 and opened.count(".static .curve") == 2 * opened.count(".static svg")


def test_a_run_that_has_hardly_begun(browser, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("algorithm: ppo\n")
    empty = opened_report(browser, [tmp_path / "begun"], tmp_path)
    empty.check()
    assert empty.count("#charts") == 0
    (tmp_path / "begun" / "metrics.jsonl").write_text(json.dumps({"step": 1, "a/b": 1.0}) + "\n")
    one = opened_report(browser, [tmp_path / "begun"], tmp_path)
    one.check()
    assert one.texts(".chart-card h4") == ["a/b"]
