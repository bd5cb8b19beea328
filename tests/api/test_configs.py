"""Configs in Python: keys and dataclasses laid over configs, runs without a config, and configs that are written."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import jaxrlhf as rl

SHIPPED = sorted(path.stem for path in (Path(rl.__file__).parent / "configs").glob("*.yaml"))
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 26)]


def my_step(roles: Any, state: Any, prompts: rl.Prompts, config: rl.GRPOConfig) -> tuple[dict[str, Any], Any]:
    return {}, state


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_that_was_written_is_the_same(name, tmp_path):
    config = rl.read_config(name)
    path = rl.write_config(config, tmp_path / "config.yaml")
    assert rl.read_config(path) == config
    assert rl.read_config(config) == config and rl.read_config({"base": name}) == config


def test_keys_are_laid_over_a_config():
    config = rl.read_config("ppo_arithmetic", steps=3, settings={"kl": {"coef": 0.5}}, roles={"critic": {"head": None}})
    assert (config.steps, config.settings.kl.coef, config.settings.kl.target) == (3, 0.5, 2.0)
    assert config.roles["critic"].head is None and config.roles["critic"].init == "actor"
    assert config.evaluation is not None and rl.read_config("ppo_arithmetic", evaluation=None).evaluation is None


def test_a_dataclass_is_a_whole_section():
    config = rl.read_config(
        "ppo_arithmetic",
        evaluation=rl.EvaluationConfig(every=3),
        output=rl.OutputConfig(folder="x"),
        roles={"actor": rl.RoleConfig(model="tiny", optimizer=rl.OptimizerConfig(1e-3))},
        settings=rl.PPOConfig(gae_lambda=0.5),
        plan=rl.PlanConfig(calls={"actor.train": rl.Placement((0, 1), rl.Strategy(data=2))}),
    )
    assert config.evaluation == rl.EvaluationConfig(every=3) and config.output == rl.OutputConfig(folder="x")
    assert config.roles["actor"].optimizer == rl.OptimizerConfig(1e-3)
    assert config.settings == rl.PPOConfig(gae_lambda=0.5)
    assert config.plan.calls["actor.train"] == rl.Placement((0, 1), rl.Strategy(data=2))


@pytest.mark.parametrize(
    "model",
    [rl.ModelConfig(num_layers=3), {"num_layers": 3}, {"preset": "tiny", "num_layers": 3}],
    ids=["dataclass", "mapping", "preset"],
)
def test_models_of_roles(model):
    role = rl.RoleConfig(model=model, optimizer=rl.OptimizerConfig())
    assert role.stated["num_layers"] == 3
    config = rl.read_config("grpo_arithmetic", roles={"actor": role})
    assert config.roles["actor"].stated["num_layers"] == 3
    assert rl.read_config("grpo_arithmetic", roles={"actor": {"model": model}}).roles["actor"].stated["num_layers"] == 3
    assert rl.RoleConfig(model="tiny").stated["hidden_size"] == 128 and hash(role) == hash(role)
    with pytest.raises(ValueError, match=r"model.preset: must be one of tiny, .* Got 'tinny'. Did you mean 'tiny'"):
        rl.RoleConfig(model="tinny")
    with pytest.raises(ValueError, match=r"RoleConfig: model: unknown key 'layers'. Known: vocab_size"):
        rl.RoleConfig(model={"layers": 3})
    with pytest.raises(ValueError, match=r"model.num_layers: must be at least 1. Got 0"):
        rl.RoleConfig(model={"num_layers": 0})


def test_short_keywords():
    config = rl.read_config(
        "ppo_arithmetic",
        model={"preset": "tiny", "num_layers": 4},
        sampling=rl.Sampling(max_new_tokens=3),
        optimizer={"learning_rate": 0.25},
        reward=length,
    )
    assert config.roles["actor"].stated["num_layers"] == 4
    assert config.settings.sampling == rl.Sampling(max_new_tokens=3) and config.settings.gae_lambda == 0.95
    rates = {name: role.optimizer and role.optimizer.learning_rate for name, role in config.roles.items()}
    assert rates == {"actor": 0.25, "critic": 0.25, "reference": None, "reward": None, "exact_match": None}
    assert config.roles["reward"].function == f"{__name__}:length" and config.roles["reward"].options == {}


def test_the_model_of_a_folder_takes_the_place_of_sizes(tmp_path):
    config = rl.read_config("ppo_arithmetic", model=tmp_path)
    assert (config.roles["actor"].init, config.roles["actor"].model) == (str(tmp_path), None)
    assert config.roles["critic"].init == "actor"


@pytest.mark.parametrize(
    ("reward", "role"),
    [
        ("exact_answer", {"function": "exact_answer"}),
        ("my/file.py:score", {"function": "my/file.py:score"}),
        ("models/judge", {"init": "models/judge", "head": "scalar"}),
        ({"function": "exact_answer", "workers": 2}, {"function": "exact_answer", "workers": 2}),
        (rl.RoleConfig(function="final_number"), {"function": "final_number"}),
    ],
)
def test_rewards(reward, role):
    config = rl.read_config("grpo_arithmetic", reward=reward)
    assert config.roles["reward"] == dataclasses.replace(rl.RoleConfig(), **role)


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ("grpo", ["actor", "reference", "reward"]),
        ("ppo", ["actor", "critic", "reference", "reward"]),
        ("ppo_shared", ["actor", "critic", "reference", "reward"]),
        ("dapo", ["actor", "reward"]),
        (my_step, ["actor", "reward"]),
        (rl.Algorithm(my_step, rl.GRPOConfig, roles=("actor", "reference")), ["actor", "reference", "reward"]),
    ],
)
def test_without_a_config_roles_are_those_of_the_algorithm(algorithm, roles):
    sizes = {"steps": 1, "batch_size": 4, "data": {"task": "arithmetic"}, "reward": "exact_answer"}
    config = rl.read_config(algorithm=algorithm, model="tiny", **sizes)  # pyright: ignore[reportArgumentType]
    assert sorted(config.roles) == roles
    assert config.name == (algorithm if isinstance(algorithm, str) else "my_step")
    assert config.roles["actor"].model is not None and config.roles["actor"].optimizer == rl.OptimizerConfig()
    assert isinstance(config.settings, rl.GRPOConfig) or isinstance(algorithm, str)


def test_without_a_config_supervised_training_needs_an_actor_and_a_reward_model_itself():
    sizes: dict[str, Any] = {"steps": 1, "batch_size": 4, "data": {"task": "arithmetic"}, "model": "tiny"}
    assert list(rl.read_config(algorithm="sft", **sizes).roles) == ["actor"]
    (role,) = rl.read_config(algorithm="reward_model", **sizes).roles.values()
    assert role.stated["head"] == "scalar" and role.optimizer is not None


@pytest.mark.parametrize(
    ("plan", "placements"),
    [
        ({"actor.train": "fsdp 2 x tensor 2 on 4-7"}, {"actor.train": "fsdp 2 x tensor 2 on 4-7"}),
        ({"calls": {"actor.train": "one device on 3"}}, {"actor.train": "one device on 3"}),
        ({"calls": {"actor": {"train": "data 8", "generate": {"data": 2}}}}, {"actor.train": "data 8 on 0-7"}),
        ({"actor.train": rl.Placement((2,))}, {"actor.train": "one device on 2"}),
        ({"calls": {"actor.train": {"data": 2}}, "actor.train": "data 4"}, {"actor.train": "data 4 on 0-3"}),
    ],
)
def test_placements_in_a_line(plan, placements):
    config = rl.read_config("grpo_arithmetic", plan=plan)
    for call, text in placements.items():
        assert str(config.plan.placements[call]) == text


def test_the_default_placement_in_a_line_and_placement_methods_by_name():
    assert str(rl.read_config("grpo_arithmetic", plan={"default": "data 2"}).plan.default) == "data 2 on "
    plan = rl.read_config("grpo_arithmetic", plan="interleaving").plan
    assert plan.auto and plan.placement is not None and plan.placement.name == "interleaving"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stepz": 3}, r"grpo_arithmetic.yaml with other keys: unknown key 'stepz'.*Did you mean 'steps'"),
        ({"plan": "interleavin"}, r"plan: must be a mapping, auto, interleaving, .*Got 'interleavin'.*Did you mean"),
        (
            {"plan": {"actor.train": "fsdp two on 0-3"}},
            r"plan.calls.actor.train: must be degrees of parallelism on devices. Got 'fsdp two on 0-3'. Write 'fsdp 2",
        ),
        (
            {"plan": {"actor.train": "fsd 2 on 0-3"}},
            r"actor.train: a degree must be one of pipeline, data, fsdp, tensor. Got 'fsd' .* Did you mean 'fsdp'",
        ),
        ({"plan": {"actor.train": "data 2 x data 2 on 0-3"}}, r"must have each degree once. Got data twice"),
        ({"plan": {"actor.train": "data 2 on 0-x"}}, r"actor.train: must be positions of devices, such as"),
        ({"plan": {"actor.train": "data 2 on "}}, r"actor.train: must name devices after 'on'. Got 'data 2 on '"),
        ({"data": 3}, r"data: must be rows \(a list of dicts, a DataFrame, a Dataset\), a file of rows, or keys"),
        ({"data": {"test": ROWS}}, r"data: a mapping of tables must have the split 'train'. Got 'test'"),
    ],
)
def test_mistakes_are_input_errors(keys, message):
    with pytest.raises(rl.InputError, match=message):
        rl.read_config("grpo_arithmetic", **keys)
