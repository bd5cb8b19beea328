"""The call graph of a step: which model function calls it makes, and what flows between them.

A step function is ordinary Python over role handles. `trace` runs it once on references instead of arrays and writes
down every call that it makes: a call of a handle (`roles.actor.generate(...)`) or of `compute`. Nothing here knows a
model, a mesh or a device; a role brings its methods, each with a function that gives the shapes of its outputs.

    graph = trace(ppo_step, roles, state, prompts, config)
    graph.calls[0].name                    # 'actor.generate'
    graph.dependencies(graph.calls[-1])    # ('critic.values', 'ppo_batch')

Rows. Data comes in rows, one a sequence, always along the first axis, and state does not. Which outputs have rows is
known, never guessed from a size: a role's method says so, and a `compute` function is evaluated abstractly at two
numbers of rows, so that an axis that follows the rows is seen to follow them.

Order. The calls stand in the order in which the step makes them, but what waits for work on the host comes after what
does not. A call of `infer` or `host` kind that was made before, on the same inputs and weights, is not made again.

Weights. A train call gives its role a new version of its weights, and every later call of the role reads that version.
In a graph of several iterations those versions, with the state, are all that ties one iteration to the next.
"""

import collections
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from jaxrlhf.suggest import did_you_mean

Kind = Literal["generate", "infer", "train", "compute", "host"]
"""`generate`, `infer` and `train` run a model on devices; `compute` is a pure function of arrays over the whole batch
on devices; `host` is plain Python beside the devices."""


class GraphError(ValueError):
    """A step function that cannot be traced."""


class Ref:
    """One array that a call will give: leaf `leaf` of the output of the call named `call`."""

    __slots__ = ("call", "dtype", "has_rows", "leaf", "recorder", "shape")

    def __init__(
        self, call: str, leaf: int, aval: jax.ShapeDtypeStruct, *, has_rows: bool, recorder: "Recorder"
    ) -> None:
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


@dataclasses.dataclass(frozen=True)
class Method:
    """What a role can be asked to do."""

    kind: Kind
    abstract: Callable[..., Any]
    """Arguments, with `jax.ShapeDtypeStruct` for arrays -> a pytree of `jax.ShapeDtypeStruct`: the shapes it gives."""
    row_wise: bool = True
    """Every output has rows, and what it says of a sequence depends on that sequence alone."""


