"""What a step function may not do, and what it is told then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import GraphError
from jaxrlhf.tracing import compute, trace
from tests.made_up_step import B, Unhashable, a_loss, actor_critic, error_of, follow, trace_step


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

    assert error_of(step) == ("step: role 'reward' has no method 'train'. It has: scores. Give it weights.")


def test_a_step_returns_results_and_state():
    def step(roles, state, prompts, settings):
        return {"state": state}

    assert error_of(step) == ("step: must return (results, state). Got dict. End it with `return results, state`.")


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
