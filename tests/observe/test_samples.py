from pathlib import Path

from jaxrlhf.observe.json_lines import JsonLinesWriter, read_json_lines
from jaxrlhf.observe.samples import sample_record


def test_samples_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sample = {
        "step": 2,
        "split": "train",
        "prompt": "2 + 2 =\n",
        "completion": " 4 \x1b[0m 四\udce9",
        "scores": {"math": 1.0, "length": -0.5},
        "finish": "stop",
    }
    with JsonLinesWriter(path) as writer:
        writer.write(sample_record(**sample))
        # Flushed: a reader sees the line while the run goes on.
        assert read_json_lines(path) == [sample]
    # Texts stay legible to whoever opens the file.
    assert "四" in path.read_text(encoding="utf-8")


def test_a_score_that_is_not_finite_is_null_and_named() -> None:
    scores = {"a": float("nan"), "b": 1.0}
    record = sample_record(step=0, split="test", prompt="", completion="", scores=scores, finish="length")
    assert record["scores"] == {"a": None, "b": 1.0}
    assert record["non_finite"] == ["a"]
