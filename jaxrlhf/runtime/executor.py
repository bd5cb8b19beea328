"""The executor: runs a planned graph, call by call, and waits for nothing that Python does not need.

For each call in graph order it brings the role's weights and the call's inputs into the call's layout, dispatches the
program and goes on. Calls on disjoint devices therefore overlap, also those of neighbouring steps. Python functions run
in threads beside the devices; the first call that needs their output waits for it.
"""

import collections
import concurrent.futures
import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.call_graph import Call, CallGraph, Ref, split_args
from jaxrlhf.experience import Sampling
from jaxrlhf.planner.plan import Plan
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.runtime.programs import compute_program, generate_program, infer_program, train_program
from jaxrlhf.runtime.roles import FunctionRole, ModelRole, Role
from jaxrlhf.runtime.timeline import STEP, Timeline, Watcher
from jaxrlhf.runtime.weights import WeightStore
from jaxrlhf.sharding.layout import Layout

MAX_IN_FLIGHT = 8
"""Calls dispatched and not awaited. A CPU backend deadlocks with some dozens of programs that communicate."""

Leaves = list[Any]


@dataclasses.dataclass
class StepResult:
    """What a step gave. Its arrays may still be under way."""

    graph: CallGraph
    state: Any
    """The state for the next step."""
    _values: dict[str, "Leaves | concurrent.futures.Future[Leaves]"]

    def fetch(self) -> Any:
        """What the step function returned beside its state, as numpy arrays. Waits for it."""
        return self.read(self.graph.results[0])

    def outputs(self, call_name: str) -> Any:
        """A call's outputs as numpy arrays. Waits for them."""
        (call,) = (c for c in self.graph.calls if c.name == call_name)
        return self.read(call.outputs)

    def read(self, tree: Any) -> Any:
        """A tree with the arrays in place of the graph's references to them, as numpy arrays. Waits for them."""
        refs = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Ref)]
        arrays = iter(jax.device_get([_lookup(self._values, ref) for ref in refs]))
        return jax.tree.map(lambda x: next(arrays) if isinstance(x, Ref) else x, tree)


