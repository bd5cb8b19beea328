"""Runs of the offline algorithms as the command runs them: supervised, reward model, DPO."""

import json
import re
from pathlib import Path

import pytest
import yaml

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.checkpoint.store import checkpoint_numbers
from jaxrlhf.observe.metrics import read_metrics, without_times
from jaxrlhf.train import main

MARKER = "\n\nAssistant:"
DIALOGUES = [
    {"chosen": f"\n\nHuman: {i}?{MARKER} yes{i % 7}", "rejected": f"\n\nHuman: {i}?{MARKER} no{i % 5}", "answer": "1"}
    for i in range(10, 74)
]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, tiny_model, optimizer):
    """Runs a shipped config with tiny models on dialogues; returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, DIALOGUES)))

    def with_config(name: str, *overrides: str) -> tuple[int, str, str]:
        role = "reward" if name.startswith("reward") else "actor"
        head = {"head": "scalar"} if role == "reward" else {}
        config = {
            "base": name,
            "name": "tiny",
            "steps": 3,
            "batch_size": 16,
            "data": {"task": "", "path": "pairs.jsonl", "reply_marker": MARKER, "eval_rows": 16},
            "roles": {
                role: {
                    "model": {**tiny_model, **head},
                    "optimizer": {**optimizer, "warmup_updates": 0, "schedule": "constant"},
                }
            },
            "settings": {"update": {"mini_batches": 2}},
            "evaluation": {"every": 1, "num_prompts": 16, "batch_size": 8, "scorers": []},
            "output": {"checkpoint_every": 2, "keep_checkpoints": 1},
            "compilation_cache": "",
        }
        if name.startswith("dpo"):
            config["warm_start"] = {"steps": 1, "batch_size": 16, "updates_per_step": 1}
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        status = main(["--config", "tiny.yaml", *overrides])
        return status, *capsys.readouterr()

    return with_config


def evaluations() -> list[dict]:
    return [r for r in read_metrics(Path("runs/latest/metrics.jsonl")) if "eval/loss" in r]


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("sft_arithmetic", {"loss"}),
        ("reward_model_arithmetic", {"loss", "accuracy", "margin", "chosen_score", "rejected_score"}),
        (
            "dpo_arithmetic",
            {
                "loss",
                "accuracy",
                "margin",
                *(f"{a}_{b}" for a in ("chosen", "rejected") for b in ("reward", "logprob")),
            },
        ),
    ],
)
def test_an_offline_algorithm_measures_itself_on_held_out_rows(run, name, measured):
    status, out, err = run(name)
    assert status == 0, err
    found = evaluations()
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    names = {key.removeprefix("eval/") for key in found[0] if key.startswith("eval/")}
    assert names == measured
    losses = [record["eval/loss"] for record in found]
    assert losses[-1] < losses[0]
    best = min(range(1, 4), key=lambda done: losses[done])
    assert json.loads(Path("runs/latest/outcome.json").read_text())["best"] == {"step": best, "value": losses[best]}
    assert set(checkpoint_numbers(Path("runs/latest/checkpoints/steps"))) == {best, 3}
    assert re.search(r"evaluation after 3 steps on 16 held-out prompts: eval/", " ".join(out.split()))
    if "margin" in measured:
        assert found[0]["eval/margin"] == pytest.approx(0.0, abs=1e-6)


def test_a_run_on_pairs_goes_on_as_if_it_had_not_stopped(run):
    assert run("reward_model_arithmetic")[0] == 0
    whole = [without_times(record) for record in read_metrics(Path("runs/latest/metrics.jsonl"))]
    assert run("reward_model_arithmetic", "--set", "steps=2", "--set", "name=again")[0] == 0
    assert run("reward_model_arithmetic", "--set", "name=again", "--resume", "auto")[0] == 0
    again = [without_times(record) for record in read_metrics(Path("runs/latest/metrics.jsonl"))]
    assert again == whole
    Path("pairs.jsonl").write_text(
        "\n".join(json.dumps({**row, "rejected": row["rejected"] + "."}) for row in DIALOGUES)
    )
    status, _, err = run("reward_model_arithmetic", "--set", "name=again", "--resume", "auto")
    assert status == 1 and "must go on with the data and tokenizer of" in " ".join(err.split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "evaluation.best_by=accuracies",
            r"evaluation\.best_by: must be what is measured, .*'accuracy'",
        ),
        (
            "evaluation={num_prompts: 16}",
            r"evaluation\.scorers: must be \[\] where no actor samples, as under reward_model\. Got \[reward\], and "
            r"\[reward\] is the default\. Write `scorers: \[\]`\.",
        ),
        ("settings.max_new_tokens=5", r"a chosen completion with its end of text must fit into max_new_tokens=5"),
        ("data.rejected_column=''", r"training on preferences needs a rejected completion in every row\. Got none\."),
        (
            "roles.reward.model.head=lm",
            r"`of` names an inference method of the role\. Got 'scores'\. It has: logprobs, policy\. It has 'lm' for a "
            r"head: set roles\.reward\.head to 'scalar'\.",
        ),
    ],
)
def test_what_a_user_gets_wrong(run, override, message):
    status, _, err = run("reward_model_arithmetic", "--dry-run", "--set", override)
    assert status == 1
    assert re.search(message, " ".join(err.split())), err
    assert "Traceback" not in err


def test_an_evaluation_without_scorers_needs_an_algorithm_that_measures(train):
    status, _, err = train("--set", "evaluation.scorers=[]")
    assert status == 1
    assert "evaluation.scorers: must name at least one role, since the algorithm measures nothing by itself" in err


def test_an_evaluation_that_trains_is_refused(run, monkeypatch):
    sft = ALGORITHMS["sft"]
    trains = Algorithm(sft.step, sft.config, sft.init_state, sft.roles, data=sft.data, evaluation=_training)
    monkeypatch.setitem(ALGORITHMS, "sft", trains)
    status, _, err = run("sft_arithmetic", "--dry-run")
    assert status == 1 and "evaluation: an algorithm's evaluation must train nothing. Got actor.train in it." in err


def _training(roles, state, data, config):
    results, state = ALGORITHMS["sft"].step(roles, state, data, config)
    return results["actor"], state


def test_a_scorer_named_as_what_the_algorithm_measures(run):
    status, _, err = run(
        "sft_arithmetic", "--dry-run", "--set", "roles.loss={function: exact_answer}",
        "--set", "evaluation.scorers=[loss]",
    )  # fmt: skip
    assert status == 1 and "the algorithm itself measures eval/loss. Got a role of that name" in " ".join(err.split())


def test_dialogues_are_learned_from_in_all_of_their_replies(run):
    """The replies in the middle are all alike, so that a model that learns from them predicts them better."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zzzzzzzz"}]
    rows = [
        {"messages": [*talk, {"role": "user", "content": "b"}, {"role": "assistant", "content": str(i)}], "answer": "1"}
        for i in range(64)
    ]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    losses = {}
    for turns in ("last", "all"):
        data = {"path": "talks.jsonl", "eval_rows": 16, "chat_template": template, "assistant_turns": turns}
        of_all = {"datasets": {}, "settings": {"max_new_tokens": 24, "update": {"mini_batches": 2}}, "steps": 6}
        overrides = [f"{key}={json.dumps(value)}" for key, value in {"data": data, **of_all}.items()]
        status, out, err = run("sft_arithmetic", *(x for override in overrides for x in ("--set", override)))
        assert status == 0, err
        assert "data: prompt from 'messages' (lists of messages), answer from 'answer', as chats" in out
        assert ("of which the last one alone is learned from" in out) == (turns == "last")
        losses[turns] = [record["eval/loss"] for record in evaluations()]
    assert losses["all"][-1] < losses["all"][0] and losses["all"][0] != losses["last"][0]
