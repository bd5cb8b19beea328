"""The call graph of a step: its model function calls, and the data flow between them.

`tracing` makes it from a step function, a plan places its calls, and an executor runs them. It knows no model, mesh or
device.

    graph.calls[0].name                    # 'actor.generate'
    graph.dependencies(graph.calls[-1])    # ('critic.values', 'ppo_batch')

Order. The calls are in the order of the step, but calls that depend on work on the host come after those that do not.

Weights. A train call makes a new version of its role's weights, which every later call of the role reads; a stale
generation reads the version of some iterations before. In a graph of several iterations, these versions and the state
are the only dependencies between iterations.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from jaxrlhf.experience import Term

CallKind = Literal["generate", "infer", "train", "compute", "host"]
"""`generate`, `infer` and `train` run a model on devices; `compute` is a pure function of arrays over the whole batch
on devices; `host` is plain Python beside the devices."""


class GraphError(ValueError):
    """A step function that cannot be traced."""


class Ref:
    """A future array: leaf `leaf` of the output of the call named `call`.

    `recorder` is the one of its trace: references of two traces must not be mixed.
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
    __jax_array__ = property(_is_not_an_array)  # jnp functions look for it without calling it


@dataclasses.dataclass(frozen=True)
class Part:
    """What a call is a part of, in a graph in parts (`planner.plans.parts`)."""

    of: str
    """The name of the whole call in plans."""
    number: int
    count: int
    after: tuple[str, ...] = ()
    """Calls that go before it, beside those that make its inputs: a generation goes on from their state."""
    share: int = 0
    """Of a generation: the number of its placement; that of the tail follows those of the shares."""
    first_sequence: int = 0
    """Of a generation: the place of the share's first sequence among all."""
    handed_on: tuple[int, int] = (0, 0)
    """Of a generation: sequences of each row shard that have been handed on before and after it."""
    sequences: int = 0
    """Of a generation: the sequences of its share, or of the tail."""
    stay: int = 0
    """Of the tail: sequences of each row shard of the first share that move to it."""
    migrate: Literal["", "cache", "prefill"] = ""
    """Of the tail: how sequences come to it."""
    together: int = 1
    """Of a generation: neighboring sequences that are handed on together."""

    @property
    def begins(self) -> bool:
        """True for the first part of a share of a generation."""
        return not self.migrate and self.handed_on[0] == 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One model function call."""

    name: str
    """`role.method`, or the function's name for `compute`; with `#2` for the second in a step, `1:` in iteration 1."""
    role: str | None = None
    method: str = ""
    """The method's name, or '' for `compute`."""
    kind: CallKind
    row_wise: bool = False
    function: Callable[..., Any] | None = None
    """The function of a `compute` call."""
    groups_of: int | str = ""
    """Of a `compute` call: as `tracing.compute` takes it."""
    args: tuple[Any, ...]
    """Pytrees. `Ref` leaves are edges of the graph; every other leaf is a hashable setting."""
    outputs: Any
    """A pytree of `Ref`."""
    weights: str | None = None
    reads: int = 0
    """The version of the weights that it reads, counted from the start of the graph. A negative one was made before."""
    stale: int = 0
    """The iterations by which that version is older than the current one."""
    writes: int | None = None
    """The version that a train call makes."""
    iteration: int
    sequence_shapes: tuple[tuple[int, int], ...] = ()
    """(rows, columns) of the sequences that its model runs on, or draws with their prompts, or that the function of a
    `host` call reads. Empty for `compute`."""
    part: Part | None = None
    """None if it is whole."""

    @property
    def plan_name(self) -> str:
        """The name in plans, without the iteration."""
        return self.name.split(":", 1)[-1]

    @property
    def whole_name(self) -> str:
        """The name in plans of the call that it is, or is a part of."""
        return self.plan_name if self.part is None else self.part.of

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(leaf for leaf in jax.tree.leaves(self.args) if isinstance(leaf, Ref))

    @property
    def output_refs(self) -> tuple[Ref, ...]:
        return tuple(jax.tree.leaves(self.outputs))

    @property
    def num_rows(self) -> int:
        """The most rows of its inputs; 0 without rows."""
        return max((ref.shape[0] for ref in self.refs if ref.has_rows), default=0)

    @property
    def num_tokens(self) -> int:
        """The number of positions of its sequences, including padding."""
        return sum(rows * columns for rows, columns in self.sequence_shapes)

    @property
    def longest_sequence(self) -> int:
        """The columns of its longest sequences, prompt and response; 0 without sequences."""
        return max((columns for _, columns in self.sequence_shapes), default=0)

    @property
    def num_drawn(self) -> int:
        """The number of sequences that a call of `generate` draws for each prompt; 1 for other calls."""
        rows = max((ref.shape[0] for ref in self.output_refs if ref.has_rows), default=0)
        return rows // self.num_rows if self.kind == "generate" and self.num_rows else 1

    @property
    def terms(self) -> tuple[Term, ...]:
        """The losses of a call of `train` or `loss`; empty for other calls."""
        first = self.args[0] if self.args else ()
        return first if isinstance(first, tuple) and all(isinstance(x, Term) for x in first) else ()

    @property
    def update(self) -> Any:
        """The settings of the update of a call of `train` or `loss`."""
        return self.args[1]

    @property
    def sequences(self) -> tuple[Any, ...]:
        """The sequences on which an inference or train call runs its model."""
        if self.terms:
            batches = [term.batch.get("sequences") for term in self.terms]
            return tuple(x for batch in batches for x in named_sequences(batch).values())
        return self.args[:1] if self.kind == "infer" else ()


