"""A config over one of another algorithm: what that algorithm has no use for is left out, and said."""

import pytest

from jaxrlhf.config.reading import ConfigError, known_part
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.run.assembly import assemble

SETTINGS = (
    "settings of ppo that grpo does not have are left out: gae_lambda, critic_update. Those that it has apply to it: "
    "sampling, kl, actor_update."
)
PLAN = "what its plan says of critic.values, critic.train is left out: grpo has no critic."


def load(tmp_path, text, *overrides) -> RunConfig:
    (tmp_path / "run.yaml").write_text(text)
    return load_run(tmp_path / "run.yaml", overrides)


def said(run: RunConfig) -> list[str]:
    return [note.partition(".yaml: ")[2] for note in run.notes]


def test_a_base_of_another_algorithm_is_taken_as_far_as_it_goes(tmp_path):
    run = load(tmp_path, "base: ppo_arithmetic\nalgorithm: grpo\nsettings: {normalize_std: false}")
    assert said(run) == [SETTINGS, PLAN]
    assert run.settings.sampling.max_new_tokens == 10 and run.settings.kl.coef == 0.02
    assert not run.settings.normalize_std and run.settings.sampling.num_samples == 8
    assert set(run.plan.calls) == {"reference.logprobs", "actor.train"} and run.plan.default and "critic" in run.roles


def test_the_command_line_chooses_another_algorithm(tmp_path):
    by_file = load(tmp_path, "base: ppo_arithmetic\nalgorithm: grpo\nsettings: {sampling: {num_samples: 4}}")
    by_line = load_run("ppo_arithmetic", ["algorithm=grpo", "settings.sampling.num_samples=4"])
    assert by_line == by_file and said(by_line) == said(by_file)
    assembly = assemble(by_line, 8)
    assert assembly.warnings[:2] == by_line.notes
    assert set(assembly.train.plan.placements) == {"actor.generate", "actor.train", "grpo_batch", "reference.logprobs"}


def test_nested_settings_and_fused_calls(tmp_path):
    run = load_run("ppo_pipelines_arithmetic", ["algorithm=rloo"])
    assert said(run)[1].endswith(
        "what its plan says of critic.values, critic.train, fuse is left out: rloo has no critic."
    )
    assert run.plan.fuse == ()
    text = "base: grpo_arithmetic\nsettings: {actor_update: {clip: 0.3}, normalize_std: true}"
    (left_out,) = said(load(tmp_path, text, "algorithm=rloo"))
    assert left_out.startswith(
        "settings of grpo that rloo does not have are left out: normalize_std, actor_update.clip."
    )


def test_what_the_user_wrote_for_the_algorithm_stays_strict(tmp_path):
    with pytest.raises(ConfigError, match=r"settings: unknown key 'gae_lambda'"):
        load(tmp_path, "base: ppo_arithmetic\nalgorithm: grpo\nsettings: {gae_lambda: 0.9}")
    with pytest.raises(ConfigError, match=r"settings: unknown key 'gae_lambda'"):
        load_run("ppo_arithmetic", ["algorithm=grpo", "settings.gae_lambda=1"])
    with pytest.raises(ConfigError, match=r"algorithm: must be one of .*Did you mean 'grpo'"):
        load_run("ppo_arithmetic", ["algorithm=grppo"])


def test_nothing_is_said_where_nothing_is_left_out(tmp_path):
    for text in (
        "base: ppo_arithmetic\nsteps: 1",
        "base: ppo_arithmetic\nalgorithm: grpo\nsettings: null\nplan: null",
        "base: grpo_arithmetic\nalgorithm: ppo",
    ):
        assert load(tmp_path, text.replace("plan: null", "plan: auto")).notes == ()


def test_the_part_of_a_tree_that_is_known():
    tree = {"name": 1, "x": 2, "evaluation": {"every": 1, "y": {}}, "output": 3, "roles": {"z": 1}}
    known = {"name": 1, "evaluation": {"every": 1}, "output": 3, "roles": {"z": 1}}
    assert known_part(RunConfig, tree) == (known, ["x", "evaluation.y"])
