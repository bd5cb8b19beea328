"""The call graph of a step: which model function calls it makes, and what flows between them.

Data, which `tracing` makes of a step function, a plan speaks of and an executor runs. Nothing here knows a model,
a mesh or a device.

    graph.calls[0].name                    # 'actor.generate'
    graph.dependencies(graph.calls[-1])    # ('critic.values', 'ppo_batch')

Order. The calls stand in the order in which the step makes them, but what waits for work on the host comes after what
does not.

Weights. A train call gives its role a new version of its weights, and every later call of the role reads that version.
In a graph of several iterations those versions, with the state, are all that ties one iteration to the next.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from jaxrlhf.experience import Term

Kind = Literal["generate", "infer", "train", "compute", "host"]
"""`generate`, `infer` and `train` run a model on devices; `compute` is a pure function of arrays over the whole batch
on devices; `host` is plain Python beside the devices."""


class GraphError(ValueError):
    """A step function that cannot be traced."""


class Ref:
    """One array that a call will give: leaf `leaf` of the output of the call named `call`.

    `recorder` is whoever wrote that call down: references of two traces do not mix.
    """

    __slots__ = ("call", "dtype", "has_rows", "leaf", "recorder", "shape")

    def __init__(self, call: str, leaf: int, aval: jax.ShapeDtypeStruct, *, has_rows: bool, recorder: object) -> None:
        self.call, self.leaf, self.shape, self.dtype = call, leaf, tuple(aval.shape), aval.dtype
        self.has_rows, self.recorder = has_rows, recorder

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"{self.call}[{self.leaf}]: {self.dtype}{list(self.shape)}"

    def _is_not_an_array(self, *_: Any, **__: Any) -> NoReturn:
        raise GraphError(
            f"{self.call}: its output is known only when the step runs, so a step function cannot calculate with it, "
            f"branch on it or look inside it. Got an operation on {self!r}. Put the operation into a function of "
            "arrays and call it with compute(function, ...)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._is_not_an_array()

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = (
        _is_not_an_array
    )
    __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _is_not_an_array
    __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _is_not_an_array
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _is_not_an_array  # pyright: ignore
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _is_not_an_array
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __contains__ = _is_not_an_array
    __array__ = _is_not_an_array
    __jax_array__ = property(_is_not_an_array)  # jnp functions look for it and never call it


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One model function call."""

    name: str
    """`role.method`, or the function's name for `compute`; `#2` for a second one in a step, `1:` in iteration 1."""
    role: str | None
    method: str
    """The method's name, or '' for `compute`."""
    kind: Kind
    row_wise: bool
    function: Callable[..., Any] | None
    """The function of a `compute` call."""
    args: tuple[Any, ...]
    """Pytrees. `Ref` leaves are edges of the graph; every other leaf is a hashable setting."""
    outputs: Any
    """A pytree of `Ref`."""
    weights: str | None
    reads: int
    """Version of the weights that it runs on, counted from the start of the graph."""
    writes: int | None
    """Version that it makes, for a train call."""
    iteration: int
    sequence_shapes: tuple[tuple[int, int], ...]
    """(rows, columns) of the sequences that its model runs on, or draws with their prompts; of a `host` call, of those
    that its function reads. Empty for `compute`."""

    @property
    def plan_name(self) -> str:
        """The name without the iteration: what a plan speaks of."""
        return self.name.split(":", 1)[-1]

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(leaf for leaf in jax.tree.leaves(self.args) if isinstance(leaf, Ref))

    @property
    def output_refs(self) -> tuple[Ref, ...]:
        return tuple(jax.tree.leaves(self.outputs))

    @property
    def num_rows(self) -> int:
        """Rows that it works on: the most that any of its inputs has; 0 without rows."""
        return max((ref.shape[0] for ref in self.refs if ref.has_rows), default=0)

    @property
    def num_tokens(self) -> int:
        """Positions of its sequences, padding among them."""
        return sum(rows * columns for rows, columns in self.sequence_shapes)

    @property
    def longest_sequence(self) -> int:
        """Columns of the longest of its sequences, prompt and response; 0 without any."""
        return max((columns for _, columns in self.sequence_shapes), default=0)

    @property
    def num_drawn(self) -> int:
        """Sequences that a call of `generate` draws for each prompt; 1 of any other."""
        rows = max((ref.shape[0] for ref in self.output_refs if ref.has_rows), default=0)
        return rows // self.num_rows if self.kind == "generate" and self.num_rows else 1

    @property
    def terms(self) -> tuple[Term, ...]:
        """The losses of a call of `train` or `loss`; none of any other."""
        first = self.args[0] if self.args else ()
        return first if isinstance(first, tuple) and all(isinstance(x, Term) for x in first) else ()

    @property
    def update(self) -> Any:
        """The settings of the update of a call of `train` or `loss`."""
        return self.args[1]

    @property
    def sequences(self) -> tuple[Any, ...]:
        """The sequences that an inference or train call runs its model on."""
        if self.terms:
            batches = [term.batch.get("sequences") for term in self.terms]
            return tuple(x for batch in batches for x in named_sequences(batch).values())
        return self.args[:1] if self.kind == "infer" else ()


