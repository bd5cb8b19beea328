"""Roles that start from folders, and roles that read, adapt or follow the weights of others."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from jaxrlhf import plan
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.roles import configured_models, precision_notes
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import read_config
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import weight_sets
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.step_draft import draft_step
from tests.small_run import write_run

LORA = "roles.actor.lora={rank: 2}"
LLAMA = Path(__file__).parents[1] / "parity" / "data" / "llama"


@pytest.fixture
def assembled(tmp_path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)

    def assembled(*overrides: str) -> Assembly:
        return assemble(load_run("run.yaml", overrides), 8)

    return assembled


def models(assembly: Assembly) -> dict[str, ModelRole]:
    return {name: role for name, role in assembly.train.roles.items() if isinstance(role, ModelRole)}


def test_the_reference_and_other_adapters_read_what_the_actors_adapters_adapt(assembled):
    assembly = assembled(LORA, "roles.critic.lora={rank: 3}", "roles.slow={average: {of: actor, decay: 0.5}}")
    roles = models(assembly)
    assert (roles["reference"].weights, roles["critic"].base, roles["slow"].base) == ("actor.base",) * 3
    sets = weight_sets(roles)
    assert set(sets) == {"actor.base", "actor", "critic", "slow"}
    assert sets["critic"].lora is not None and "value_head" in sets["critic"].declare()
    shown = {row["role"]: row for row in assembly.role_rows()}
    assert shown["actor"]["starts from"] == "rank 2 on actor.base (random)"
    assert shown["critic"]["starts from"] == "rank 3 on actor.base"
    assert shown["reference"]["starts from"] == "actor.base"
    assert shown["slow"]["starts from"] == "rank 2 on actor.base, average of actor"
    assert ", trained " in shown["actor"]["parameters"] and ", trained " not in shown["reference"]["parameters"]


def test_without_adapters_the_reference_has_a_copy(assembled):
    assert set(weight_sets(models(assembled()))) == {"actor", "critic", "reference"}


def test_a_head_on_anothers_trunk_has_no_weights_of_its_own(assembled):
    settings = "settings={sampling: {max_new_tokens: 6}}"
    assembly = assembled("algorithm=ppo_shared", "roles.critic={shares: actor}", settings, "plan={default: {data: 2}}")
    shown = {row["role"]: row for row in assembly.role_rows()}
    assert shown["critic"]["what"] == "model, scalar head" and shown["critic"]["parameters"] == "those of actor"
    assert shown["critic"]["starts from"] == "shares actor" and shown["actor"]["what"] == "model, lm and scalar heads"
    assert set(weight_sets(models(assembly))) == {"actor", "reference"}


def test_a_role_that_needs_another_head_has_weights_of_its_own(assembled):
    roles = models(assembled(LORA, "roles.taste={init: actor, head: scalar}"))
    assert roles["taste"].weights == "" and "taste" in weight_sets(roles)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["roles.critic={shares: acter}"],
            "roles.critic.shares: must be another role. Got 'acter'. Roles: actor, reference, exact, short, reward. "
            "Did you mean 'actor'?",
        ),
        (
            ["roles.slow={average: {of: exact}}"],
            "roles.slow.average.of: must be a role with weights of its own. Got 'exact', which has none.",
        ),
        (
            ["roles.slow={average: {of: reference}}"],
            "roles.slow.average.of: must be a role that is trained. Got 'reference', which has no optimizer.",
        ),
        (
            ["roles.slow={average: {of: actor}, init: actor}"],
            "roles.slow: its weights are those of 'actor', with all that they are. Got also init. Remove it.",
        ),
        (
            ["roles.slow={average: {of: actor}}", "roles.reference.init=slow"],
            "roles.reference.init: 'slow' has no first weights of its own. Start from 'actor', whose weights it reads.",
        ),
        (
            ["roles.critic={shares: actor}"],
            "role 'critic' has no method 'train'. It has: loss, scores, token_scores, values. It shares the weights of "
            "'actor': train that role, with both losses.",
        ),
        (
            ["roles.reference={shares: actor, head: lm}"],
            "roles.reference.shares: is for a second head beside that of 'actor'. Got lm, which 'actor' has itself: "
            "the role would change with it. For its weights as they started, set roles.reference to {init: actor}.",
        ),
        (
            ["roles.reference={shares: actor}"],
            "role 'reference' has no method 'logprobs'. It has: loss, scores, token_scores, values. It has a head of "
            "its own on the weights of 'actor'. A reference is a copy of them: set roles.reference to {init: actor}.",
        ),
        (
            ["roles.critic={average: {of: actor}}"],
            "role 'critic' has no method 'values'. It has: generate, logprobs, loss, policy.",
        ),
        (
            [LORA, "output.export=[exact]"],
            "output.export: must be roles with weights of their own. Got 'exact'. Known: actor, critic, reference.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(assembled, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        assembled(*overrides)


# Folders


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The models of roles whose actor starts from a folder."""
    write_run(tmp_path)
    shutil.copytree(LLAMA, tmp_path / "llama")
    monkeypatch.chdir(tmp_path)

    def found(*overrides: str, on_cpu: bool = True) -> dict[str, ModelConfig]:
        start = ["roles.actor={init: llama, optimizer: {learning_rate: 1.0e-3}}", *overrides]
        return configured_models(load_run("run.yaml", start), on_cpu=on_cpu)

    return found


