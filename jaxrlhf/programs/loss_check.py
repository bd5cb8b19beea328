"""A check that a loss is what a train call can add up: sums over rows, never means.

A mean has the same shape as a sum, so a loss is tried: on two rows of made-up numbers, on two others, and on all four.
That takes some tenths of a second on the CPU, once for each loss and shape.
"""

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.call_graph import GraphError, split_args
from jaxrlhf.experience import Max
from jaxrlhf.importing import failure
from jaxrlhf.sharding import mesh
from jaxrlhf.tracing import abstract_call

ROWS = 2
"""In each of the two parts that a loss is tried on."""
RTOL = 1e-2
"""Sums of float32 in another order differ by far less, a mean from a sum by half."""

_added_up: set[Hashable] = set()
"""Losses that were tried, with the shapes of what they got."""


def check_adds_up(where: str, loss: Callable[..., Any], outputs: Any, batch: Any, update: Any) -> dict[str, Any]:
    """Checks that a loss returns `(sum, weight, metrics)`, each a sum over the rows that it gets.

    Args:
        where: The call, for error messages.
        outputs, batch: What the loss will get, with `jax.ShapeDtypeStruct` for arrays.

    Returns:
        The shapes of its metrics.

    Raises:
        GraphError: It returns something else, a mean, say; it fails; or it does not take these arguments.
    """
    _check_arguments(where, loss)
    arguments = (outputs, batch, update)
    try:
        given = abstract_call(loss, arguments)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(_failed(where, loss, outputs, batch, error)) from error
    _check_form(where, given)
    key = _key(loss, arguments)
    arrays, _, rebuild = split_args(arguments)
    if key not in _added_up and arrays:
        _check_sums(where, loss, arguments, arrays, rebuild)
        if key is not None:
            _added_up.add(key)
    return given[2]


def _check_arguments(where: str, loss: Callable[..., Any]) -> None:
    try:
        inspect.signature(loss).bind("outputs", "batch", "update")
    except TypeError as error:
        parameters = ", ".join(inspect.signature(loss).parameters)
        raise GraphError(
            f"{where}: a loss takes three arguments, (outputs, batch, update). Got ({parameters}): {error}."
        ) from error
    except ValueError:  # no signature to look at
        return


def _check_form(where: str, given: Any) -> None:
    """A sum, a weight and metrics, arrays without dims."""
    rule = f"{where}: a loss returns (sum, weight, metrics), so that micro-batches add up. Got"
    remedy = "Return the loss summed over rows and tokens, how many of them it counted, and a dict of further sums."
    if not isinstance(given, tuple):
        raise GraphError(f"{rule} {_shown(given)}. {remedy}")
    if len(given) != 3 or not isinstance(given[2], dict):
        raise GraphError(f"{rule} ({', '.join(map(_shown, given))}). {remedy}")
    for name, x in _parts(given).items():
        value = x.value if isinstance(x, Max) else x
        if np.shape(value) != ():
            raise GraphError(
                f"{where}: a loss returns sums over the batch, arrays without dims. Got {name} of shape "
                f"{list(np.shape(value))}. Sum over rows and tokens."
            )


