"""`model: FOLDER`, which every role starts from that is a model and says nothing else."""

import pytest

from jaxrlhf.config.reading import ConfigError, dump_yaml
from jaxrlhf.config.schema import load_run


@pytest.mark.parametrize("name", ["grpo_lora_hf", "ppo_hf"])
def test_the_configs_for_a_model_of_ones_own_start_from_it(name):
    roles = load_run(name, ["model=path/to/folder", "data.path=rows.jsonl"]).roles
    models = {name for name, role in roles.items() if role.init == "path/to/folder"}
    assert models == {"actor", "critic"} & set(roles)
    assert roles["reference"].init == "actor" and roles["reward"].init == "random"


def test_a_role_with_another_origin_keeps_it(tmp_path):
    overrides = [
        "model=path/to/folder", "data.path=rows.jsonl", "roles.judge={init: other/folder, head: scalar}",
        "roles.slow={average: {of: actor}}", "roles.sum={weighted_sum: {reward: 1}}",
        "roles.actor.model={dtype: bfloat16}",
    ]  # fmt: skip
    run = load_run("grpo_lora_hf", overrides)
    assert {name: role.init for name, role in run.roles.items() if role.init != "random"} == {
        "actor": "path/to/folder", "reference": "actor", "judge": "other/folder",
    }  # fmt: skip
    written = tmp_path / "config.yaml"
    written.write_text(dump_yaml(run))
    assert load_run(written) == run, "a config that was written out says where every role starts"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model={dtype: bfloat16}"], r"model: must be a folder in Hugging Face's format.* Got {'dtype': 'bfloat16'}"),
        (["model=folder", "roles.actor.init=other"], r"model: a role must start from it. Got 'folder', and every role"),
    ],
)
def test_a_folder_that_nothing_starts_from_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run("grpo_lora_hf", ["data.path=rows.jsonl", *overrides])
