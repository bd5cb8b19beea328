"""The page of a plan: what it says, and in a browser what it shows."""

import functools
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.pages.plan_page import MeasuredError, measured_seconds, write_plan_page
from jaxrlhf.planner.make_plan import Planned, plan_workload
from tests.planner.described_step import ppo

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
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


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_it_and_tells_what_is_under_the_pointer(page, tmp_path):
    """Sizes as the browser lays them out, and the tip of a call after the pointer moved over it."""
    script = """
    <script>{
    const bar = document.querySelector('[data-device="0"] .bar').getBoundingClientRect();
    const parts = [...document.querySelectorAll('[data-device="0"] .bar i')].map(x => x.getBoundingClientRect().width);
    const rect = document.querySelector('rect[data-call="actor.generate"][data-kind="call"]');
    rect.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: 300, clientY: 300}));
    const tip = document.getElementById("tip");
    document.body.dataset.seen = JSON.stringify({
      full: parts.reduce((a, b) => a + b) / bar.width, rect: rect.getBoundingClientRect().width,
      tip: getComputedStyle(tip).display + "|" + tip.textContent, wide: document.documentElement.scrollWidth,
    });
    }</script></body>"""
    shown = tmp_path / "shown.html"
    shown.write_text(page.read_text().replace("</body>", script))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", shown.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen is not None, done.stderr[-2000:]
    text = seen[1].replace("&quot;", '"')
    memory = planned().memory[0]
    full = float(re.search(r'"full":([\d.]+)', text)[1])  # pyright: ignore
    assert full == pytest.approx(memory.total / planned().cluster.capacity(0), abs=0.03)
    assert float(re.search(r'"rect":([\d.]+)', text)[1]) > 50  # pyright: ignore
    assert '"tip":"block|actor.generate: ' in text and " s, from " in text
    assert int(re.search(r'"wide":(\d+)', text)[1]) <= 1200, "nothing sticks out"  # pyright: ignore