@dataclasses.dataclass(frozen=True, eq=False)
class CallGraph:
    """The calls of a step in order."""

    calls: tuple[Call, ...]
    inputs: Mapping[str, Any]
    """Name -> pytree of `Ref`: 'state', 'data', and 'data1', ... for later iterations."""
    results: tuple[Any, ...]
    """The results of the step beside the state, for each iteration."""
    state: Any
    """The state after the last iteration."""

    def __post_init__(self) -> None:
        assert len({call.name for call in self.calls}) == len(self.calls)

    def dependencies(self, call: Call) -> tuple[str, ...]:
        """Names of the calls that must run before this one: they make its inputs or its version of the weights, or read
        the weights that it changes."""
        names = {ref.call for ref in call.refs} - set(self.inputs) | set(call.part.after if call.part else ())
        names |= {
            c.name for c in self.calls if c.writes is not None and (c.weights, c.writes) == (call.weights, call.reads)
        }
        if call.writes is not None:  # the weights must not change while earlier calls still read them
            earlier = self.calls[: self.calls.index(call)]
            names |= {c.name for c in earlier if c.weights == call.weights and c.reads == call.reads}
        return tuple(c.name for c in self.calls if c.name in names)

    def to_rows(self) -> list[dict[str, Any]]:
        """The graph as plain data, with a mapping for each call."""
        fields = ("name", "role", "kind", "row_wise", "num_rows", "weights", "reads", "writes", "iteration")
        return [
            {
                **{field: getattr(call, field) for field in fields},
                "needs": list(self.dependencies(call)),
                "inputs": [str(ref) for ref in call.refs],
                "settings": [
                    *(_described(term.loss) for term in call.terms),
                    *(_described(x) for x in jax.tree.leaves(call.args) if not isinstance(x, Ref)),
                ],
                "outputs": [f"{ref.dtype}{list(ref.shape)}" for ref in call.output_refs],
            }
            for call in self.calls
        ]


def named_sequences(sequences: Any) -> Mapping[str, Any]:
    """The sequences of a batch by name, which is '' if they are not a dict."""
    return sequences if isinstance(sequences, Mapping) else {"": sequences}


def split_args(args: Any) -> tuple[list[Any], Hashable, Callable[[list[Any]], Any]]:
    """Splits the arguments of a call into arrays and settings.

    Returns:
        The array leaves (references, shapes or arrays), a hashable key of everything else, and a function that puts
        other array leaves into the same places.
    """
    leaves, structure = jax.tree.flatten(args)
    is_array = tuple(isinstance(x, Ref | jax.ShapeDtypeStruct | jax.Array | np.ndarray) for x in leaves)
    settings = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
    kinds = tuple(type(x) for x in settings)  # 1, 1.0 and True are equal, but make different programs

    def rebuild(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        return structure.unflatten([next(remaining) if a else s for a, s in zip(is_array, settings, strict=True)])

    return [x for x, array in zip(leaves, is_array, strict=True) if array], ((structure, kinds), settings), rebuild


def _described(setting: Any) -> str:
    """A setting as text, which is the same in every run."""
    if callable(setting) and hasattr(setting, "__qualname__"):
        return f"{setting.__module__}:{setting.__qualname__}"
    return repr(setting)
