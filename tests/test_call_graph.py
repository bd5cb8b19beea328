"""Tracing, on a made-up step over roles with made-up methods: no model, no mesh."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import Call, CallGraph, GraphError, Method, Ref, RoleMethods, compute, split_args, trace

B, T = 6, 5


@dataclasses.dataclass(frozen=True)
class Settings:
    length: int = T


@dataclasses.dataclass
class Unhashable:
    length: int = T


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def sampled(prompts, settings):
    return {"tokens": shape(prompts.shape[0], settings.length, dtype=jnp.int32)}


def scored(rollout):
    return shape(rollout["tokens"].shape[0])


def trained(loss, batch, update):
    return {"loss": shape()}


GENERATE, INFER, HOST = Method("generate", sampled), Method("infer", scored), Method("host", scored)
TRAIN = Method("train", trained, row_wise=False)
ROLES = {
    "actor": RoleMethods({"generate": GENERATE, "train": TRAIN}, weights="actor"),
    "critic": RoleMethods({"values": INFER, "train": TRAIN}, weights="critic"),
    "reward": RoleMethods({"scores": HOST}),
}
STATE = {"coef": np.float32(0.1)}
PROMPTS = shape(B, 3, dtype=jnp.int32)


def make_batch(rollout, values, scores, state):
    advantages = scores - values * state["coef"]
    return {"rollout": rollout, "advantages": advantages}, {"coef": state["coef"] * 2}, advantages.mean()


def a_loss():
    raise AssertionError("tracing must not run a loss")


def actor_critic(roles, state, prompts, settings):
    rollout = roles.actor.generate(prompts, settings)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    batch, state, metric = compute(make_batch, rollout, values, scores, state)
    results = {
        "actor": roles.actor.train(a_loss, batch, settings),
        "critic": roles.critic.train(a_loss, batch, settings),
        "metric": metric,
    }
    return results, state


def trace_step(
    step, *, state: Any = STATE, data: Any = PROMPTS, config: Any = Settings(), iterations: int = 1
) -> CallGraph:
    return trace(step, ROLES, state, data, config, iterations=iterations)


def error_of(step, **changes: Any) -> str:
    with pytest.raises(GraphError) as raised:
        trace_step(step, **changes)
    return str(raised.value)


def call_named(graph: CallGraph, name: str) -> Call:
    return next(call for call in graph.calls if call.name == name)


def needs(graph: CallGraph) -> dict[str, tuple[str, ...]]:
    return {call.name: graph.dependencies(call) for call in graph.calls}


def must_wait_for(graph: CallGraph, name: str) -> set[str]:
    """Everything that comes before a call, directly or not."""
    before = set(needs(graph)[name])
    return before.union(*(must_wait_for(graph, earlier) for earlier in before))


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


def test_rows_of_plain_data():
    rows = trace_step(actor_critic, iterations=2).to_rows()
    assert json.loads(json.dumps(rows)) == rows
    assert rows[4] == {
        "name": "actor.train",
        "role": "actor",
        "kind": "train",
        "row_wise": False,
        "num_rows": B,
        "needs": ["actor.generate", "make_batch"],
        "inputs": [f"make_batch[0]: float32[{B}]", f"make_batch[1]: int32[{B}, {T}]"],
        "settings": [f"{a_loss.__module__}:a_loss", "Settings(length=5)"],
        "outputs": ["float32[]"],
        "weights": "actor",
        "reads": 0,
        "writes": 1,
        "iteration": 0,
    }


# Which outputs of a compute function have rows


def follow(prompts, state):
    total = prompts.sum()
    return {
        "each": prompts[:, 0],
        "wider": jnp.concatenate([prompts, prompts], axis=1),
        "twice": jnp.tile(prompts, (2, 1)),
        "total": total,
        "pair": jnp.stack([total, total]),
        "state": state["coef"],
    }


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


# What a step function may not do


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x * x,
        lambda x: 2 / x,
        lambda x: 2 // x,
        lambda x: x**2,
        lambda x: -x,
        lambda x: x @ x,
        lambda x: x % 2,
        lambda x: 2 % x,
        lambda x: +x,
        lambda x: divmod(x, 2),
        lambda x: True | x,
        lambda x: 1 if x else 0,
        lambda x: x == 1,
        lambda x: x != 1,
        lambda x: x < 1,
        lambda x: x & True,
        lambda x: ~x,
        lambda x: abs(x),
        lambda x: x[0],
        lambda x: list(x),
        lambda x: len(x),
        lambda x: 1 in x,
        lambda x: float(x),
        lambda x: int(x),
        lambda x: round(x),
        lambda x: x.sum(),
        lambda x: x.T,
        lambda x: jnp.sum(x),
        lambda x: jnp.asarray(x),
        lambda x: np.asarray(x),
        lambda x: np.ones(B) * x,
        lambda x: jnp.ones(B) * x,
        lambda x: jnp.where(x, 1, 0),
        lambda x: range(3)[x],
    ],
)
def test_no_operations_on_outputs(operation):
    def step(roles, state, prompts, settings):
        operation(roles.critic.values(roles.actor.generate(prompts, settings)))

    assert error_of(step) == (
        "critic.values: its output is known only when the step runs, so a step function cannot calculate with it, "
        "branch on it or look inside it. Got an operation on critic.values[0]: float32[6]. Put the operation into a "
        "function of arrays and call it with compute(function, ...)."
    )


def test_what_is_known_of_an_output_may_be_asked():
    def step(roles, state, prompts, settings):
        assert (prompts.shape, prompts.ndim, prompts.dtype) == ((B, 3), 2, jnp.int32)
        assert not hasattr(prompts, "__dunder__")
        return None, state

    assert trace_step(step).calls == ()


def test_settings_are_hashable():
    def step(roles, state, prompts, settings):
        return roles.actor.generate(prompts, settings), state

    assert error_of(step, config=Unhashable()) == (
        "actor.generate: argument 2: a setting must be hashable, since it is part of the compiled program. Got "
        "Unhashable(length=5). Use a frozen dataclass or a tuple."
    )

    def step_with_a_tuple_of_it(roles, state, prompts, settings):
        return compute(follow, prompts, (1, {"x": settings})), state

    assert "follow: argument 2[1]['x']: a setting must be hashable" in error_of(
        step_with_a_tuple_of_it, config=Unhashable()
    )


@pytest.mark.parametrize(
    ("constant", "kind"), [(np.zeros(B, np.float32), "float32[6]"), (jnp.zeros((2, 3)), "float32[2, 3]")]
)
def test_arrays_are_no_constants(constant, kind):
    def step(roles, state, prompts, settings):
        return compute(follow, prompts, {"coef": constant}), state

    assert error_of(step) == (
        "follow: argument 2['coef']: must be an output of a call, part of the data or state, or a hashable setting. "
        f"Got an array {kind}. Put it into the state, or make it inside a compute function."
    )


def test_references_of_another_trace():
    other = trace_step(actor_critic)

    def step(roles, state, prompts, settings):
        return compute(follow, prompts, other.state), state

    assert error_of(step) == (
        "follow: argument 2['coef']: must come from this step. Got make_batch[2]: float32[] of another trace. Return "
        "it in the state to carry it over."
    )


class Doubler:
    def __call__(self, prompts):
        return prompts


def test_compute_needs_a_function_of_a_module():
    def local_function(prompts):
        return prompts

    for function in (local_function, lambda prompts: prompts, Doubler()):

        def step(roles, state, prompts, settings, function=function):
            return compute(function, prompts), state

        assert error_of(step) == (
            "step: compute needs a function defined at the top level of a module, so that the compiled program is "
            f"found again in the next step. Got {function!r}. Move it there and pass it by name."
        )


def data(prompts):
    return prompts


def state(prompts):
    return prompts


@pytest.mark.parametrize("function", [data, state])
def test_no_function_is_named_like_an_input(function):
    def step(roles, state, prompts, settings):
        return compute(function, prompts), state

    assert error_of(step) == (
        f"step: a compute function must not be named like an input of the graph. Got '{function.__name__}'. Give it "
        "another name."
    )


def test_unknown_role():
    assert error_of(lambda roles, *_: roles.acter) == (
        "<lambda>: the run has no role 'acter'. It has: actor, critic, reward. Did you mean 'actor'? Add it under "
        "`roles` in the config."
    )


def test_unknown_method():
    def step(roles, state, prompts, settings):
        return roles.critic.value(prompts), state

    assert error_of(step) == "step: role 'critic' has no method 'value'. It has: train, values. Did you mean 'values'?"


def test_training_without_an_optimizer():
    def step(roles, state, prompts, settings):
        return roles.reward.train(a_loss, prompts, settings), state

    assert error_of(step) == (
        "step: role 'reward' has no method 'train'. It has: scores. It has no optimizer: give it one in the config to "
        "train it."
    )


def test_a_step_returns_results_and_state():
    def step(roles, state, prompts, settings):
        return {"state": state}

    assert error_of(step) == "step: must return (results, state). Got dict."


RULE = "step: the state that it returns must have the structure, shapes and dtypes of the one that it got"


def other_states(state):
    coef = state["coef"]
    return {"structure": (coef,), "shape": {"coef": coef[None]}, "dtype": {"coef": coef.astype(jnp.bfloat16)}}


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("structure", "Got PyTreeDef((*,)) for PyTreeDef({'coef': *})."),
        ("shape", "Got float32[1] for float32[] at state['coef']."),
        ("dtype", "Got bfloat16[] for float32[] at state['coef']."),
    ],
)
def test_a_state_of_another_form(kind, got):
    def step(roles, state, prompts, settings):
        return None, compute(other_states, state)[kind]

    assert error_of(step) == f"{RULE}. {got}"


def test_a_state_that_no_call_made():
    def step(roles, state, prompts, settings):
        return None, {"coef": 0.5}

    assert error_of(step) == f"{RULE}, made by compute. Got 0.5 at state['coef']."


def sums_and_rows(prompts):
    return {"coef": prompts["tokens"].astype(jnp.float32)[:, 0]}


def test_a_state_has_no_rows():
    def step(roles, state, prompts, settings):
        return None, compute(sums_and_rows, prompts)

    with pytest.raises(GraphError, match=r"and no rows. Got an array of rows at state\['coef'\]"):
        trace(step, {}, {"coef": jnp.zeros(4)}, {"tokens": jax.ShapeDtypeStruct((4, 3), jnp.int32)}, None)


# Outside a trace


def test_compute_outside_a_trace_calls_the_function():
    given = compute(follow, jnp.ones((2, 3), jnp.int32), {"coef": jnp.ones(())})
    np.testing.assert_array_equal(given["each"], [1, 1])


def test_an_error_ends_the_trace():
    error_of(lambda roles, *_: roles.acter)
    assert compute(len, [1, 2]) == 2


def test_split_args_round_trip():
    args = ({"x": jnp.arange(3), "how": "mean"}, [np.ones(2), None, Settings()], shape(4))
    arrays, _, rebuild = split_args(args)
    assert [x.shape for x in arrays] == [(3,), (2,), (4,)]
    again = rebuild(["a", "b", "c"])
    assert again == ({"x": "a", "how": "mean"}, ["b", None, Settings()], "c")
    assert rebuild(arrays)[1][0] is arrays[1]


def test_the_key_holds_settings_and_structure_and_no_arrays():
    def key_of(*args: Any) -> Any:
        key = split_args(args)[1]
        hash(key)
        return key

    x, y = jnp.zeros(3), jnp.ones(5)
    assert key_of({"x": x}, Settings(5)) == key_of({"x": y}, Settings(5)) == key_of({"x": shape(7)}, Settings())
    graph = trace_step(actor_critic)
    refs = call_named(graph, "actor.generate").args
    assert key_of(*refs) == key_of(x, Settings())
    different = [
        key_of({"x": x}, Settings(5)),
        key_of({"x": x}, Settings(6)),
        key_of({"y": x}, Settings(5)),
        key_of({"x": 0}, Settings(5)),
        key_of({"x": 0.0}, Settings(5)),
        key_of({"x": False}, Settings(5)),
    ]
    assert len(set(different)) == len(different)