@dataclasses.dataclass(frozen=True, eq=False)
class CallGraph:
    """The calls of a step in the order in which it makes them."""

    calls: tuple[Call, ...]
    inputs: Mapping[str, Any]
    """Name -> pytree of `Ref`: 'state', 'data', and 'data1', ... for later iterations."""
    results: tuple[Any, ...]
    """The results that the step returned beside the state, for each iteration."""
    state: Any
    """The state after the last iteration."""

    def __post_init__(self) -> None:
        assert len({call.name for call in self.calls}) == len(self.calls)

    def dependencies(self, call: Call) -> tuple[str, ...]:
        """Names of the calls that must come before this one: they make its inputs, or its version of the weights."""
        names = {ref.call for ref in call.refs} - set(self.inputs)
        names |= {
            c.name for c in self.calls if c.writes is not None and (c.weights, c.writes) == (call.weights, call.reads)
        }
        if call.writes is not None:  # the weights may not change while earlier calls still read them
            earlier = self.calls[: self.calls.index(call)]
            names |= {c.name for c in earlier if c.weights == call.weights and c.reads == call.reads}
        return tuple(c.name for c in self.calls if c.name in names)

    def to_rows(self) -> list[dict[str, Any]]:
        """The graph as plain data, a mapping for each call: to print, or to plan without code."""
        return [
            {
                "name": call.name,
                "role": call.role,
                "kind": call.kind,
                "row_wise": call.row_wise,
                "num_rows": call.num_rows,
                "needs": list(self.dependencies(call)),
                "inputs": [str(ref) for ref in call.refs],
                "settings": [
                    *(_described(term.loss) for term in call.terms),
                    *(_described(x) for x in jax.tree.leaves(call.args) if not isinstance(x, Ref)),
                ],
                "outputs": [f"{ref.dtype}{list(ref.shape)}" for ref in call.output_refs],
                "weights": call.weights,
                "reads": call.reads,
                "writes": call.writes,
                "iteration": call.iteration,
            }
            for call in self.calls
        ]


def named_sequences(sequences: Any) -> Mapping[str, Any]:
    """The sequences of a batch by name: '' where they are not a dict."""
    return sequences if isinstance(sequences, Mapping) else {"": sequences}


def split_args(args: Any) -> tuple[list[Any], Hashable, Callable[[list[Any]], Any]]:
    """Part a call's arguments into arrays and settings.

    Returns:
        The array leaves (references, shapes or arrays), a hashable key of all the rest, and a function that puts other
        array leaves back into the same places.
    """
    leaves, structure = jax.tree.flatten(args)
    is_array = tuple(isinstance(x, Ref | jax.ShapeDtypeStruct | jax.Array | np.ndarray) for x in leaves)
    settings = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
    kinds = tuple(type(x) for x in settings)  # 1, 1.0 and True are equal, and make different programs

    def rebuild(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        return structure.unflatten([next(remaining) if a else s for a, s in zip(is_array, settings, strict=True)])

    return [x for x, array in zip(leaves, is_array, strict=True) if array], ((structure, kinds), settings), rebuild


def _described(setting: Any) -> str:
    """A setting as text that is the same in every run."""
    if callable(setting) and hasattr(setting, "__qualname__"):
        return f"{setting.__module__}:{setting.__qualname__}"
    return repr(setting)
