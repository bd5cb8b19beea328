"""What a user's own algorithm gets wrong is said with what to do about it, before anything compiles."""

import re

import pytest

from jaxrlhf.call_graph import GraphError
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import small_run

STEP = """
import dataclasses
import jax
import jax.numpy as jnp
import numpy as np
from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.algorithms.sft import SupervisedUpdate, sft_loss
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.tracing import compute

@dataclasses.dataclass(frozen=True)
class Settings:
    sampling: Sampling = Sampling()
    update: SupervisedUpdate = SupervisedUpdate()
    coef: float = 1.0

def make_batch(rollout, scores_B, coef):
    return {"sequences": rollout, "advantages": coef * scores_B}

def loss(outputs, batch, update):
    mask_BR = batch["sequences"].response
    loss = -(batch["advantages"][:, None] * outputs.logprobs * mask_BR).sum()
    return loss, mask_BR.sum(), {}

def step(roles, state, prompts, config: Settings):
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = roles.reward.scores(rollout)
    batch = compute(make_batch, rollout, scores, config.coef)
    return {"actor": roles.actor.train(loss, batch, config.update)}, state
"""


def error_of(tmp_path, old: str, new: str, name: str = "step") -> str:
    """What is said of the step above with some of its text changed."""
    assert old in STEP
    (tmp_path / "mine.py").write_text(STEP.replace(old, new))
    with pytest.raises(ValueError) as raised:
        assemble(small_run(f"{tmp_path / 'mine.py'}:{name}"), 8)
    return str(raised.value)


def test_the_step_as_it_is_is_right(tmp_path):
    (tmp_path / "mine.py").write_text(STEP)
    calls = assemble(small_run(f"{tmp_path / 'mine.py'}:step"), 8).train.graph.calls
    assert [call.name for call in calls] == ["actor.generate", "reward.scores", "make_batch", "actor.train"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "roles.reward",
            "roles.rewards",
            "step: the run has no role 'rewards'. It has: actor, cost, cost_critic, critic, reference, "
            "reward. Did you mean 'reward'? Add it under `roles` in the config.",
        ),
        (
            "generate(prompts, config.sampling)",
            "generate(prompts, config)",
            "actor.generate: is called as actor.generate(prompts: Prompts, sampling: Sampling). Got "
            "actor.generate(Prompts, "
            "Settings), with which it cannot work: 'Settings' object has no attribute 'num_samples'.",
        ),
        (
            "scores(rollout)",
            "scores(rollout, prompts)",
            "Got reward.scores(Rollout, Prompts): too many positional arguments.",
        ),
        (
            "scores = ",
            "roles.reference.logprobs(prompts)\n    scores = ",
            "Got reference.logprobs(Prompts), with which it cannot work: 'Prompts' object has no attribute 'response'.",
        ),
        (
            "train(loss, batch, config.update)",
            "train(loss, rollout, config.update)",
            "train(loss): the batch is a dict whose 'sequences' the model runs on: a Rollout, Sequences, or a "
            "dict of them. "
            "Got Rollout.",
        ),
        (
            "train(loss, batch, config.update)",
            "train(loss, {'advantages': scores}, config.update)",
            "a Rollout, Sequences, or a dict of them. Got ['advantages'].",
        ),
        (
            "train(loss, batch, config.update)",
            "train(batch, loss, config.update)",
            "(sum, weight, metrics). Got a dict of advantages, sequences. Write train(loss, batch, update).",
        ),
        ("train(loss, batch, config.update)", "train(loss, batch)", "needs an integer `mini_batches`. Got None."),
        (
            "train(loss, batch, config.update)",
            "train(loss, batch, updte=config.update)",
            "actor.train: is called as actor.train(loss, batch, update=...). Got ",
        ),
        ('    return {"actor"', '    results = {"actor"', "Got NoneType. End it with `return results, state`."),
        (
            "batch = compute(make_batch, rollout, scores, config.coef)",
            "batch = make_batch(rollout, scores, config.coef)",
            "reward.scores: its output is known only when the step runs, so a step function cannot calculate with it",
        ),
        (
            "batch = compute",
            "rollout.lengths\n    batch = compute",
            "Got an operation on actor.generate[2]: bool[16, 6].",
        ),
        (
            "scores, config.coef)",
            "scores)",
            "make_batch: compute(function, ...) calls make_batch(rollout, scores_B, coef). "
            "Got (Rollout, reward.scores[0]: float32[16]): missing a required argument: 'coef'.",
        ),
        (
            "coef * scores_B",
            "coef * scores_B[:, None] * rollout.lenghts",
            "make_batch: fails when it is traced: AttributeError: 'Rollout' object has no attribute 'lenghts', at ",
        ),
        ("coef * scores_B", "float(scores_B.mean())", "make_batch: fails when it is traced: ConcretizationTypeError"),
        ("-(batch", "-jnp.mean(batch", "a loss returns sums over its rows, never means"),
        (
            '{"actor": roles',
            '{"rollout": rollout, "actor": roles',
            "step: its results must be single numbers, which are reported. Got int32[16, ",
        ),
        (
            '{"actor": roles',
            '{"score": scores, "actor": roles',
            "Take its mean in a compute function, or leave it out.",
        ),
        (
            '{"actor": roles',
            '{"mine": {"loss": 1.0}, "other": {"mine/loss": 2.0}, "actor": roles',
            "step: Two metrics get the name 'mine/loss'.",
        ),
    ],
)
def test_what_is_wrong_in_a_step_says_what_to_do(tmp_path, old, new, message):
    assert message in error_of(tmp_path, old, new)