def set_precision(**fields: str | None) -> None:
    path = Path("llama/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": None, **fields}))


def test_a_folder_says_what_a_model_is_and_a_run_how_it_computes(found):
    stated = "{dtype: bfloat16, scan_layers: true, attention: xla, logits_chunk_tokens: 64, num_layers: 2, head_dim: 8}"
    models = found(f"roles.actor.model={stated}", "roles.reference.model={dtype: float32, max_position_embeddings: 99}")
    chosen = dict(dtype="bfloat16", scan_layers=True, attention="xla", logits_chunk_tokens=64)
    assert models["actor"] == dataclasses.replace(read_config(LLAMA), **chosen)
    assert models["critic"] == dataclasses.replace(models["actor"], head="scalar")
    assert models["reference"] == dataclasses.replace(models["actor"], dtype="float32", max_position_embeddings=99)


def test_a_window_binds_only_sequences_that_outgrow_it(found):
    fields = json.loads(Path("llama/config.json").read_text())
    Path("llama/config.json").write_text(
        json.dumps(fields | {"architectures": ["MistralForCausalLM"], "sliding_window": 64})
    )
    assert found()["actor"].windows == (64, 64)
    assert found("roles.actor.model.max_position_embeddings=64")["actor"].windows == (None, None)


def test_weights_without_a_row_for_every_token_are_named(found):
    run = load_run("run.yaml", ["roles.actor={init: llama, optimizer: {}}", "tokenizer.kind=bytes"])
    message = (
        "roles.actor.init: model.embed_tokens.weight in llama must have a row for every token of bytes, 258. Got 128. "
        "One of the two is of another model: leave tokenizer out to use that of the folder, or download the folder "
        "again."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        draft_step(run)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.actor.model.num_layers=3", "roles.actor.model.num_layers: must be that of llama, 2, since its weights"),
        ("roles.actor.model=tiny", "roles.actor.model.vocab_size: must be that of llama, 128, since its weights start "
         "from there. Got 264. Leave it out (where a preset or a base config says it, set roles.actor.model to null"),
        ("roles.actor.model.rope_scaling=null", "rope_scaling: must be that of llama, RopeScaling("),
        ("roles.actor.model.max_position_embeddings=512", "model.max_position_embeddings: must be that of llama, 256,"),
        ("roles.actor.model.max_position_embeddings=0", "model.max_position_embeddings: must be at least 1"),
        ("roles.critic.model.hidden_size=8", "roles.critic.model.hidden_size: must be that of the role 'actor', 32, "),
        ("roles.actor.model.dtype=int8", "roles.actor.model.dtype: expected one of float32, bfloat16, float64. Got"),
        ("roles.actor.model.nun_layers=3", "roles.actor.model: unknown key 'nun_layers'."),
    ],
)  # fmt: skip
def test_what_contradicts_weights_that_are_there_is_refused(found, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        found(override)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_folder_in_bfloat16_computes_in_it_but_on_cpus(found, field):
    set_precision(**{field: "bfloat16"})
    assert {model.dtype for model in found(on_cpu=False).values()} == {"bfloat16"}
    assert {model.dtype for model in found(on_cpu=True).values()} == {"float32"}
    assert found("roles.actor.model.dtype=float32", on_cpu=False)["reference"].dtype == "float32"
    run = load_run("run.yaml", ["roles.actor={init: llama, optimizer: {}}"])
    for dtype, why in {"bfloat16": "as that is", "float32": "as is usual on CPUs, while that is in bfloat16"}.items():
        models = found(on_cpu=dtype == "float32")
        assert precision_notes(run, models) == [
            f"actor starts from llama and computes in {dtype}, {why}. To change that, set roles.actor.model.dtype."
        ]
    assert precision_notes(load_run("run.yaml", ["roles.actor={init: llama, model: {dtype: float32}}"]), models) == []
    set_precision(**{field: "float16"})
    assert found(on_cpu=False)["actor"].dtype == "float32"


@pytest.mark.parametrize(("cluster", "on_cpu"), [("1x1:a100-80g", False), ("cpu:2", True)])
def test_a_plan_for_other_devices_is_of_their_precision(found, monkeypatch, cluster, on_cpu):
    asked = []

    def draft_step(config, *, on_cpu, tables=None):
        asked.append(on_cpu)
        raise ConfigError("enough")

    monkeypatch.setattr(plan, "draft_step", draft_step)
    assert plan.main(["--config", "run.yaml", "--cluster", cluster]) == 1 and asked == [on_cpu]


def test_weights_in_another_precision_are_not_shared(assembled):
    roles = models(assembled(LORA, "roles.critic.lora={rank: 3}", "roles.reference.model={dtype: bfloat16}"))
    assert (roles["reference"].weights, roles["critic"].base) == ("", "actor.base")
    assert weight_sets(roles)["reference"].model.dtype == "bfloat16"
