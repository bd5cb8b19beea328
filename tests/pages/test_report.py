"""The report: from folders of runs in whatever state to a page, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxrlhf.observe.chrome_trace import write_chrome_trace
from jaxrlhf.observe.events import Event, ProcessEvents
from jaxrlhf.observe.metrics import metrics_record
from jaxrlhf.pages.report_data import MOST_SAMPLE_BYTES, embedded, report_data
from jaxrlhf.pages.report_page import differing_keys
from jaxrlhf.pages.run_files import read_run
from jaxrlhf.report import main, read_runs
from jaxrlhf.run.run_folder import RunFolder
from tests.pages.made_up_runs import HOSTILE, write_run


def report(tmp_path: Path, *arguments: str | Path) -> str:
    assert main([*map(str, arguments), "--out", str(tmp_path / "report.html")]) == 0
    return (tmp_path / "report.html").read_text()


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(each) for each in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return " ".join(printed.err.split())


def test_a_page_of_a_run_has_its_metrics_samples_plan_and_forecast(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "one"))
    data = data_of(page)
    assert data["runs"] == [{"name": "one", "color": "#2b7de9"}]
    assert data["shown"][:3] == ["critic/score/mean", "eval/exact_match", "kl/mean"]
    assert data["metrics"]["another/version's"] == [{"x": [1, 2, 3, 4, 5, 6], "y": [1, 2, 3, 4, 5, 6]}]
    assert data["metrics"]["actor/grad_norm"][0]["y"] == [0.5, 0.5, None, 0.5, 0.5, 0.5]
    assert data["metrics"]["eval/exact_match"][0]["x"] == [0, 2, 4, 6]
    assert [(s["step"], s["split"], len(s["runs"][0])) for s in data["samples"]] == [
        (2, "held-out", 2), (2, "train", 2), (6, "held-out", 2), (6, "train", 3),
    ]  # fmt: skip
    assert "finished, step 6 of 6" in page and "aaaaaaaaaaaa" in page
    assert "predicted seconds" in page and "update_actor" in page and "step 5" in page


def test_texts_of_a_run_cannot_break_the_page(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "one"))
    assert page.count("<script") == 2 and "<b>" not in page
    assert any(sample["prompt"] == HOSTILE for sample in data_of(page)["samples"][-1]["runs"][0])
    assert json.loads(embedded({"a": "</script>\u2028\ud800"})) == {"a": "</script>\u2028\ud800"}


def test_several_runs_stand_side_by_side_with_what_differs(tmp_path):
    runs = [write_run(tmp_path / name / "run", seed=seed) for seed, name in enumerate("abc")]
    page = report(tmp_path, *runs)
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run", "c/run"]
    assert len({run["color"] for run in data["runs"]}) == 3
    assert all(len(curves) == 3 for curves in data["metrics"].values())
    assert re.search(r"<td>seed</td><td>0</td><td>1</td><td>2</td>", page)
    assert "<td>batch_size</td>" not in page


def test_a_section_that_a_config_does_not_have_is_one_difference():
    first, second = {"a": {"b": 1, "c": [1]}, "same": 2}, {"a": {"b": 2, "c": [1]}, "same": 2, "d": {"e": 1, "f": 2}}
    assert list(differing_keys([first, second])) == [("a.b", [1, 2]), ("d", [None, {"e": 1, "f": 2}])]


def test_a_run_that_was_killed_or_still_runs_is_shown_as_far_as_it_is(tmp_path):
    killed = write_run(tmp_path / "killed", whole=False)
    page = report(tmp_path, killed)
    assert "stopped, step 6 of 6" in page
    assert all(text in page for text in ("No timeline: ", "No samples.", "No plan.json.", "No forecast: "))
    with RunFolder(killed).locked():
        assert read_runs([killed])[0].state == "running, step 6 of 6"
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("algorithm: ppo\nsteps: 9\n")
    page = report(tmp_path, tmp_path / "begun")
    assert "stopped, step 0 of 9" in page and "No metrics yet." in page and "No steps yet." in page


def test_what_cannot_be_read_is_said_on_the_page_and_by_the_command(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    (run / "plan.json").write_text('{"step": {"calls": {"actor.train": {"of_another_version": 1}}}}')
    (run / "timeline.json").write_text("[]")
    (run / "planned.json").write_text('{"version": 1}')
    (run / "versions.json").write_text("[]")
    page = report(tmp_path, run)
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "plan.json is left out: ConfigError: plan.json: calls.actor.train: unknown key 'of_another_version'",
        "timeline.json is left out: ", "planned.json is left out: PlanError: ",
        "versions.json is left out: ValueError: must be a JSON object. Got list.",
    ):  # fmt: skip
        assert text[:60] in said
        assert text[:25] in page


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert "must be the folder of a run. Got no such folder. Name one, such as runs/latest." in refusal(
        capsys, tmp_path / "nowhere"
    )
    assert "must be the folder of a run. Got a folder without config.yaml and" in refusal(capsys, tmp_path)
    run = write_run(tmp_path / "one")
    assert "runs: must be named once. Got " in refusal(capsys, run, tmp_path / "." / "one")
    assert "--out: must be a file whose name ends in .html. Got 'a.png'." in refusal(capsys, run, "--out", "a.png")
    assert "--steps: must be a step, or" in refusal(capsys, run, "--steps", "99")
    killed = write_run(tmp_path / "two", whole=False)
    assert "--steps: goes with a timeline. Got runs without one." in refusal(capsys, killed, "--steps", "2")
    assert "must be writable" in refusal(capsys, run, "--out", tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, capsys, name):
    run = write_run(tmp_path / "one")
    lines = (run / name).read_text().splitlines()
    (run / name).write_text("\n".join([*lines[:2], '{"step": ', *lines[2:]]) + "\n")
    assert f"{name}, line 3: not JSON" in refusal(capsys, run, "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_record_without_a_step_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": "one"}\n')
    assert "metrics.jsonl, line 11: must have a whole number as its step. Got {'step': 'one'}." in refusal(capsys, run)


def test_a_long_run_stays_small_and_says_what_is_left_out(tmp_path):
    run = write_run(tmp_path / "one", num_steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(5, 1005):
            metrics = {f"group{i % 7}/metric_{i}": (step * 7919 % 1013) / 1013 + i for i in range(70)}
            file.write(json.dumps(metrics_record(step, {**metrics, "timing_s/step": 1.0})) + "\n")
    with (run / "samples.jsonl").open("a") as file:
        for step in range(10, 1001, 10):
            for i in range(8):
                sample = {"prompt": f"{i}", "completion": "word " * 2000, "scores": {"a": 1.0}, "finish": "length"}
                file.write(json.dumps({"step": step, "split": "train", **sample}) + "\n")
    page = report(tmp_path, run)
    assert len(page.encode()) < 2_000_000
    data = data_of(page)
    curve = data["metrics"]["group0/metric_0"][0]
    assert len(curve["x"]) == 400 and curve["of"] == 1000
    assert data["sample_steps"] == 104 > len(data["samples"]) > 10 and data["samples"][-1]["step"] == 1000
    assert len(json.dumps(data["samples"])) < 1.2 * MOST_SAMPLE_BYTES
    assert len(data["samples"][-1]["runs"][0][0]["completion"]) == 2001


def test_a_timeline_of_many_calls_is_cut_to_what_a_picture_can_hold(tmp_path):
    run = write_run(tmp_path / "one", num_steps=3)
    found = [
        Event(f"role{device}.call", "infer", (device,), step, 10.0 * step + i / 20, 10.0 * step + (i + 1) / 20)
        for step in (1, 2, 3)
        for i in range(200)
        for device in range(6)
    ]
    write_chrome_trace(run / "timeline.json", [ProcessEvents(tuple(found), 0.0)])
    page = report(tmp_path, run)
    assert page.count('class="event infer"') == 6 * 200
    assert "Steps 1-3 have too many calls for one picture: it begins with step 3." in page
    alike = [dataclasses.replace(event, name="role.call") for event in found]
    write_chrome_trace(run / "timeline.json", [ProcessEvents(tuple(alike), 0.0)])
    page = report(tmp_path, run)
    assert page.count('class="event infer"') == 3 * 200 and "devices 0-5" in page and "too many calls" not in page


def test_a_run_under_another_name_keeps_its_numbers(tmp_path):
    first = read_run(write_run(tmp_path / "one"), name="first")
    assert report_data([first])["runs"][0]["name"] == "first" and first.steps_done == 6