ARGUMENTS = (
    ". Its arguments are (roles, state, data, config), in this order; annotate `config` with the frozen dataclass of "
    "its settings."
)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "step(roles, state, prompts, config: Settings)",
            "step(state, roles, prompts, config: Settings)",
            "roles.actor.generate",
            "AttributeError: 'tuple' object has no attribute 'actor'",
        ),
        ("config: Settings", "config", "roles.actor.generate", "'NoSettings' object has no attribute 'sampling'"),
        ("coef: float = 1.0", "coef: float = 0.0", "1 / config.coef", "ZeroDivisionError: float division by zero"),
        (
            "config.sampling)",
            "dataclasses.replace(config.sampling, temperature=-1.0))",
            "temperature=-1.0",
            "ValueError: ",
        ),
    ],
)
def test_a_step_that_fails_says_where(tmp_path, old, new, line, message):
    step = STEP.replace("scores, config.coef)", "scores, 1 / config.coef)")
    text = step.replace(old, new)
    assert text != step
    (tmp_path / "mine.py").write_text(text)
    number = next(i for i, row in enumerate(text.splitlines(), 1) if line in row)
    with pytest.raises(GraphError) as raised:
        assemble(small_run(f"{tmp_path / 'mine.py'}:step"), 8)
    said = str(raised.value)
    assert said.startswith("step: fails when it is traced. Got ") and message in said
    assert said.endswith(f", at {tmp_path / 'mine.py'}:{number}{ARGUMENTS}")


@pytest.mark.parametrize(
    ("init_state", "line", "got"),
    [
        ("def first():\n    return ()", "def first", "TypeError: first() takes 0 positional arguments but 1 was given"),
        ("def first(config):\n    return config.kl", "config.kl", "AttributeError: 'Settings' object has no attribute"),
    ],
)
def test_a_first_state_that_fails_says_where(tmp_path, init_state, line, got):
    text = f"{STEP}\n{init_state}\n\nmine = Algorithm(step, Settings, first)\n"
    (tmp_path / "mine.py").write_text(text)
    number = next(i for i, row in enumerate(text.splitlines(), 1) if line in row)
    with pytest.raises(GraphError) as raised:
        assemble(small_run(f"{tmp_path / 'mine.py'}:mine"), 8)
    said = str(raised.value)
    assert said.startswith(f"step: its init_state must give the first state. Got {got}")
    assert f", at {tmp_path / 'mine.py'}:{number}. Its only argument is the settings, here Settings: write" in said


def test_a_file_that_does_not_parse(tmp_path):
    message = error_of(tmp_path, "(outputs, batch, update):", "(outputs, batch, update)")
    assert "its module must import. Got SyntaxError: expected ':' (mine.py, line " in message
    assert re.search(r"mine\.py:\d+\.$", message)


