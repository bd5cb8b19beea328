"""The page of a plan: what it says, and in a browser what it shows."""

import functools
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.pages.plan_page import MeasuredError, measured_seconds, write_plan_page
from jaxrlhf.planner.make_plan import Planned, plan_workload
from tests.pages.browser import Opened
from tests.planner.described_step import ppo

MEASURED = {"actor.generate": 1.25, "actor.train": 2.5}
CALLS = ("actor.generate", "reference.logprobs", "critic.values", "reward.scores", "actor.train", "critic.train")


@functools.cache
def planned() -> Planned:
    work = ppo(ModelConfig(**PRESETS["7b"]), rows=256, prompt=256, response=256).workload
    return plan_workload(work, read_cluster("2x8:h100"), method="interleaving", compare=False)


@pytest.fixture
def page(tmp_path) -> Path:
    write_plan_page(planned(), tmp_path / "plan.html", measured=MEASURED)
    return tmp_path / "plan.html"


class Read(HTMLParser):
    """Tips of a page, its text, and the resources that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tips: list[str] = []
        self.devices: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tips += [given["data-tip"] or ""] if "data-tip" in given else []
        self.devices += [given["data-device"] or ""] if "data-device" in given else []
        self.loads += [given[key] or "" for key in ("src", "href") if key in given]

    def handle_data(self, data):
        self.text += data + " "


def test_it_shows_every_device_and_call_and_loads_nothing(page):
    read = Read(page.read_text())
    assert read.devices == [str(i) for i in range(16)] and not read.loads
    assert all(call in read.text for call in CALLS)
    full = [memory.total / planned().cluster.capacity(memory.devices.start) for memory in planned().memory]
    assert all(f"{each:.0%}" in read.text for each in full)
    assert any(tip.startswith("device 0: actor at rest, ") for tip in read.tips)
    seconds = planned().call_seconds("reward.scores")
    half = planned().choices["reward.scores"].devices
    assert any(
        tip.startswith(f"reward.scores: {seconds:.4g} s") and tip.endswith(f"on devices {half[0]}-{half[-1]}")
        for tip in read.tips
    )


def test_predicted_and_measured_seconds_stand_side_by_side(page):
    read = Read(page.read_text())
    predicted = planned().call_seconds("actor.train")
    assert f"actor.train, predicted: {predicted:.4g} s" in read.tips and "actor.train, measured: 2.5 s" in read.tips
    assert f"{predicted / 2.5 - 1:+.0%}" in read.text
    assert not any(tip.startswith("critic.train, measured") for tip in read.tips)


def test_names_cannot_break_the_page(tmp_path):
    write_plan_page(planned(), tmp_path / "x.html", measured={"<script>alert(1)</script>": 1.0})
    assert "alert(1)" not in (tmp_path / "x.html").read_text()


def test_a_run_without_measurements_is_refused(tmp_path):
    with pytest.raises(MeasuredError, match="--measured: must be the folder of a run that ended"):
        measured_seconds(tmp_path)
    (tmp_path / "outcome.json").write_text('{"forecast": {"calls": {"a.b": {"predicted": 1.0, "measured": 2.0}}}}')
    assert measured_seconds(tmp_path) == {"a.b": 2.0}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_and_tells_what_is_under_the_pointer(browser, page, scheme):
    opened = Opened(browser, page, width=1200, scheme=scheme)
    opened.check()
    assert opened.count(".device") == 16 and opened.count("tbody tr") == len(CALLS)
    widths = opened.page.evaluate(
        """[...document.querySelectorAll('[data-device="0"] .bar i, [data-device="0"] .bar')].map(
            x => x.getBoundingClientRect().width)"""
    )
    memory = planned().memory[0]
    assert sum(widths[1:]) / widths[0] == pytest.approx(memory.total / planned().cluster.capacity(0), abs=0.03)
    rect = opened.page.locator('rect[data-call="actor.generate"][data-kind="call"]').first
    assert rect.bounding_box()["width"] > 50
    rect.hover()
    tip = opened.page.locator("#tip")
    assert tip.is_visible() and tip.inner_text().startswith("actor.generate: ") and " s, from " in tip.inner_text()
    paper = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert opened.complaints == []
