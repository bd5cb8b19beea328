from pathlib import Path

from jaxrlhf.observe.json_lines import read_json_lines
from jaxrlhf.observe.samples import SamplesWriter


def test_samples_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SamplesWriter(path) as writer:
        writer.write(
            step=2,
            split="train",
            prompt="2 + 2 =\n",
            completion=" 4 \x1b[0m 四\udce9",
            scores={"math": 1, "length": -0.5},
            finish="stop",
        )
        # Flushed: a reader sees the line while the run goes on.
        assert read_json_lines(path) == [
            {
                "step": 2,
                "split": "train",
                "prompt": "2 + 2 =\n",
                "completion": " 4 \x1b[0m 四\udce9",
                "scores": {"math": 1.0, "length": -0.5},
                "finish": "stop",
            }
        ]
    # Texts stay legible to whoever opens the file.
    assert "四" in path.read_text(encoding="utf-8")


def test_a_score_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SamplesWriter(path) as writer:
        scores = {"a": float("nan"), "b": 1.0}
        writer.write(step=0, split="test", prompt="", completion="", scores=scores, finish="length")
    (record,) = read_json_lines(path)
    assert record["scores"] == {"a": None, "b": 1.0}
    assert record["non_finite"] == ["a"]


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in range(2):
        with SamplesWriter(path) as writer:
            writer.write(step=step, split="train", prompt="", completion="", scores={}, finish="stop")
    assert [record["step"] for record in read_json_lines(path)] == [0, 1]