def test_a_value_of_another_step(tmp_path):
    kept = """kept = []

def step(roles, state, prompts, config: Settings):
    kept.append(roles.actor.generate(prompts, config.sampling))
    if len(kept) > 1:
        roles.reward.scores(kept[0])"""
    (tmp_path / "mine.py").write_text(STEP.replace("def step(roles, state, prompts, config: Settings):", kept))
    assemble(small_run(f"{tmp_path / 'mine.py'}:step"), 8)
    with pytest.raises(
        ValueError, match=r"must come from this step\. Got .* of another trace\. Return it in the state"
    ):
        assemble(small_run(f"{tmp_path / 'mine.py'}:step"), 8)


@pytest.mark.parametrize(
    ("old", "new", "name", "message"),
    [
        ("", "", "stepp", "must name a function of {file}. Got 'stepp'. There: "),
        (
            "",
            "",
            "Settings",
            "Algorithm '{file}:Settings': must be a step function, (roles, state, data, config) -> "
            "(results, state), or an Algorithm. Got <class",
        ),
        (
            "",
            "",
            "loss",
            "a step takes four arguments, (roles, state, data, config) -> (results, state). Got loss(outputs, "
            "batch, update): too many positional arguments.",
        ),
        ("(frozen=True)", "", "step", "Got the dataclass Settings, which is not frozen. Write @dataclasses.dataclass("),
        (
            "config: Settings",
            "config: dict",
            "step",
            "its settings must be a frozen dataclass, which it annotates its last argument with. Got <class 'dict'>.",
        ),
        (
            "config: Settings",
            "config: 'Setings'",
            "step",
            "the annotation of its settings must be there when it is loaded. "
            "Got 'Setings': name 'Setings' is not defined.",
        ),
        (
            "import dataclasses",
            "import dataclases",
            "step",
            "its module must import. Got ModuleNotFoundError: No module named 'dataclases'",
        ),
        ("state\n", "state\n\nmine = Algorithm(lambda roles, state: None)\n", "mine", "a step takes four arguments"),
        ("state\n", "state\n\nmine = Algorithm(step, Settings())\n", "mine", "its settings must be a frozen dataclass"),
        ("state\n", "state\n\nmine = Algorithm(step, Settings, roles=('actor'))\n", "mine", "must be a tuple of names"),
        ("state\n", "state\n\nmine = Algorithm(step, Settings, ())\n", "mine", "init_state must be a function of the"),
        ("coef: float = 1.0", "coef: jax.Array = 1.0", "step", "settings.coef: no config can hold a field of type"),
    ],
)
def test_what_is_no_algorithm_says_what_one_is(tmp_path, old, new, name, message):
    file = tmp_path / "mine.py"
    assert message.format(file=file) in error_of(tmp_path, old, new, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coeff": 2.0}, "settings: unknown key 'coeff'. Known: sampling, update, coef. Did you mean 'coef'?"),
        ({"coef": "high"}, "settings.coef: expected a number. Got 'high'."),
        ({"max_new_tokens": 4}, "settings: unknown key 'max_new_tokens'. Known: sampling, update, coef."),
        (
            {"sampling": {"temperature": -1}},
            "settings.sampling.temperature: must be finite and not negative. Got -1.0.",
        ),
    ],
)
def test_settings_are_checked_as_strictly_as_those_of_the_package(tmp_path, settings, message):
    (tmp_path / "mine.py").write_text(STEP)
    with pytest.raises(ValueError, match=re.escape(message)):
        small_run(f"{tmp_path / 'mine.py'}:step", settings=settings)


def test_a_step_without_settings_takes_none(tmp_path):
    bare = STEP.replace("config: Settings", "config").replace("config.sampling", "Sampling(max_new_tokens=4)")
    (tmp_path / "mine.py").write_text(bare.replace("config.update", "SupervisedUpdate()").replace("config.coef", "0.5"))
    assert len(assemble(small_run(f"{tmp_path / 'mine.py'}:step"), 8).train.graph.calls) == 4
    with pytest.raises(ValueError, match=r"settings: unknown key 'coef'\. Known: none\."):
        small_run(f"{tmp_path / 'mine.py'}:step", settings={"coef": 1.0})