@dataclasses.dataclass(frozen=True)
class RoleMethods:
    """A role as a step function sees it."""

    methods: Mapping[str, Method]
    weights: str | None = None
    """Whose weights its calls read and train. None: the role has no weights."""
    composed: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    """Methods that are made of other calls: `(roles, *args) -> outputs`, traced as a step function is."""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Methods that it could have -> what to do to get them, for error messages."""


@dataclasses.dataclass(frozen=True, eq=False)
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


@dataclasses.dataclass(frozen=True, eq=False)
class CallGraph:
    """The calls of a step in the order in which it makes them."""

    calls: tuple[Call, ...]
    inputs: Mapping[str, Any]
    """Name -> pytree of `Ref`: 'state', 'data', and 'data1', ... for later iterations."""
    results: tuple[Any, ...]
    """What the step returned beside the state, for each iteration."""
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
                "settings": [_described(x) for x in jax.tree.leaves(call.args) if not isinstance(x, Ref)],
                "outputs": [f"{ref.dtype}{list(ref.shape)}" for ref in call.output_refs],
                "weights": call.weights,
                "reads": call.reads,
                "writes": call.writes,
                "iteration": call.iteration,
            }
            for call in self.calls
        ]


class Recorder:
    """Writes down the calls of the step that is being traced."""

    def __init__(self, step_name: str) -> None:
        self.step_name = step_name
        self.calls: list[Call] = []
        self.iteration = 0
        self._versions: collections.Counter[str] = collections.Counter()
        self._ordinals: collections.Counter[tuple[int, str]] = collections.Counter()
        self._outputs: dict[Hashable, Any] = {}

    def input(self, name: str, avals: Any, *, has_rows: bool) -> Any:
        leaves, structure = jax.tree.flatten(avals)
        return structure.unflatten([Ref(name, i, x, has_rows=has_rows, recorder=self) for i, x in enumerate(leaves)])

    def call_role(self, role: str, name: str, method: Method, weights: str | None, args: tuple[Any, ...]) -> Any:
        self._check_args(f"{role}.{name}", args)
        reads = self._versions[weights] if weights else 0
        asked = (self.iteration, role, name, reads, _identity(args))
        if method.kind in ("infer", "host") and asked in self._outputs:
            return self._outputs[asked]
        full_name = self._next_name(f"{role}.{name}")
        avals = method.abstract(*_avals(args))
        has_rows = [method.row_wise] * len(jax.tree.leaves(avals))
        writes = None
        if method.kind == "train":
            assert weights is not None
            self._versions[weights] = writes = reads + 1
        self._outputs[asked] = self._append(
            Call(
                full_name,
                role,
                name,
                method.kind,
                method.row_wise,
                None,
                args,
                None,
                weights,
                reads,
                writes,
                self.iteration,
            ),
            avals,
            has_rows,
        )
        return self._outputs[asked]

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], call_name: str | None) -> Any:
        name = getattr(function, "__name__", "")
        if not name or name == "<lambda>" or "<locals>" in getattr(function, "__qualname__", ""):
            raise GraphError(
                f"{self.step_name}: compute needs a function defined at the top level of a module, so that the "
                f"compiled program is found again in the next step. Got {function!r}. Move it there and pass it by "
                "name."
            )
        if re.fullmatch(r"state|data\d*", name):
            raise GraphError(
                f"{self.step_name}: a compute function must not be named like an input of the graph. Got '{name}'. "
                "Give it another name."
            )
        full_name = self._next_name(call_name or name)
        self._check_args(full_name, args)
        avals = abstract_call(function, _avals(args))
        has_rows = _follow_rows(full_name, function, args, avals)
        return self._append(
            Call(full_name, None, "", "compute", False, function, args, None, None, 0, None, self.iteration),
            avals,
            has_rows,
        )

    def _next_name(self, name: str) -> str:
        self._ordinals[self.iteration, name] += 1
        ordinal = self._ordinals[self.iteration, name]
        return (f"{self.iteration}:" if self.iteration else "") + name + (f"#{ordinal}" if ordinal > 1 else "")

    def _check_args(self, name: str, args: tuple[Any, ...]) -> None:
        for i, arg in enumerate(args):
            for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
                where = f"{name}: argument {i + 1}{jax.tree_util.keystr(path)}"
                if isinstance(leaf, Ref):
                    if leaf.recorder is not self:
                        raise GraphError(
                            f"{where}: must come from this step. Got {leaf!r} of another trace. Return it in the "
                            "state to carry it over."
                        )
                elif isinstance(leaf, jax.Array | np.ndarray):
                    raise GraphError(
                        f"{where}: must be an output of a call, part of the data or state, or a hashable setting. Got "
                        f"an array {leaf.dtype}{list(leaf.shape)}. Put it into the state, or make it inside a compute "
                        "function."
                    )
                elif not isinstance(leaf, Hashable) or not _hashes(leaf):
                    raise GraphError(
                        f"{where}: a setting must be hashable, since it is part of the compiled program. Got "
                        f"{leaf!r}. Use a frozen dataclass or a tuple."
                    )

    def _append(self, call: Call, avals: Any, has_rows: list[bool]) -> Any:
        leaves, structure = jax.tree.flatten(avals)
        refs = [
            Ref(call.name, i, x, has_rows=r, recorder=self)
            for i, (x, r) in enumerate(zip(leaves, has_rows, strict=True))
        ]
        outputs = structure.unflatten(refs)
        self.calls.append(dataclasses.replace(call, outputs=outputs))
        return outputs


class RoleHandle:
    """A role inside a step function: its methods record calls."""

    def __init__(self, name: str, role: RoleMethods, roles: "Roles", recorder: Recorder) -> None:
        self._name, self._role, self._roles, self._recorder = name, role, roles, recorder

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)
        known = self._role.methods
        if method in self._role.composed:
            return functools.partial(self._role.composed[method], self._roles)
        if method not in known:
            known = [*known, *self._role.composed]
            raise GraphError(
                f"{self._recorder.step_name}: role '{self._name}' has no method '{method}'. It has: "
                f"{', '.join(sorted(known)) or 'none'}.{did_you_mean(method, known)}"
                + (f" {self._role.missing[method]}" if method in self._role.missing else "")
            )
        return lambda *args: self._recorder.call_role(self._name, method, known[method], self._role.weights, args)


class Roles:
    """The first argument of a step function: one handle per role, as attributes."""

    def __init__(self, roles: Mapping[str, RoleMethods], recorder: Recorder) -> None:
        self._handles = {name: RoleHandle(name, role, self, recorder) for name, role in roles.items()}
        self._recorder = recorder

    def __getattr__(self, name: str) -> RoleHandle:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._handles:
            raise GraphError(
                f"{self._recorder.step_name}: the run has no role '{name}'. It has: {', '.join(sorted(self._handles))}."
                f"{did_you_mean(name, self._handles)} Add it under `roles` in the config."
            )
        return self._handles[name]


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


def compute(function: Callable[..., Any], *args: Any, name: str | None = None) -> Any:
    """A call without weights: a pure function of arrays, over the whole batch, on devices.

    Inside a step function it records the call and returns references to its outputs. Outside of one it simply calls
    the function, so that a step can be tried on real arrays. The call is called `name`, or else as the function is.
    """
    recorder = _recorder.get()
    return function(*args) if recorder is None else recorder.compute(function, args, name)


def trace(
    step: Callable[..., tuple[Any, Any]],
    roles: Mapping[str, RoleMethods],
    state: Any,
    data: Any,
    config: Any,
    *,
    iterations: int = 1,
) -> CallGraph:
    """Run a step function on references and write down its calls.

    Args:
        step: `(roles, state, data, config) -> (results, state)`.
        roles: What each role can do.
        state: Pytree of arrays or shapes that each iteration hands to the next.
        data: Pytree of arrays or shapes, all with rows first.
        config: Hashable settings, given to the step as they are.
        iterations: How many iterations to unroll, to see which calls of neighbours may overlap.

    Raises:
        GraphError: The step uses a role or method that is not there, calculates with an output, hands an unhashable
            setting to a call, or returns a state that differs in structure, shape or dtype from the one it got.
    """
    recorder = Recorder(getattr(step, "__name__", "step"))
    handles = Roles(roles, recorder)
    state_aval, data_aval = _to_avals(state), _to_avals(data)
    first_state = carry = recorder.input("state", state_aval, has_rows=False)
    inputs, results = {"state": first_state}, []
    token = _recorder.set(recorder)
    try:
        for recorder.iteration in range(iterations):
            name = f"data{recorder.iteration or ''}"
            inputs[name] = recorder.input(name, data_aval, has_rows=True)
            returned = step(handles, carry, inputs[name], config)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise GraphError(f"{recorder.step_name}: must return (results, state). Got {type(returned).__name__}.")
            result, new_state = returned
            _check_state(recorder.step_name, state_aval, new_state)
            results.append(result)
            carry = new_state
    finally:
        _recorder.reset(token)
    return _waiting_last(CallGraph(tuple(recorder.calls), inputs, tuple(results), carry))


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


def abstract_call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Shapes that `function(*args)` gives, where arrays in `args` are shapes and all else is passed as it is."""
    arrays, _, rebuild = split_args(args)
    return jax.eval_shape(lambda *arrays: function(*rebuild(list(arrays))), *arrays)


