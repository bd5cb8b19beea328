"""Tracing: the calls that are written down, their edges and their rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import GraphError, Ref
from jaxrlhf.tracing import RoleMethods, compute, trace
from tests.made_up_step import (
    INFER,
    PROMPTS,
    ROLES,
    STATE,
    B,
    Settings,
    T,
    a_loss,
    actor_critic,
    call_named,
    error_of,
    follow,
    make_batch,
    must_wait_for,
    needs,
    shape,
    trace_step,
)

# What a trace writes down


def test_calls_in_order_with_their_edges():
    graph = trace_step(actor_critic)
    assert needs(graph) == {
        "actor.generate": (),
        "critic.values": ("actor.generate",),
        "reward.scores": ("actor.generate",),
        "make_batch": ("actor.generate", "critic.values", "reward.scores"),
        "actor.train": ("actor.generate", "make_batch"),
        "critic.train": ("critic.values", "make_batch"),
    }
    assert [call.kind for call in graph.calls] == ["generate", "infer", "host", "compute", "train", "train"]
    assert [call.role for call in graph.calls] == ["actor", "critic", "reward", None, "actor", "critic"]
    assert [call.row_wise for call in graph.calls] == [True, True, True, False, False, False]
    assert [call.num_rows for call in graph.calls] == [B] * 6
    assert call_named(graph, "make_batch").function is make_batch


def test_outputs_are_references_with_the_shapes_of_the_abstract_functions():
    graph = trace_step(actor_critic)
    tokens = call_named(graph, "actor.generate").outputs["tokens"]
    assert isinstance(tokens, Ref)
    assert (tokens.call, tokens.leaf, tokens.shape, tokens.dtype) == ("actor.generate", 0, (B, T), jnp.int32)
    assert tokens.aval == shape(B, T, dtype=jnp.int32)
    assert repr(tokens) == f"actor.generate[0]: int32[{B}, {T}]"
    (results,) = graph.results
    assert set(results) == {"actor", "critic", "metric"} and results["actor"]["loss"].call == "actor.train"
    assert graph.state["coef"].call == "make_batch"
    assert set(graph.inputs) == {"state", "data"}


def test_a_second_call_of_one_name_gets_an_ordinal():
    def step(roles, state, prompts, settings):
        first, second = (roles.actor.generate(prompts, settings) for _ in range(2))
        compute(concatenate, first, second)
        return compute(concatenate, second, first), state

    names = [call.name for call in trace_step(step).calls]
    assert names == ["actor.generate", "actor.generate#2", "concatenate", "concatenate#2"]


def concatenate(first, second):
    return jnp.concatenate([first["tokens"], second["tokens"]])


def test_versions_of_weights_order_the_calls_of_a_role():
    def step(roles, state, prompts, settings):
        before = roles.actor.generate(prompts, settings)
        roles.actor.train(a_loss, {}, settings)
        after = roles.actor.generate(prompts, settings)
        return roles.actor.train(a_loss, {"before": before, "after": after}, settings), state

    graph = trace_step(step)
    assert [(call.reads, call.writes) for call in graph.calls] == [(0, None), (0, 1), (1, None), (1, 2)]
    assert needs(graph) == {
        "actor.generate": (),
        "actor.train": ("actor.generate",),  # no data, but it may not change weights that are still read
        "actor.generate#2": ("actor.train",),
        "actor.train#2": ("actor.generate", "actor.train", "actor.generate#2"),
    }


def test_a_role_without_weights_has_no_versions():
    scores = call_named(trace_step(actor_critic), "reward.scores")
    assert (scores.weights, scores.reads, scores.writes) == (None, 0, None)


def test_what_iterations_may_overlap():
    graph = trace_step(actor_critic, iterations=2)
    assert [call.name for call in graph.calls[6:]] == [
        "1:actor.generate",
        "1:critic.values",
        "1:reward.scores",
        "1:make_batch",
        "1:actor.train",
        "1:critic.train",
    ]
    assert [call.iteration for call in graph.calls] == [0] * 6 + [1] * 6
    assert {call.plan_name for call in graph.calls[6:]} == {call.name for call in graph.calls[:6]}
    assert set(graph.inputs) == {"state", "data", "data1"} and len(graph.results) == 2
    assert needs(graph)["1:actor.generate"] == ("actor.train",)
    assert "critic.train" not in must_wait_for(graph, "1:actor.generate")
    assert "1:actor.generate" not in must_wait_for(graph, "critic.train")
    assert needs(graph)["1:critic.values"] == ("critic.train", "1:actor.generate")
    assert "make_batch" in needs(graph)["1:make_batch"]  # through the state
    assert needs(graph)["1:critic.train"] == ("critic.train", "1:critic.values", "1:make_batch")
    assert graph.state["coef"].call == "1:make_batch"


def test_ordinals_start_anew_in_every_iteration():
    def step(roles, state, prompts, settings):
        return [roles.actor.generate(prompts, settings) for _ in range(2)], state

    names = [call.name for call in trace_step(step, iterations=2).calls]
    assert names == ["actor.generate", "actor.generate#2", "1:actor.generate", "1:actor.generate#2"]


# Which outputs of a compute function have rows


@pytest.mark.parametrize("num_rows", [1, 2, 6])
def test_rows_are_followed_whatever_the_sizes(num_rows):
    def step(roles, state, prompts, settings):
        return compute(follow, prompts, state), state

    (results,) = trace_step(step, data=shape(num_rows, 3, dtype=jnp.int32)).results
    assert {name: ref.has_rows for name, ref in results.items()} == {
        "each": True,
        "wider": True,
        "twice": True,
        "total": False,
        "pair": False,
        "state": False,
    }


def test_rows_come_from_data_and_row_wise_calls_and_not_from_state_or_training():
    graph = trace_step(actor_critic)
    assert graph.inputs["data"].has_rows and not graph.inputs["state"]["coef"].has_rows
    assert call_named(graph, "critic.values").outputs.has_rows
    assert not call_named(graph, "actor.train").outputs["loss"].has_rows
    batch, state, metric = call_named(graph, "make_batch").outputs
    assert batch["advantages"].has_rows and batch["rollout"]["tokens"].has_rows
    assert not state["coef"].has_rows and not metric.has_rows


def test_without_rows_in_nothing_has_rows():
    def step(roles, state, prompts, settings):
        return compute(state_alone, state), state

    graph = trace_step(step)
    assert [ref.has_rows for ref in graph.calls[0].output_refs] == [False, False]
    assert graph.calls[0].num_rows == 0


def state_alone(state):
    return jnp.stack([state["coef"]] * B), state["coef"]


def transpose(prompts):
    return {"transposed": prompts.T}


def test_rows_must_come_first():
    def step(roles, state, prompts, settings):
        return compute(transpose, prompts), state

    assert error_of(step) == (
        "transpose: an output follows the rows in its first axis or not at all. Got output['transposed'] of shape [3, "
        "6], and [3, 12] for twice the rows. Put the rows first."
    )


def knows_its_rows(prompts):
    return prompts + jnp.arange(B)[:, None]


def test_a_function_must_work_for_any_number_of_rows():
    def step(roles, state, prompts, settings):
        return compute(knows_its_rows, prompts), state

    message = error_of(step)
    assert message.startswith(
        "knows_its_rows: a compute function must work for any number of rows. It fails when every input"
    )
    assert message.endswith("Take sizes from the arrays that it gets.")


def one_output_a_row(prompts):
    return list(prompts)


def test_a_function_must_give_one_structure_for_any_number_of_rows():
    def step(roles, state, prompts, settings):
        return compute(one_output_a_row, prompts), state

    assert error_of(step) == (
        "one_output_a_row: the structure of its outputs must not depend on the number of rows. Got PyTreeDef([*, *, *, "
        "*, *, *]), and PyTreeDef([*, *, *, *, *, *, *, *, *, *, *, *]) for twice the rows. Return arrays with the "
        "rows first."
    )


# Roles made of other roles


def added(parts, weights):
    return sum(weights[name] * scores for name, scores in parts.items())


def scores_of(*parts):
    """A role whose scores are made of those of other roles."""

    def scores(roles, rollout):
        return compute(
            added,
            {part: getattr(roles, part).scores(rollout) for part in parts},
            dict.fromkeys(parts, 0.5),
            name="sum.added",
        )

    return RoleMethods({}, composed={"scores": scores})


SUM_ROLES = {**ROLES, "judge": RoleMethods({"scores": INFER}, weights="judge"), "sum": scores_of("reward", "judge")}


def test_a_composed_method_makes_the_calls_of_others():
    def step(roles, state, prompts, settings):
        return roles.sum.scores(roles.actor.generate(prompts, settings)), state

    graph = trace(step, SUM_ROLES, STATE, PROMPTS, Settings())
    assert needs(graph) == {
        "actor.generate": (),
        "reward.scores": ("actor.generate",),
        "judge.scores": ("actor.generate",),
        "sum.added": ("reward.scores", "judge.scores"),
    }
    total = call_named(graph, "sum.added")
    assert (total.role, total.kind, total.function, total.num_rows) == (None, "compute", added, B)
    assert graph.results[0].call == "sum.added" and graph.results[0].has_rows


def test_an_unknown_method_of_a_composed_role():
    with pytest.raises(
        GraphError, match=r"role 'sum' has no method 'score'\. It has: scores\. Did you mean 'scores'\?"
    ):
        trace(lambda roles, *_: roles.sum.score, SUM_ROLES, STATE, PROMPTS, Settings())


def test_what_was_asked_already_is_not_asked_again():
    def step(roles, state, prompts, settings):
        rollout, other = (roles.actor.generate(prompts, settings) for _ in range(2))
        asked = [roles.reward.scores(rollout), roles.sum.scores(rollout), roles.reward.scores(other)]
        before = roles.critic.values(rollout)
        roles.critic.train(a_loss, rollout, settings)
        after = roles.critic.values(rollout)
        assert before is not after and roles.critic.values(rollout) is after
        return asked, state

    names = [call.name for call in trace(step, SUM_ROLES, STATE, PROMPTS, Settings(), iterations=2).calls]
    one = ["actor.generate", "actor.generate#2", "reward.scores", "judge.scores", "reward.scores#2", "critic.values",
           "critic.train", "critic.values#2", "sum.added"]  # fmt: skip
    assert names[:9] == one and sorted(names[9:]) == sorted(f"1:{name}" for name in one)


def test_what_waits_for_the_host_comes_last():
    def step(roles, state, prompts, settings):
        rollout = roles.actor.generate(prompts, settings)
        scores = roles.sum.scores(rollout)
        values = roles.critic.values(rollout)
        metrics = roles.actor.train(a_loss, rollout, settings)
        batch, state, _ = compute(make_batch, rollout, values, scores, state)
        return (metrics, roles.critic.train(a_loss, batch, settings)), state

    graph = trace(step, SUM_ROLES, STATE, PROMPTS, Settings())
    assert [call.name for call in graph.calls] == [
        "actor.generate",
        "reward.scores",
        "judge.scores",
        "critic.values",
        "actor.train",
        "sum.added",
        "make_batch",
        "critic.train",
    ]


# Outside a trace


def test_compute_outside_a_trace_calls_the_function():
    given = compute(follow, jnp.ones((2, 3), jnp.int32), {"coef": jnp.ones(())})
    np.testing.assert_array_equal(given["each"], [1, 1])


def test_an_error_ends_the_trace():
    error_of(lambda roles, *_: roles.acter)
    assert compute(len, [1, 2]) == 2


def every_other(prompts):
    return prompts[::2]


def test_groups_of_rows():
    def declared(size):
        def step(roles, state, prompts, config):
            return compute(first_column, prompts, groups_of=size), state

        return step

    assert call_named(trace_step(declared(2)), "first_column").groups_of == 2
    for size in (0, B + 1):
        assert error_of(declared(size)) == (
            f"first_column: groups_of must be at least 1 and divide the rows. Got {size} for {B} rows. Use the size of "
            "a group, or 1 for row by row."
        )

    def fewer_rows(roles, state, prompts, config):
        return compute(every_other, prompts, groups_of=2), state

    assert error_of(fewer_rows) == (
        "every_other: groups_of is for a function whose inputs and outputs have equally many rows. Got "
        f"{B} in, {B // 2} out. Leave groups_of out."
    )


def first_column(prompts):
    return prompts[:, 0]
