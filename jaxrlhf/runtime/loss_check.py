"""Whether a loss is what a train call can add up: sums over rows, never means."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrlhf.call_graph import GraphError
from jaxrlhf.tracing import abstract_call


def check_adds_up(where: str, loss: Callable[..., Any], outputs: Any, batch: Any, update: Any) -> None:
    """Asks that a loss returns `(sum, weight, metrics)`, each a sum over the rows that it gets.

    Args:
        where: The call, for error messages.
        outputs, batch: What the loss will get, with `jax.ShapeDtypeStruct` for arrays.

    Raises:
        GraphError: It returns something else.
    """
    given = abstract_call(loss, (outputs, batch, update))
    if not (isinstance(given, tuple) and len(given) == 3 and isinstance(given[2], dict)):
        raise GraphError(
            f"{where}: a loss returns (sum, weight, metrics), with a dict of metrics, so that micro-batches add up. "
            f"Got {given!r}."
        )
    wrong = [x for x in jax.tree.leaves(given) if x.shape != ()]
    if wrong:
        raise GraphError(
            f"{where}: a loss returns sums over the batch, arrays without dims. Got shapes {[x.shape for x in wrong]}."
        )
