"""Roles that read, adapt or follow the weights of others."""

import re

import pytest

from jaxrlhf.config.schema import load_run
from jaxrlhf.runtime.assembly import Assembly, assemble
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weight_sets import weight_sets
from tests.small_run import write_run

LORA = "roles.actor.lora={rank: 2}"


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
