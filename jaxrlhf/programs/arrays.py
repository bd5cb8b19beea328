"""Types of the inputs and outputs of programs: weights, optimizer states, the arrays of a call, sums of losses."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import Float, Int, PyTree, UInt32

Arrays = list[jax.Array]
"""The array leaves of a call's arguments or of its outputs, in the order of `jax.tree.leaves`."""
Outputs = PyTree[jax.Array]
"""The outputs of a program, as a tree."""
StageInput = Int[jax.Array, "B T"] | Float[jax.Array, "B T D"]
"""Tokens for the first stage of a pipeline, the output of the stage before for the others."""
MicroBatch = dict[str, Any]
"""`tokens` and `mask`, which go through the stages of a pipeline, and `own`: further arrays that the last one needs."""
Noise = UInt32[jax.Array, "3"]
"""The seed of all random numbers of a call: the seed of the run, the step, and a number made of the call's name."""
Metrics = dict[str, Any]
"""Name -> a scalar, a `Max` of one, or the metrics of a term with a name."""
Sums = tuple[jax.Array, Metrics]
"""The weight of a term's loss, and its metrics, the loss among them, as sums over rows."""
Abstract = PyTree[jax.ShapeDtypeStruct]
"""The shapes and dtypes of a tree of arrays."""
Rebuild = Callable[[list[Any]], tuple[Any, ...]]
"""From the array leaves of a call's arguments to the arguments, as `call_graph.split_args` makes it."""
Program = Callable[..., Any]
"""A jitted function, or several that one call dispatches, of pytrees of arrays."""


def with_shardings(abstract: Abstract, shardings: PyTree[Sharding]) -> Abstract:
    """Shapes and dtypes with the shardings of the arrays, as programs are lowered for and checkpoints are read into."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )
