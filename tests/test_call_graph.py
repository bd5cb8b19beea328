"""The call graph as data: references that stand for arrays, rows of plain data, and the keys of programs."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import split_args
from tests.made_up_step import B, Settings, T, a_loss, actor_critic, call_named, error_of, shape, trace_step


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
        "settings": [f"{a_loss.__module__}:a_loss", "1.0", "Settings(length=5)"],
        "outputs": ["float32[]"],
        "weights": "actor",
        "reads": 0,
        "writes": 1,
        "iteration": 0,
    }


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