def _waiting_last(graph: CallGraph) -> CallGraph:
    """The same graph, of each iteration first the calls that need nothing which waits for work on the host.

    An executor takes the calls in order, and the first one that needs a result of the host holds up all after it.
    """
    waiting: set[str] = set()
    on_host = {call.name for call in graph.calls if call.kind == "host"}
    for call in graph.calls:
        if not (waiting | on_host).isdisjoint(graph.dependencies(call)):
            waiting.add(call.name)
    calls = sorted(graph.calls, key=lambda call: (call.iteration, call.name in waiting))
    return dataclasses.replace(graph, calls=tuple(calls))


def _identity(args: tuple[Any, ...]) -> Hashable:
    """Equal for the same references and equal settings in the same places."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((x.call, x.leaf) if isinstance(x, Ref) else (type(x), x) for x in leaves)


def _described(setting: Any) -> str:
    """A setting as text that is the same in every run."""
    if callable(setting) and hasattr(setting, "__qualname__"):
        return f"{setting.__module__}:{setting.__qualname__}"
    return repr(setting)


def _avals(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: x.aval if isinstance(x, Ref) else x, args)


def _to_avals(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _follow_rows(name: str, function: Callable[..., Any], args: tuple[Any, ...], avals: Any) -> list[bool]:
    """Which outputs of a compute function have rows: those whose first axis doubles when the rows of the inputs do."""
    if not any(leaf.has_rows for leaf in jax.tree.leaves(args) if isinstance(leaf, Ref)):
        return [False] * len(jax.tree.leaves(avals))

    def doubled_input(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if x.has_rows else x.aval

    try:
        doubled = abstract_call(function, jax.tree.map(doubled_input, args))
    except Exception as error:
        raise GraphError(
            f"{name}: a compute function must work for any number of rows. It fails when every input has twice its "
            f"rows: {error}. Take sizes from the arrays that it gets."
        ) from error
    structure, structure_doubled = jax.tree.structure(avals), jax.tree.structure(doubled)
    if structure != structure_doubled:
        raise GraphError(
            f"{name}: the structure of its outputs must not depend on the number of rows. Got {structure}, and "
            f"{structure_doubled} for twice the rows. Return arrays with the rows first."
        )
    has_rows = []
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(avals), jax.tree.leaves(doubled), strict=True):
        if one.shape and (2 * one.shape[0], *one.shape[1:]) == two.shape:
            has_rows.append(True)
        elif one.shape == two.shape:
            has_rows.append(False)
        else:
            raise GraphError(
                f"{name}: an output follows the rows in its first axis or not at all. Got "
                f"output{jax.tree_util.keystr(path)} of shape {list(one.shape)}, and {list(two.shape)} for twice the "
                "rows. Put the rows first."
            )
    return has_rows


def _check_state(step_name: str, before: Any, after: Any) -> None:
    rule = f"{step_name}: the state that it returns must have the structure, shapes and dtypes of the one that it got"
    old, new = jax.tree.structure(before), jax.tree.structure(after)
    if old != new:
        raise GraphError(f"{rule}. Got {new} for {old}.")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if not isinstance(y, Ref):
            raise GraphError(f"{rule}, made by compute. Got {y!r} at state{jax.tree_util.keystr(path)}.")
        if (tuple(x.shape), x.dtype) != (y.shape, y.dtype):
            raise GraphError(
                f"{rule}. Got {y.dtype}{list(y.shape)} for {x.dtype}{list(x.shape)} at "
                f"state{jax.tree_util.keystr(path)}."
            )
        if y.has_rows:
            raise GraphError(f"{rule}, and no rows. Got an array of rows at state{jax.tree_util.keystr(path)}.")
