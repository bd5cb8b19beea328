"""Tracing: from a step function to its call graph.

A step function is ordinary Python over role handles. `trace` runs it once on references instead of arrays and records
every call: a call of a handle (`roles.actor.generate(...)`) or of `compute`. This file knows no model, mesh or device;
roles bring their methods, each with a function for the shapes of its outputs.

    graph = trace(ppo_step, roles, state, prompts, config)

Rows. Data has rows, one for each sequence, along the first axis; state has none. Whether an output has rows is not
guessed from its size: a role's method declares it, and a `compute` function is evaluated abstractly at two numbers of
rows, which shows the axes that follow them.

A call of kind `infer` or `host` with the same inputs and weights as an earlier one is not recorded again.
"""

import collections
import contextvars
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxrlhf.brief import brief, cut, did_you_mean
from jaxrlhf.call_graph import Call, CallGraph, CallKind, GraphError, Ref, split_args
from jaxrlhf.importing import failure


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a role: the kind of its calls and the shapes of their outputs."""

    kind: CallKind
    abstract: Callable[..., Any]
    """Arguments, with `jax.ShapeDtypeStruct` for arrays -> the outputs as a pytree of `jax.ShapeDtypeStruct`."""
    row_wise: bool = True
    """True if every output has rows, each of which depends only on its own sequence."""
    tokens: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    """`(arguments, outputs) -> tokens` of the sequences that it runs on or draws, each [rows, columns]; None without
    sequences."""
    through: str = ""
    """A method of the same role, called before with the same arguments, whose outputs are the argument. Empty: none."""
    bind: Callable[..., tuple[Any, ...]] | None = None
    """From the arguments in a step function to those of the call; None if they are the same."""

    def arguments(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call `name(*args, **named)`."""
        signature = inspect.signature(self.bind or self.abstract)
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            raise GraphError(f"{name}: {self.usage(name, args, named)}: {error}.") from error
        bound.apply_defaults()
        return self.bind(*bound.args) if self.bind is not None else bound.args

    def usage(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The signature and the given arguments, for error messages."""
        parameters = inspect.signature(self.bind or self.abstract).parameters.values()
        usage = ", ".join(_described(p) + ("=..." if p.default is not p.empty else "") for p in parameters)
        got = ", ".join([*map(_short, args), *(f"{key}={_short(value)}" for key, value in named.items())])
        return f"is called as {name}({usage}). Got {name}({got})"


@dataclasses.dataclass(frozen=True)
class RoleMethods:
    """The methods of a role in a step function."""

    methods: Mapping[str, Method]
    weights: str | None = None
    """The set of weights that its calls read and train; None without weights."""
    composed: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    """Methods made of other calls: `(roles, *args) -> outputs`, traced like a step function."""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Methods that it lacks -> the remedy, for error messages."""


@dataclasses.dataclass(frozen=True)
class StaleGeneration:
    """Generation with the weights of an earlier step, so that it can run while later ones are being trained."""

    steps: int
    """The steps by which the weights that a trained role generates with are older than its current ones."""
    correct: "Callable[[RoleHandle, Any], tuple[Any, dict[str, Any]]] | None" = None
    """`(role, rollout) -> (rollout, metrics)`, traced like a step function: what training gets in place of a rollout
    that was drawn from older weights, with `importance_weights`. None means the rollout itself."""


class Recorder:
    """Records the calls of the step that is being traced."""

    def __init__(self, step_name: str, stale: StaleGeneration | None = None) -> None:
        self.step_name, self.stale = step_name, stale
        self.calls: list[Call] = []
        self.iteration = 0
        self._corrections: list[_Correction] = []
        self._versions: collections.Counter[str] = collections.Counter()
        self._ordinals: collections.Counter[tuple[int, str]] = collections.Counter()
        self._outputs: dict[Hashable, Any] = {}

    def references(self, name: str, avals: Any, has_rows: bool | Sequence[bool]) -> Any:
        """References to the outputs of a call, or to an input of the graph. `has_rows`: a flag for each leaf, or one
        for all."""
        leaves, structure = jax.tree.flatten(avals)
        flags = [has_rows] * len(leaves) if isinstance(has_rows, bool) else has_rows
        flagged = enumerate(zip(leaves, flags, strict=True))
        return structure.unflatten([Ref(name, i, x, has_rows=rows, recorder=self) for i, (x, rows) in flagged])

    def version(self, weights: str | None) -> int:
        """The number of train calls of a set of weights so far."""
        return self._versions[weights] if weights else 0

    def call_role(
        self, role: str, name: str, method: Method, weights: str | None, args: tuple[Any, ...], version: int | None
    ) -> Any:
        """Records a call of a role. `version`: that of its weights; None means the current one."""
        if method.kind in ("infer", "host"):  # so that it does not wait for importance weights
            args = tuple(map(self._as_drawn, args))
        self._check_args(f"{role}.{name}", args)
        reads = self.version(weights) if version is None else version
        if method.kind == "train" and version is not None:
            raise GraphError(
                f"{role}.{name}: a pinned role is not trained. Got pinned().{name}(...). Call roles.{role}.{name}."
            )
        asked = (self.iteration, role, name, reads, _identity(args))
        if method.kind in ("infer", "host") and asked in self._outputs:
            return self._outputs[asked]
        full_name = self._next_name(f"{role}.{name}")
        try:
            avals = method.abstract(*_avals(args))
            tokens = method.tokens(_avals(args), avals) if method.tokens is not None else ()
        except GraphError:
            raise
        except Exception as error:
            usage = method.usage(f"{role}.{name}", args)
            raise GraphError(f"{role}.{name}: {usage}, with which it cannot work: {cut(str(error))}.") from error
        writes = None
        if method.kind == "train":
            assert weights is not None
            self._versions[weights] = writes = reads + 1
        call = Call(
            name=full_name, role=role, method=name, kind=method.kind, row_wise=method.row_wise, args=args, outputs=None,
            weights=weights, reads=reads, writes=writes, iteration=self.iteration,
            sequence_shapes=tuple(x.shape for x in tokens),
        )  # fmt: skip
        self._outputs[asked] = self._append(call, avals, method.row_wise)
        return self._outputs[asked]

    def corrected(self, role: "RoleHandle", rollout: Any) -> Any:
        """What training gets in place of a rollout that `role` drew with older weights."""
        (drawn,) = (call for call in self.calls if call.outputs is rollout)
        self.calls[self.calls.index(drawn)] = dataclasses.replace(drawn, stale=self.stale.steps if self.stale else 0)
        if self.stale is None or self.stale.correct is None:
            return rollout
        first = len(self.calls)
        given, metrics = self.stale.correct(role, rollout)
        names = {call.name for call in self.calls[first:]}
        self._corrections.append(_Correction(self.iteration, names, rollout, given, metrics))
        return given

    def _as_drawn(self, arg: Any) -> Any:
        """A rollout without its correction; anything else as it is."""
        weights = None if isinstance(arg, Ref) else getattr(arg, "importance_weights", None)
        for each in self._corrections:
            if weights is not None and weights is each.given.importance_weights:
                logprobs = each.drawn.logprobs if arg.logprobs is each.given.logprobs else arg.logprobs
                return arg.replace(logprobs=logprobs, importance_weights=None)
        return arg

    def finish(self, results: list[Any], state: Any) -> tuple[tuple[Call, ...], tuple[Any, ...]]:
        """The calls, without corrections of rollouts that nothing is trained on, stale ones with the version that they
        read; and the results of each iteration, with the metrics of its first correction."""
        results = list(results)
        for each in self._corrections[::-1]:
            others = [ref for call in self.calls if call.name not in each.calls for ref in call.refs]
            others += [x for x in jax.tree.leaves((results, state)) if isinstance(x, Ref)]
            if each.calls.isdisjoint(ref.call for ref in others):
                self.calls = [call for call in self.calls if call.name not in each.calls]
                self._corrections.remove(each)
        for each in self._corrections[::-1]:
            if isinstance(results[each.iteration], dict):
                results[each.iteration] = {**results[each.iteration], "staleness": each.metrics}
        trains = collections.Counter(c.weights for c in self.calls if c.kind == "train" and not c.iteration)
        calls = (dataclasses.replace(c, reads=c.reads - c.stale * trains[c.weights]) for c in self.calls)
        return tuple(calls), tuple(results)

    def compute(
        self, function: Callable[..., Any], args: tuple[Any, ...], call_name: str | None, groups_of: int | str
    ) -> Any:
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
        avals = _evaluated(full_name, function, args)
        has_rows = _follow_rows(full_name, function, args, avals)
        if isinstance(groups_of, int):
            _check_groups(full_name, groups_of, args, avals, has_rows)
        call = Call(
            name=full_name, kind="compute", function=function, groups_of=groups_of, args=args, outputs=None,
            iteration=self.iteration,
        )  # fmt: skip
        return self._append(call, avals, has_rows)

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
                elif not _hashes(leaf):
                    raise GraphError(
                        f"{where}: a setting must be hashable, since it is part of the compiled program. Got "
                        f"{leaf!r}. Use a frozen dataclass or a tuple."
                    )

    def _append(self, call: Call, avals: Any, has_rows: bool | Sequence[bool]) -> Any:
        outputs = self.references(call.name, avals, has_rows)
        self.calls.append(dataclasses.replace(call, outputs=outputs))
        return outputs


@dataclasses.dataclass(frozen=True)
class _Correction:
    """The correction of a rollout that older weights drew."""

    iteration: int
    calls: set[str]
    drawn: Any
    given: Any
    metrics: dict[str, Any]


class RoleHandle:
    """A role inside a step function: its methods record calls.

    >>> def step(roles, state, prompts, config):
    ...     scores = roles.judge.scores(prompts)  # a handle's method records a call, and returns references
    ...     return {"score": compute(jnp.mean, scores)}, state
    >>> scores = Method("host", lambda prompts: jax.ShapeDtypeStruct(prompts.shape[:1], jnp.float32))
    >>> graph = trace(step, {"judge": RoleMethods({"scores": scores})}, (), jnp.ones((4, 3)), None)
    >>> [call.name for call in graph.calls]
    ['judge.scores', 'mean']
    """

    def __init__(
        self, name: str, role: RoleMethods, roles: "Roles", recorder: Recorder, version: int | None = None
    ) -> None:
        self._name, self._role, self._roles, self._recorder = name, role, roles, recorder
        self._version = version

    def pinned(self) -> "RoleHandle":
        """The role with its current weights, also after later train calls of the same step."""
        version = self._recorder.version(self._role.weights)
        return RoleHandle(self._name, self._role, self._roles, self._recorder, version)

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

        def call(*args: Any, **named: Any) -> Any:
            arguments = known[method].arguments(f"{self._name}.{method}", args, named)
            if known[method].through:
                arguments = (getattr(self, known[method].through)(*arguments),)
            on_host = known[method].kind == "host"
            weights, version = (None, None) if on_host else (self._role.weights, self._version)
            outputs = self._recorder.call_role(self._name, method, known[method], weights, arguments, version)
            is_stale = known[method].kind == "generate" and "train" in known and self._version is None
            return self._recorder.corrected(self, outputs) if is_stale and self._recorder.stale else outputs

        return call


class Roles:
    """The first argument of a step function: a handle for each role, as attributes.

    >>> def step(roles, state, prompts, config):
    ...     return {"score": compute(jnp.mean, roles.judge.scores(prompts))}, state
    >>> trace(step, {}, (), jnp.ones((4, 3)), None)
    Traceback (most recent call last):
    ...
    jaxrlhf.call_graph.GraphError: step: the run has no role 'judge'. It has: . Add it under `roles` in the config.
    """

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


def compute(function: Callable[..., Any], *args: Any, name: str | None = None, groups_of: int | str = "") -> Any:
    """A call without weights: a pure function of arrays, over the whole batch, on devices.

    Inside a step function it records the call and returns references to its outputs. Outside of one it calls the
    function, so that a step can be tried on real arrays.

    Args:
        name: The name of the call. None means the function's.
        groups_of: The rows that belong together: the outputs of each group of so many neighbors, as many rows, depend
            on the inputs of that group and on inputs without rows alone; 1 means row by row. Outputs without rows may
            depend on everything. A plan may then train on some groups while others are still being generated. Text
            says what needs the whole batch, for the error of a plan that asks for that; empty means unknown.

    >>> compute(max, 1, 2)  # outside of a step function
    2
    """
    recorder = _recorder.get()
    return function(*args) if recorder is None else recorder.compute(function, args, name, groups_of)


def trace(
    step: Callable[..., tuple[Any, Any]],
    roles: Mapping[str, RoleMethods],
    state: Any,
    data: Any,
    config: Any,
    *,
    iterations: int = 1,
    stale: StaleGeneration | None = None,
) -> CallGraph:
    """Runs a step function on references and records its calls.

    Args:
        step: `(roles, state, data, config) -> (results, state)`.
        roles: The methods of each role.
        state: Pytree of arrays or shapes that each iteration passes to the next.
        data: Pytree of arrays or shapes, all with rows first.
        config: Hashable settings, passed to the step unchanged.
        iterations: The number of iterations to unroll, which shows the calls of neighbors that may overlap.
        stale: How roles that are trained generate. None means with their current weights.

    Raises:
        GraphError: The step uses an unknown role or method, computes with an output, passes an unhashable setting to a
            call, or returns a state of another structure, shape or dtype than the one it got; or it fails.
    """
    recorder = Recorder(getattr(step, "__name__", "step"), stale)
    handles = Roles(roles, recorder)
    state_aval, data_aval = _to_avals(state), _to_avals(data)
    first_state = carry = recorder.references("state", state_aval, False)
    inputs, results = {"state": first_state}, []
    token = _recorder.set(recorder)
    try:
        for recorder.iteration in range(iterations):
            name = f"data{recorder.iteration or ''}"
            inputs[name] = recorder.references(name, data_aval, True)
            try:
                returned = step(handles, carry, inputs[name], config)
            except GraphError:
                raise
            except Exception as error:
                raise GraphError(
                    f"{recorder.step_name}: fails when it is traced. Got {failure(error, step)}. Its arguments are "
                    "(roles, state, data, config), in this order; annotate `config` with the frozen dataclass of its "
                    "settings."
                ) from error
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise GraphError(
                    f"{recorder.step_name}: must return (results, state). Got {type(returned).__name__}. End it with "
                    "`return results, state`."
                )
            result, new_state = returned
            _check_state(recorder.step_name, state_aval, new_state)
            results.append(result)
            carry = new_state
    finally:
        _recorder.reset(token)
    calls, reported = recorder.finish(results, carry)
    return _waiting_last(CallGraph(calls, inputs, reported, carry))


def abstract_call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The output shapes of `function(*args)`, with shapes in place of arrays in `args`."""
    arrays, _, rebuild = split_args(args)
    return jax.eval_shape(lambda *arrays: function(*rebuild(list(arrays))), *arrays)


def _waiting_last(graph: CallGraph) -> CallGraph:
    """The same graph, in each iteration with the calls last that depend on work on the host.

    An executor dispatches calls in order, and the first one that needs a result of the host delays all after it.
    """
    waiting: set[str] = set()
    on_host = {call.name for call in graph.calls if call.kind == "host"}
    for call in graph.calls:
        if not (waiting | on_host).isdisjoint(graph.dependencies(call)):
            waiting.add(call.name)
    calls = sorted(graph.calls, key=lambda call: (call.iteration, call.name in waiting))
    return dataclasses.replace(graph, calls=tuple(calls))


def _evaluated(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The output shapes of a compute function. Raises GraphError if it does not take these arguments, or fails."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        got = ", ".join(map(_short, args))
        raise GraphError(
            f"{name}: compute(function, ...) calls {name}{inspect.signature(function)}. Got ({got}): {error}."
        ) from error
    except ValueError:  # it has no signature
        pass
    try:
        return abstract_call(function, _avals(args))
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(f"{name}: fails when it is traced: {failure(error, function)}.") from error


def _described(parameter: inspect.Parameter) -> str:
    """A parameter in an error message, with its type if it is annotated."""
    kind = getattr(parameter.annotation, "__name__", "")
    return parameter.name if kind in ("", "_empty", "Any") else f"{parameter.name}: {kind}"


def _short(value: Any) -> str:
    """An argument in an error message."""
    if isinstance(value, Ref):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: ..." for key in value) + "}"
    if callable(value) or dataclasses.is_dataclass(value):
        return getattr(value, "__name__", type(value).__name__)
    return brief(value)


def _identity(args: tuple[Any, ...]) -> Hashable:
    """A key that is equal for the same references and equal settings in the same places."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((x.call, x.leaf) if isinstance(x, Ref) else (type(x), x) for x in leaves)


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
    """A flag for each output of a compute function: True if its first axis doubles with the rows of the inputs."""
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


def _check_groups(name: str, groups_of: int, args: Any, avals: Any, has_rows: Sequence[bool]) -> None:
    """Checks that a compute function can work on one group of rows after another."""
    rows_in = {ref.shape[0] for ref in jax.tree.leaves(args) if isinstance(ref, Ref) and ref.has_rows}
    rows_out = {x.shape[0] for x, rows in zip(jax.tree.leaves(avals), has_rows, strict=True) if rows}
    if len(rows_in | rows_out) > 1:
        raise GraphError(
            f"{name}: groups_of is for a function whose inputs and outputs have equally many rows. Got "
            f"{' and '.join(map(str, sorted(rows_in)))} in, {' and '.join(map(str, sorted(rows_out)))} out. Leave "
            "groups_of out."
        )
    if groups_of < 1 or any(rows % groups_of for rows in rows_in):
        raise GraphError(
            f"{name}: groups_of must be at least 1 and divide the rows. Got {groups_of} for "
            f"{' and '.join(map(str, sorted(rows_in))) or 'no'} rows. Use the size of a group, or 1 for row by row."
        )


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