class Executor:
    """Runs planned graphs over the weights of a set of roles."""

    def __init__(self, roles: Mapping[str, Role], *, seed: int, timeline: Timeline | None = None) -> None:
        self._roles = roles
        self._seed = seed
        self._timeline = timeline or Timeline()
        self._watcher = Watcher(self._timeline)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._in_flight: collections.deque[Leaves] = collections.deque()
        self._at = (STEP, 0)
        """Phase and number of the step that is being dispatched, as the timeline is to know it."""
        self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=4, thread_name_prefix="function-role")
        self.weights = WeightStore({name: role for name, role in roles.items() if isinstance(role, ModelRole)})

    def run(
        self,
        graph: CallGraph,
        plan: Plan,
        state: Any,
        data: Any,
        *,
        step: int,
        phase: str = STEP,
        number: int | None = None,
    ) -> StepResult:
        """One step, dispatched.

        Args:
            graph: The step's calls, of one iteration.
            state: The state that the step before gave, or the first.
            data: The rows of this step.
            step: Decides, with the seed, all its noise.
            phase: The part of the run that it belongs to, for the timeline.
            number: The step's number in the timeline, as metrics count. None: `step + 1`.

        Raises:
            RewardError: A function role failed, in this step.
        """
        self._at = (phase, step + 1 if number is None else number)
        values: dict[str, Any] = {"state": jax.tree.leaves(state), "data": jax.tree.leaves(data)}
        for call in graph.calls:
            if call.kind == "host":
                values[call.name] = self._call_host(call, values)
            else:
                values[call.name] = self._call_device(call, plan, values, step)
        new_state = jax.tree.map(lambda ref: _lookup(values, ref), graph.state)
        return StepResult(graph, new_state, values)

    def wait(self, step: int | None = None) -> None:
        """Until everything dispatched (of one step, by its number) is done; raises what went wrong."""
        self._watcher.drain(step)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._watcher.close()

    def _call_host(self, call: Call, values: dict[str, Any]) -> "concurrent.futures.Future[Leaves]":
        assert call.role is not None
        role = self._roles[call.role]
        assert isinstance(role, FunctionRole)
        arrays, _, rebuild = split_args(call.args)
        inputs = [_lookup(values, ref) for ref in arrays]
        phase, number = self._at

        def work() -> Leaves:
            on_host = rebuild(jax.device_get(inputs))
            with self._timeline.host(call.plan_name, kind=call.kind, step=number, phase=phase):
                return [role.score(*on_host)]

        return self._threads.submit(work)

    def _call_device(self, call: Call, plan: Plan, values: dict[str, Any], step: int) -> Leaves:
        placement = plan[call]
        layout = Layout.over(placement.devices, placement.strategy)
        refs, key, rebuild = split_args(call.args)
        inputs = [_lookup(values, ref) for ref in refs]
        dispatched = time.perf_counter()
        arrays = reallocate(inputs, [layout.rows if ref.has_rows else layout.replicated for ref in refs])
        avals = tuple((ref.shape, ref.dtype, ref.has_rows) for ref in refs)
        has_rows = [ref.has_rows for ref in refs]
        key = (call.role, call.method, call.function, layout, key, avals)
        noise = np.array([self._seed, step, zlib.crc32(call.plan_name.encode())], np.uint32)

        if call.kind == "compute":
            assert call.function is not None
            function = call.function
            rows_out = [ref.has_rows for ref in call.output_refs]
            program = self._program(key, lambda: compute_program(function, rebuild, rows_out, layout))
            outputs = program(arrays)
        elif call.kind == "train":
            outputs = self._train(call, key, rebuild, has_rows, layout, noise, arrays)
        else:
            role = self._model_role(call)
            params = self._weights_for(call, role, layout)
            if call.kind == "generate":
                key, temperature = _without_temperature(call, key)
                program = self._program(key, lambda: generate_program(role, rebuild, layout))
                outputs = program(params, noise, temperature, arrays)
            else:
                program = self._program(key, lambda: infer_program(role, call.method, rebuild, layout))
                outputs = program(params, arrays)
        self._watch(outputs, call.plan_name, call.kind, layout, dispatched)
        self._bound_in_flight(outputs)
        return outputs

    def _train(
        self,
        call: Call,
        key: Any,
        rebuild: Any,
        has_rows: list[bool],
        layout: Layout,
        noise: np.ndarray,
        arrays: Leaves,
    ) -> Leaves:
        assert call.role is not None
        role = self._model_role(call)
        program = self._program(key, lambda: train_program(role, rebuild, has_rows, layout))
        started = time.perf_counter()
        params, optimizer, moved = self.weights.take_for_training(call.role, layout)
        if moved:
            self._watch(optimizer.num_updates + 0, f"{call.role}.reallocate", "reallocate", layout, started)
        params, optimizer, metrics = program(params, optimizer, noise, arrays)
        self.weights.trained(call.role, layout, params, optimizer)
        return jax.tree.leaves(metrics)

    def _weights_for(self, call: Call, role: ModelRole, layout: Layout) -> Any:
        assert call.role is not None
        started = time.perf_counter()
        stacked = role.model.scan_layers and call.kind != "generate"
        params, moved = self.weights.for_inference(call.role, layout, stacked=stacked)
        if moved:
            # a sum, since the weights themselves may be donated to a train call before the watcher has seen them
            self._watch(params["final_norm"] + 0, f"{call.role}.reallocate", "reallocate", layout, started)
        return params

    def _model_role(self, call: Call) -> ModelRole:
        assert call.role is not None
        role = self._roles[call.role]
        assert isinstance(role, ModelRole)
        return role

    def _program(self, key: Any, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if key not in self._programs:
            self._programs[key] = build()
        return self._programs[key]

    def _watch(self, arrays: Any, name: str, kind: str, layout: Layout, dispatched: float) -> None:
        first = jax.tree.leaves(arrays)[:1]
        phase, number = self._at
        self._watcher.watch(
            first, name=name, kind=kind, devices=layout.device_ids, step=number, dispatched=dispatched, phase=phase
        )

    def _bound_in_flight(self, outputs: Leaves) -> None:
        self._in_flight.append(outputs)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())
        self._watcher.check()


def _lookup(values: dict[str, Any], ref: Ref) -> Any:
    leaves = values[ref.call]
    if isinstance(leaves, concurrent.futures.Future):
        leaves = leaves.result()
    return leaves[ref.leaf]


def _without_temperature(call: Call, key: Any) -> tuple[Any, np.float32]:
    """The program's key without the temperature, which is an argument of it."""
    _, sampling = call.args
    assert isinstance(sampling, Sampling)
    role, method, function, layout, (structure, settings), avals = key
    settings = tuple(dataclasses.replace(x, temperature=1.0) if isinstance(x, Sampling) else x for x in settings)
    return (role, method, function, layout, (structure, settings), avals), np.float32(sampling.temperature)
