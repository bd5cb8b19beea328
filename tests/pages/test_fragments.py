"""Fragments of HTML: what they say, that they stand alone, and what they refuse."""

import math
from html.parser import HTMLParser

import pytest

from jaxrlhf.observe.call_colors import role_colors
from jaxrlhf.observe.chrome_trace import TraceError
from jaxrlhf.observe.timeline_view import PictureError
from jaxrlhf.pages.forecast_html import forecast_html
from jaxrlhf.pages.graph_html import graph_html
from jaxrlhf.pages.markup import element, ink
from jaxrlhf.pages.plan_html import devices_svg, plan_html
from jaxrlhf.pages.run_html import main_metric, points_of, run_html
from jaxrlhf.pages.timeline_html import timeline_html
from tests.pages.made_up_runs import CALLS, HOSTILE, events, planned_step, write_run


class Read(HTMLParser):
    """The elements of markup, all of which must be closed, with the texts in them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def fragments(tmp_path_factory) -> dict[str, str]:
    step, planned, plan = planned_step()
    run = write_run(tmp_path_factory.mktemp("runs") / "one")
    return {
        "graph": graph_html(step.graph, plan),
        "plan": plan_html(plan, step.graph, step.models),
        "timeline": timeline_html(events(5)),
        "forecast": forecast_html(planned),
        "run": run_html(run),
    }


@pytest.mark.parametrize("kind", ["graph", "plan", "timeline", "forecast", "run"])
def test_a_fragment_is_well_formed_and_loads_and_runs_nothing(fragments, kind):
    read = Read(fragments[kind])
    assert read.found[0] == ("div", {"class": f"jaxrlhf jaxrlhf-{kind}"})
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in read.found}
    loads = [value for _, attrs in read.found for key, value in attrs.items() if key in ("src", "href")]
    assert loads == []
    style = next(text for text in read.texts if ".jaxrlhf" in text)
    rules = [rule.strip() for rule in style.replace("\n", "").split("}") if rule.strip()]
    assert all(selector.startswith(".jaxrlhf") for rule in rules for selector in rule.partition("{")[0].split(","))


def test_a_plan_has_a_row_and_the_devices_of_each_call(fragments):
    read = Read(fragments["plan"])
    assert [attrs["data-call"] for tag, attrs in read.found if attrs.get("class") == "call"] == list(CALLS)
    assert all(text in read.texts for text in (*CALLS, "cut into", "placement"))
    colors = role_colors(["actor"])
    assert any(attrs.get("fill") == colors["actor"] for _, attrs in read.found)


def test_placements_in_parts_show_shares_and_tails():
    from jaxrlhf.config.plan_config import Placement, Tail
    from jaxrlhf.sharding.strategy import Strategy

    share = Placement((2, 3), Strategy(data=2), rows=0.5)
    whole = Placement((0, 1), Strategy(data=2), shares=(share,), tail=Tail((1,), Strategy()))
    drawn = devices_svg({"actor.generate": whole, "reward.scores": None}, {"actor.generate": "actor"})
    assert "actor.generate: data 2 on 0-1" in drawn and "actor.generate: data 2 on 2-3" in drawn
    assert "actor.generate, its tail: one device on 1" in drawn and "on the host" in drawn


def test_a_timeline_has_a_box_for_each_event_and_tells_its_seconds(fragments, tmp_path):
    titles = [text for text in Read(fragments["timeline"]).texts if " s, from " in text]
    # steps 3 to 5: on 4 devices a move, a generation and a training; a score and a wait for it
    assert len(titles) == 3 * (3 * 4 + 2)
    assert any(text.startswith("actor.generate, step 4: 4.5 s, from ") for text in titles)
    assert any(text.endswith("1.0 MB moved") for text in titles)
    assert len([t for t in Read(timeline_html(events(5), steps=2)).texts if " s, from " in t]) == 14
    run = write_run(tmp_path / "run", num_steps=5)
    titles_of_run = [text for text in Read(timeline_html(run, steps=(3, 5))).texts if " s, from " in text]
    assert len(titles_of_run) == len(titles)


def test_a_timeline_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"timeline\.json: must be the timeline\.json of a run"):
        timeline_html(tmp_path)
    with pytest.raises(PictureError, match=r"must be a step, .* 1-5"):
        timeline_html(events(5), steps=(7, 9))


def test_a_forecast_has_all_calls_and_the_memory_of_all_devices(fragments):
    _, planned, _ = planned_step()
    read = Read(fragments["forecast"])
    assert all(name in read.texts for name in planned.choices)
    assert f"{planned.call_seconds('actor.train'):.4g}" in read.texts
    assert f"{planned.memory[0].total / planned.cluster.capacity(0):.0%}" in read.texts


def test_a_run_is_told_in_short(fragments, tmp_path):
    read = Read(fragments["run"])
    told = " ".join(read.texts)
    assert "ppo, step 6 of 6, 32 prompts a step, devices cpu:4, seed 0, 1m00s in steps" in told
    assert "critic/score/mean" in read.texts and "eval/exact_match" in read.texts
    killed = Read(run_html(write_run(tmp_path / HOSTILE.replace("/", "-"), whole=False)))
    assert "script" not in {tag for tag, _ in killed.found}
    (tmp_path / "empty").mkdir()
    assert "step 0" in " ".join(Read(run_html(tmp_path / "empty")).texts)


def test_the_curve_of_a_run_is_its_reward_or_else_a_loss():
    assert main_metric([{"step": 1, "actor/loss": 1.0, "critic/score/mean": 2.0}]) == "critic/score/mean"
    assert main_metric([{"step": 1, "own/loss": 1.0, "eval/loss": 2.0}]) == "own/loss"
    assert main_metric([{"step": 1, "own/metric": 1.0}]) == ""


def test_metrics_of_the_warm_start_are_by_its_own_steps():
    records = [{"step": 0, "warm_start/step": 50, "warm_start/loss": 2.0}, {"step": 1, "loss": None, "name": "text"}]
    assert points_of(records, "warm_start/loss") == [(50.0, 2.0)] and points_of(records, "name") == []
    ((step, value),) = points_of(records, "loss")
    assert step == 1.0 and math.isnan(value)


def test_markup_is_escaped_and_text_is_readable_on_its_box():
    assert element("i", title='"<') == '<i title="&quot;&lt;"></i>'
    assert ink("#ffffff") == ink("#fdd0a2") == "#111111" and ink("#3182bd") == ink("#393b79") == "#ffffff"
