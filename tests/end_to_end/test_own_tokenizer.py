"""A reward model with a tokenizer of its own, whose scores are those of the decoded text."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxrlhf.call_graph import GraphError
from jaxrlhf.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from jaxrlhf.experience import Rollout, Sequences
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.heads import INFERENCE_OUTPUTS
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.programs.roles import HostSequences, ModelRole, OwnTokens
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import trace
from jaxrlhf.train import main
from tests.random_weights import params_of
from tests.subprocesses import environment, free_port

ACTORS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
JUDGES = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
MESSAGES = [[{"role": "user", "content": text}] for text in ("add 2 and 2", "what?", "tell me more", "17 + 4")]


def model(head: Head, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head=head,
    )  # fmt: skip


def write_folder(name: str, tokenizer: Tokenizer, template: str, head: Head) -> None:
    config = model(head, tokenizer.vocab_size)
    save_params(params_of(config), config, Path(name), dtype="float32", end_id=tokenizer.end_id)
    tokenizer.save(Path(name) / "tokenizer.json")
    settings = json.loads((Path(name) / "tokenizer_config.json").read_text())
    (Path(name) / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Two models with different tokenizers, chats, and a config; runs it with some overrides."""
    monkeypatch.chdir(tmp_path)
    texts = [message["content"] for messages in MESSAGES for message in messages] * 4
    write_folder("actor_folder", train_bpe(texts, vocab_size=280), ACTORS, "lm")
    write_folder("judge_folder", byte_tokenizer(), JUDGES, "scalar")
    Path("rows.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in MESSAGES * 3))
    config = {
        "name": "apart", "algorithm": "grpo", "steps": 2, "batch_size": 4, "devices": "cpu:8",
        "data": {"path": "rows.jsonl", "eval_rows": 4},
        "roles": {
            "reward": {"init": "judge_folder", "head": "scalar", "own_tokenizer": {"max_tokens": 60}},
            "actor": {"init": "actor_folder", "optimizer": {"learning_rate": 1e-3}},
            "reference": {"init": "actor"},
        },
        "settings": {
            "sampling": {"num_samples": 2, "max_new_tokens": 6, "stop_ids": list(range(40, 90))},
            "actor_update": {"mini_batches": 1},
        },
        "plan": {
            "default": {"data": 4, "devices": "0-3"},
            "calls": {"reward.scores": {"data": 2, "tensor": 2, "devices": "4-7"}},
        },
        "evaluation": {"num_prompts": 4, "every": 2, "sampling": {"max_new_tokens": 4}},
        "output": {"num_samples": 8, "samples_every": 1, "tensorboard": False},
        "compilation_cache": "",
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(config))

    def with_overrides(*overrides: str, more: tuple[str, ...] = ()) -> tuple[int, str, str]:
        status = main(["--config", "run.yaml", *more, *(x for override in overrides for x in ("--set", override))])
        return status, *capsys.readouterr()

    return with_overrides


def score_of(prompt: str, completion: str, *, finished: bool, most: int = 10**6) -> float:
    """The score by the reward model alone, of one text, padded on the right so that few programs are compiled."""
    tokenizer = Tokenizer.from_file("judge_folder")
    ids = tokenizer.encode(prompt) + tokenizer.encode(completion) + [tokenizer.end_id] * finished
    ids = ids[-most:]
    real = jnp.arange(len(ids) + -len(ids) % 64) < len(ids)
    tokens = jnp.zeros(real.shape, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    return float(_scores(Sequences(tokens=tokens[None], mask=real[None], response=real[None, 1:]))[0])


@jax.jit
def _scores(sequences: Sequences) -> jax.Array:
    config = model("scalar", 258)
    return INFERENCE_OUTPUTS["scores"](params_of(config), sequences, config, Layout.over((0,), Strategy()))


def samples() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/latest/samples.jsonl").read_text().splitlines()]


def check_scores(**given: Any) -> None:
    """Checks every sample's score against the reward model alone."""
    asked = {f"<user>{messages[0]['content']}<assistant>": messages for messages in MESSAGES}
    ends = set()
    for sample in samples():
        prompt = f"[user] {asked[sample['prompt']][0]['content']}\n[assistant] "
        ends.add(sample["finish"])
        want = score_of(prompt, sample["completion"], finished=sample["finish"] == "stop", **given)
        np.testing.assert_allclose(sample["scores"]["reward"], want, rtol=1e-5, atol=1e-5)
    assert ends == {"stop", "length"}


def metrics(name: str) -> list[float]:
    return [record[name] for record in read_metrics(Path("runs/latest/metrics.jsonl")) if name in record]


@pytest.mark.timeout(600)
def test_scores_are_those_of_the_decoded_text(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert (
        "Note: reward reads rollouts in the tokens of judge_folder/tokenizer.json, after its own chat template." in out
    )
    assert re.search(r"reward\.encode +actor\.generate +host", out)
    assert re.search(rf"reward\.scores +reward\.encode .* 8 +{8 * 60}\n", out), "its own length"
    assert {sample["split"] for sample in samples()} == {"train", "held-out"}
    check_scores()
    assert metrics("reward/reward/cut_sequences") == [0, 0] and metrics("eval/reward/cut_sequences") == [0, 0]


def test_they_are_the_same_in_parts_and_in_slots(run):
    calls = (
        "actor.generate={data: 2, slots: 2, parts: 2}",
        "reward.encode={parts: 2}",
        "reward.scores={data: 2, parts: 2}",
    )
    status, out, err = run("steps=1", *(f"plan.calls.{call}" for call in calls))
    assert (status, err) == (0, ""), out
    check_scores()


@pytest.mark.timeout(600)
def test_text_without_a_chat_is_read_as_text(run):
    Path("rows.jsonl").write_text("\n".join(json.dumps({"prompt": m[0]["content"]}) for m in MESSAGES * 3))
    status, out, err = run("steps=1")
    assert (status, err) == (0, "")
    assert (
        "Note: reward reads rollouts in the tokens of judge_folder/tokenizer.json, after the text of the prompt." in out
    )
    for sample in samples():
        want = score_of(sample["prompt"], sample["completion"], finished=sample["finish"] == "stop")
        np.testing.assert_allclose(sample["scores"]["reward"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(600)
def test_longer_sequences_are_cut_and_counted_or_an_error(run):
    status, _, err = run("steps=1", "roles.reward.own_tokenizer={max_tokens: 20}")
    assert (status, err) == (0, "")
    check_scores(most=20)
    assert 0 < metrics("reward/reward/cut_sequences")[0] <= 8
    status, out, _ = run("steps=1", "roles.reward.own_tokenizer=null", more=("--dry-run",))
    longest = max(len(f"[user] {messages[0]['content']}\n[assistant] ") for messages in MESSAGES)
    assert status == 0 and re.search(rf"reward\.scores +reward\.encode .* 8 +{8 * (longest + 2 * 6)}\n", out)
    status, _, err = run("steps=1", "roles.reward.own_tokenizer={max_tokens: 20, overlong: error}")
    assert status == 1
    assert re.search(
        r"Error: roles\.reward\.own_tokenizer\.max_tokens: must hold prompt and response in the role's own tokens\. "
        r"Got 20, and \d+ for a response to rows\.jsonl:\d+\. Raise it, or set roles\.reward\.own_tokenizer\.overlong "
        r"to 'cut'",
        err,
    )


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("roles.reward={init: judge_folder}",), "all roles must share one vocabulary"),
        (("roles.reward={init: judge_folder, head: scalar, optimizer: {}}",), "all roles must share one vocabulary"),
        (("roles.other={init: reward, head: scalar, optimizer: {}}",), "roles.other.init: all roles must share one"),
        (("roles.actor.own_tokenizer={}",), "roles.actor.own_tokenizer: is for a model with a scalar head that is not"),
        (("roles.reward={model: {vocab_size: 300}, head: scalar, own_tokenizer: {}}",),
         "roles.reward.own_tokenizer: needs an `init` that is a folder with a tokenizer.json. Got 'random'"),
        (("roles.reward.own_tokenizer={max_tokens: -1}",), "max_tokens: must be positive, or 0. Got -1"),
        (("roles.reward.own_tokenizer={max_tokens: 4000}",),
         "roles.reward.own_tokenizer.max_tokens: must be at most the role's max_position_embeddings="),
        (("roles.reward.own_tokenizer={chat_template: none.jinja}",),
         "roles.reward: data.chat_template: must be Jinja"),
    ],
)  # fmt: skip
def test_what_cannot_be(run, overrides, error):
    status, _, err = run(*overrides, more=("--dry-run",))
    assert status == 1 and error in err


@pytest.mark.parametrize("method", ["token_scores", "values", "logprobs", "loss"])
def test_it_says_nothing_about_single_tokens(method):
    def encode(rollout: Rollout) -> HostSequences:
        raise AssertionError("is not called by tracing")

    def step(roles, state, data, config):
        return {"x": getattr(roles.reward, method)(data)}, state

    role = ModelRole(model("scalar", 258), own_tokens=OwnTokens(lambda R: 60, encode))
    arrays: dict[str, Any] = {
        "tokens": np.zeros((2, 8), np.int32), "mask": np.ones((2, 8), bool), "response": np.ones((2, 4), bool),
    }  # fmt: skip
    error = rf"role 'reward' has no method '{method}'\. It has: encode, scores\..* roles\.reward has another tokenizer"
    with pytest.raises(GraphError, match=error):
        trace(step, {"reward": role.methods("reward")}, (), Sequences(**arrays), None)


@pytest.mark.timeout(600)
def test_in_two_processes_the_first_encodes_for_both(run, tmp_path):
    port, command = free_port(), [sys.executable, "-m", "jaxrlhf.train", "--config", "run.yaml", "--set", "steps=1"]
    started = [
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(JAX_COORDINATOR_ADDRESS=f"localhost:{port}", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=f"{i}"),
        )
        for i in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    check_scores()