def _check_sums(
    where: str, loss: Callable[..., Any], arguments: Any, arrays: list[Any], rebuild: Callable[[list[Any]], Any]
) -> None:
    """Checks that the losses of two parts add up to the loss of both together."""
    num_rows = jax.tree.leaves(arguments[0])[0].shape[0]  # the model says something about every row
    has_rows = [bool(x.shape) and x.shape[0] == num_rows for x in arrays]
    paths = [jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(arguments) if _is_array(x)]
    rng = np.random.default_rng(0)
    both = [_made_up(rng, path, x, rows) for path, x, rows in zip(paths, arrays, has_rows, strict=True)]

    def of_parts(arrays: list[jax.Array]) -> Any:
        parts = (slice(0, ROWS), slice(ROWS, None), slice(None))
        cut = [[x[rows] if rowed else x for x, rowed in zip(arrays, has_rows, strict=True)] for rows in parts]
        return [_parts(loss(*rebuild(some))) for some in cut]

    try:
        with jax.default_device(mesh.processor()):
            first, second, together = jax.device_get(jax.jit(of_parts)(both))
    except Exception as error:
        raise GraphError(
            f"{where}: a loss must work for any number of rows, since they are cut into micro-batches. It fails on "
            f"{ROWS} and on {2 * ROWS}: {failure(error, loss)}. Take sizes from the arrays that it gets."
        ) from error
    for name, all_rows in together.items():
        if isinstance(all_rows, Max):
            continue
        one, other = first[name], second[name]
        if not np.isfinite([one, other, all_rows]).all():
            continue  # made-up numbers can be out of a function's domain
        if abs(one + other - all_rows) <= RTOL * (abs(one) + abs(other)):
            continue
        remedies = {
            "the sum": "Return jnp.sum(...) where there is a mean, and what it was divided by as the weight: the "
            "train call divides, once. What is taken over the whole batch, as whitening, belongs into a compute "
            "function before.",
            "the weight": "Return how many tokens or rows the sum is over: mask.sum(), or float(rows).",
        }
        remedy = remedies.get(name, "Return its sum, which is divided by the weight, or Max(...) of it.")
        raise GraphError(
            f"{where}: a loss returns sums over its rows, never means, so that micro-batches and devices add up. Got "
            f"{name} {all_rows:.4g} for {2 * ROWS} rows, and {one:.4g} and {other:.4g} for the two halves of them. "
            f"{remedy}"
        )


def _parts(given: Any) -> dict[str, Any]:
    """The parts of a loss's result, by their names in error messages."""
    total, weight, metrics = given
    return {"the sum": total, "the weight": weight, **{f"the metric {name!r}": x for name, x in metrics.items()}}


def _made_up(rng: np.random.Generator, path: str, x: jax.ShapeDtypeStruct, has_rows: bool) -> np.ndarray:
    """Plausible values: log-probabilities are negative, masks mostly true."""
    shape = (2 * ROWS, *x.shape[1:]) if has_rows else x.shape
    if x.dtype == jnp.bool:
        real = rng.random(shape) < 0.7
        real[..., :1] = True  # no row is empty
        return real
    if jnp.issubdtype(x.dtype, jnp.integer):
        return rng.integers(1, 3, shape).astype(x.dtype)
    positive = rng.uniform(0.2, 1.2, shape)
    return (-positive if "logprob" in path or "reference" in path else positive).astype(x.dtype)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _key(loss: Any, arguments: Any) -> Hashable:
    """A key that is equal if a loss gets arrays of the same shapes, except for the number of rows. None if unknown."""
    leaves, structure = jax.tree.flatten(arguments)
    key = (loss, structure, *((x.shape[1:], len(x.shape), x.dtype) if _is_array(x) else (type(x), x) for x in leaves))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _failed(where: str, loss: Any, outputs: Any, batch: Any, error: Exception) -> str:
    """An error message of a loss that raised, with its arguments."""
    if isinstance(error, KeyError) and isinstance(batch, dict) and error.args and error.args[0] not in batch:
        key = error.args[0]
        return (
            f"{where}: its loss asks the batch for {key!r}, which is not there. The batch has: {', '.join(batch)}."
            f"{did_you_mean(str(key), batch)} Return it from the compute function that makes the batch."
        )
    return f"{where}: its loss fails: {failure(error, loss)}. Its outputs are {_shown(outputs)}."


def _shown(value: Any) -> str:
    """An argument or a result of a loss in an error message, by its shapes."""
    if _is_array(value):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(x)}" for key, x in value.items()) + "}"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields:
        return f"{type(value).__name__}({', '.join(f'{name}={_shown(getattr(value, name))}' for name in fields)})"
    return brief(value)
