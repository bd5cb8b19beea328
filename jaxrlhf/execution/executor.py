"""The executor: dispatches a planned graph, call by call, and waits only for values that Python needs.

For each call in graph order it moves the role's weights and the call's inputs into the call's layout, dispatches the
program, starts early transfers of its outputs, and goes on. So calls on disjoint devices overlap, also those of
neighboring steps. Python functions run in threads; the first call that needs their output waits for it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrlhf.call_graph import Call, CallGraph, Part, split_args
from jaxrlhf.execution.function_threads import FunctionThreads
from jaxrlhf.execution.fused_training import FusedTraining
from jaxrlhf.execution.hand_overs import HandOvers
from jaxrlhf.execution.host_arrays import gather, hand_to_threads
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.execution.shared_programs import shared_program
from jaxrlhf.execution.step_result import Leaves, StepResult, Values, lookup
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.experience import Sampling
from jaxrlhf.models.lora import reads_merged
from jaxrlhf.models.params import Params
from jaxrlhf.observe.events import STEP, WAIT, Event, note_call
from jaxrlhf.observe.part_reports import PartReports
from jaxrlhf.observe.timeline_recorder import Timeline, Watcher
from jaxrlhf.planner.fusion.fusible import fused_order
from jaxrlhf.planner.plans.parts import cut_rows, in_order, in_parts
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import splits_rows
from jaxrlhf.programs.arrays import Outputs, Program, Rebuild
from jaxrlhf.programs.call_programs import compute_program, decoding_options, model_program, slots_of
from jaxrlhf.programs.generation_in_parts import GenerationInParts, Progress
from jaxrlhf.programs.optimizer import OptimizerState
from jaxrlhf.programs.pipeline import InFlight, Pipelined
from jaxrlhf.programs.roles import ModelRole, Role, host_function
from jaxrlhf.programs.rollout_in_parts import RolloutInParts
from jaxrlhf.programs.training_in_parts import SoFar, training_part_program
from jaxrlhf.programs.weight_sets import form_read
from jaxrlhf.reshard.offload import rests_on_host
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here, meet


class Executor:
    """Runs planned graphs over the weights of a set of roles.

    In a run of several processes, each has an executor and runs the same graphs: every call is dispatched in the
    processes that own its devices; Python functions run in the first process, which sends their results to the others.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        *,
        seed: int,
        timeline: Timeline | None = None,
        channel: Channel | None = None,
        one_at_a_time: bool = False,
        weights: WeightStore | None = None,
        part_tokens: int = 0,
    ) -> None:
        """
        Args:
            one_at_a_time: Each call waits until the calls before it have ended and its inputs have arrived. For
                measuring calls on virtual devices, which share a CPU and would slow one another.
            weights: The weights to run on. None means a new store, which is empty.
            part_tokens: Decoding steps after which a longer generation says how far it is, by `say`. 0 means never.
        """
        self.say: Callable[[str], None] = lambda text: None
        """Is told how far a generation of several parts is, in a thread of its own."""
        self._part_tokens = part_tokens
        self._roles = roles
        self._one_at_a_time = one_at_a_time
        self._channel = channel or Channel()
        self._seed = seed
        self._timeline = timeline or Timeline()
        self._watcher = Watcher(self._timeline)
        self._programs: dict[Hashable, Program] = {}
        self._graphs: dict[tuple[int, int], tuple[Any, tuple[CallGraph, Plan]]] = {}
        self._planned: Hashable = None
        """The key in `_graphs` of the step that is being dispatched."""
        self._rollouts: dict[Hashable, RolloutInParts] = {}
        """Shares of generations in parts, and their tails."""
        self._so_far: dict[str, SoFar] = {}
        """Train call in parts -> what its parts have added up in this step."""
        self._reports: dict[Hashable, PartReports] = {}
        self._in_flight = InFlight(self._wait_for)
        self._at = (STEP, 0)
        """Phase and number, for the timeline, of the step that is being dispatched."""
        self._threads = FunctionThreads()
        self._hand_overs: HandOvers | None = None
        """The transfers of the step that is being dispatched."""
        self._first_versions: dict[str, int] = {}
        """Set of weights -> its version before this step."""
        models = {name: role for name, role in roles.items() if isinstance(role, ModelRole)}
        self.weights = weights or WeightStore(models)

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
        """Dispatches one step.

        Args:
            graph: The step's calls, of one iteration.
            state: The state after the step before, or the first state.
            data: The rows of this step.
            step: Determines, with the seed, all noise of the step.
            phase: The part of the run that it belongs to, for the timeline.
            number: The step's number in the timeline and in metrics. None means `step + 1`.

        Raises:
            RewardError: A function role failed, in this step.
        """
        self._at = (phase, step + 1 if number is None else number)
        whole, (graph, plan) = graph, self._in_parts(graph, plan)
        values: Values = {"state": jax.tree.leaves(state), "data": jax.tree.leaves(data)}
        self._first_versions = self.weights.versions()
        stale = [call for call in graph.calls if call.stale]
        ages = [self._steps_behind(call, graph) for call in stale]
        self._so_far.clear()  # a step that failed may have left some
        self._hand_overs = HandOvers(graph, plan)
        for role in plan.offload:
            self._offload(role)
        waiting: Call | None = None  # the first of two calls that are fused
        for i, call in enumerate(graph.calls):
            if call.plan_name in plan.fuse and waiting is None:
                waiting = call
                continue
            if call.kind == "host":
                values[call.name] = scores = self._call_host(call, values)
                if self._one_at_a_time:
                    concurrent.futures.wait([scores])
                continue
            later = graph.calls[i + 1 :]
            together = (waiting, call) if waiting is not None and call.plan_name in plan.fuse else (call,)
            for one in together:
                self._pin_before(one, graph, plan)
                self._reload(one, plan)  # only for the first call: later ones were reloaded with the call before
            try:
                if len(together) == 2:
                    outputs = self._call_fused(together, plan, values, step)
                    waiting = None
                else:
                    outputs = {call.name: self._call_device(call, plan, values, step)}
            except Exception as error:
                note_call(error, " + ".join(one.plan_name for one in together), *self._at)
                raise
            values.update(outputs)
            for one in together:
                if not self._one_at_a_time:
                    self._hand_overs.start(one, outputs[one.name])
                self._offload_after(one, later, plan)
            if self._one_at_a_time:
                self.wait()
        if any(call.writes is not None for call in graph.calls):  # an evaluation leaves what later steps read
            oldest: dict[str, int] = {}  # set -> the version that the next step reads first
            for call in stale:
                version = self.weights.version(name := self._own(call))
                oldest[name] = min(oldest.get(name, version), version + call.reads)
            self.weights.unpin(oldest)
        new_state = jax.tree.map(lambda ref: lookup(values, ref, self._wait), graph.state)
        phase, number = self._at
        wait = functools.partial(self._timeline.host, kind=WAIT, step=number, phase=phase)
        on_host = tuple(call for call in graph.calls if call.kind == "host")
        return StepResult(whole, new_state, values, self._channel, wait, on_host, max(ages, default=None))

    def _in_parts(self, graph: CallGraph, plan: Plan) -> tuple[CallGraph, Plan]:
        """A graph and its plan, with a call for each part. They are kept, with what they were made of."""
        if all(placement.is_whole for placement in plan.placements.values()):
            return graph, plan
        self._planned = key = id(graph), id(plan)
        if key not in self._graphs:
            self._graphs[key] = (graph, plan), in_parts(graph, plan)
        return self._graphs[key][1]

    def wait(self, step: int | None = None) -> None:
        """Waits until all dispatched calls (of one step, by its number) are done. Raises the error of a failed call."""
        phase, number = self._at if step is None else (STEP, step)
        with self._timeline.host("calls to end", kind=WAIT, step=number, phase=phase):
            self._watcher.drain(step)

    def abandon_functions(self, seconds: float) -> None:
        """Abandons Python functions that have run for `seconds`: the step raises a `FunctionAbandonedError`. May be
        called in any thread."""
        self._threads.abandon(seconds)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()
        self._watcher.close()

    def _call_host(self, call: Call, values: Values) -> "concurrent.futures.Future[Leaves]":
        assert call.role is not None
        function = host_function(self._roles[call.role], call.method)
        arrays, _, rebuild = split_args(call.args)
        inputs = [lookup(values, ref, self._wait) for ref in arrays]
        hand_to_threads(inputs)
        phase, step = self._at
        number = self._channel.number()

        def work() -> tuple[bool, Any]:
            try:
                on_host = gather(inputs, self._channel, number)
                assert on_host is not None
                rollout = rebuild(on_host)
                with self._timeline.host(call.whole_name, kind=call.kind, step=step, phase=phase):
                    given, count = function(*rollout)
                    return True, [*jax.tree.leaves(given), count]
            except Exception as error:
                return False, error

        def send() -> None:
            try:
                gather(inputs, self._channel, number)
            except Exception as error:
                self._channel.abort(error)  # the first process waits for these arrays

        if not self._channel.is_first:
            self._threads.submit(call.plan_name, send)
        return self._channel.later(lambda: self._threads.submit(call.plan_name, work))

    def _call_device(self, call: Call, plan: Plan, values: Values, step: int) -> Leaves:
        ready = self._ready(call, plan, values, step)
        if call.kind == "generate" and call.part is not None:
            return self._call_rollout(ready, call.part)
        if call.kind == "train" and call.writes is None:
            return self._add_gradient(ready)
        arguments, program = self._arguments(ready), self._program(ready)
        told = {"on_part": self._part_watcher(ready)} if isinstance(program, GenerationInParts) else {}
        outputs = program(*arguments, **told) if program is not None else None
        if call.kind == "train":
            outputs = self._trained(ready, arguments, outputs)
        elif outputs is None:
            outputs = _absent_outputs(call, ready.layout)
        ends = program.ends if isinstance(program, Pipelined) else {ready.layout: outputs}
        if call.function in (cut_rows, in_order):  # rows on their way between parts are no work of the step
            ends = {}
        for where, array in ends.items():
            self._watch(array, call.whole_name, call.kind, where, ready.dispatched, inputs=ready.arrays)
        if isinstance(program, Pipelined):
            program.ends = {}
        self._bound_in_flight(outputs, ready.layout)
        return outputs

    def _call_rollout(self, ready: "_Ready", part: Part) -> Leaves:
        """Dispatches a part of a generation: its share, or the tail, goes on until the sequences are there."""
        call, layout, count = ready.call, ready.layout, part.handed_on[1] - part.handed_on[0]
        params, noise, temperature, _ = self._arguments(ready)
        prompts, sampling = ready.rebuild(ready.arrays)
        sampling = dataclasses.replace(sampling, temperature=1.0)
        shares = [(self._planned, part.of, share) for share in range(part.share + 1)]
        if (own := shares.pop()) not in self._rollouts:
            slots = slots_of(layout.strategy) if layout.strategy.slots else None
            self._rollouts[own] = RolloutInParts(self._model_role(call), layout, slots, decoding_options(layout))
        rollout = self._rollouts[own]
        if part.handed_on[0] == 0 and part.migrate:
            every = [self._rollouts[share] for share in shares]
            left = [each.leave(part.migrate, noise, temperature) for each in every if each.num_left]
            rollout.arrive(params, left, sampling, part.together)
        elif part.handed_on[0] == 0:
            rollout.begin(params, prompts, sampling, part.first_sequence, part.together)
        if part.handed_on[0] == 0:
            self._reports[own] = PartReports(part.of, rollout.num_left * layout.strategy.num_row_shards, self.say)
        outputs, progress = rollout.hand_on(count, noise, temperature) if count else ([], None)
        if outputs is None:
            outputs = _absent_outputs(call, layout)
        if progress is not None:
            describe = functools.partial(self._reports[own].after, f"part {part.number + 1} of {part.count}")
            self._watch(progress, part.of, call.kind, layout, ready.dispatched, inputs=ready.arrays, describe=describe)
        self._bound_in_flight(outputs, layout)
        return outputs

    def _add_gradient(self, ready: "_Ready") -> Leaves:
        """Dispatches a part of a train call before the last."""
        call, layout = ready.call, ready.layout
        assert call.part is not None and call.role is not None
        started, so_far = time.perf_counter(), self._so_far.pop(call.part.of, (None, None))
        params, received = self.weights.for_gradients(call.role, layout)
        if received is not None:
            self._watch_reallocation(call.role, params, layout, started, received)
        adapted = self._adapted(call, layout)
        program = self._program(ready)
        if program is not None:
            _, sums = self._so_far[call.part.of] = program(so_far, params, ready.arrays, adapted)
            self._watch(sums, call.whole_name, call.kind, layout, ready.dispatched, inputs=ready.arrays)
            self._bound_in_flight(jax.tree.leaves(sums), layout)
        return []

    def _call_fused(self, calls: tuple[Call, Call], plan: Plan, values: Values, step: int) -> dict[str, Leaves]:
        """Dispatches two train calls as one pipeline."""
        ready = [self._ready(call, plan, values, step) for call in calls]
        arguments = [self._arguments(each) for each in ready]
        programs: list[Any] = [self._program(each) for each in ready]
        results: Sequence[Any] = (None, None)
        ends: Mapping[Layout, Outputs] = {}
        if programs[0] is not None:  # both have the same devices
            key = ("fuse", *(each.key for each in ready))
            if key not in self._programs:
                order = fused_order(plan[calls[0]], plan[calls[1]], plan.schedules)
                self._programs[key] = FusedTraining(programs[0], programs[1], order)
            fused: Any = self._programs[key]
            results = fused(*arguments)
            ends, fused.ends = fused.ends, {}
        outputs = tuple(self._trained(*each) for each in zip(ready, arguments, results, strict=True))
        name = " + ".join(call.plan_name for call in calls)
        for where, array in ends.items():
            self._watch(array, name, "train", where, ready[0].dispatched, inputs=ready[0].arrays + ready[1].arrays)
        self._bound_in_flight(outputs[1], ready[1].layout)
        return dict(zip((call.name for call in calls), outputs, strict=True))

    def _ready(self, call: Call, plan: Plan, values: Values, step: int) -> "_Ready":
        """A call with its inputs on its devices."""
        placement = plan[call]
        layout = Layout.over(placement.devices, placement.strategy)
        refs, settings, rebuild = split_args(call.args)
        for ref in refs:
            lookup(values, ref, self._wait)  # waits for Python functions
        dispatched = time.perf_counter()
        assert self._hand_overs is not None
        arrays = self._hand_overs.inputs(call, refs, functools.partial(lookup, values))
        avals = tuple((ref.shape, ref.dtype, ref.has_rows) for ref in refs)
        if call.kind == "generate":
            settings = _without_temperature(settings)
        part = call.part if call.kind == "train" else None
        key = (call.role, call.method, call.function, layout, settings, avals, part and call.writes is not None)
        noise = np.array([self._seed, step, zlib.crc32(call.whole_name.encode())], np.uint32)
        return _Ready(call, layout, rebuild, [ref.has_rows for ref in refs], arrays, key, noise, dispatched)

    def _arguments(self, ready: "_Ready") -> tuple[Any, ...]:
        """The arguments of a call's program. The store gives up the weights of a train call."""
        call = ready.call
        if call.kind == "compute":
            return (ready.arrays,)
        if call.kind == "train":
            params, optimizer, adapted = self._weights_to_train(call, ready.layout)
            third = ready.noise if call.part is None else self._so_far.pop(call.part.of, None)
            return params, optimizer, third, ready.arrays, adapted
        params = self._weights_to_read(call, ready.layout)
        if call.kind == "generate":
            _, sampling = call.args
            assert isinstance(sampling, Sampling)
            return params, ready.noise, np.float32(sampling.temperature), ready.arrays
        return params, ready.arrays

    def _weights_to_train(self, call: Call, layout: Layout) -> tuple[Params, OptimizerState, Params | None]:
        """Master weights, the optimizer's state, and the base weights of adapters."""
        assert call.role is not None
        started = time.perf_counter()
        params, optimizer, received = self.weights.take_for_training(call.role, layout)
        if received is not None:
            self._watch_reallocation(call.role, optimizer.num_updates, layout, started, received)
        return params, optimizer, self._adapted(call, layout)

    def _adapted(self, call: Call, layout: Layout) -> Params | None:
        """The base weights of adapters that a call trains."""
        assert call.role is not None
        started = time.perf_counter()
        adapted, received = self.weights.adapted_by(call.role, layout)
        if received is not None:
            self._watch_reallocation(call.role, adapted, layout, started, received)
        return adapted

    def _weights_to_read(self, call: Call, layout: Layout) -> Params:
        """Weights in the compute precision."""
        assert call.role is not None
        started = time.perf_counter()
        role = self._model_role(call)
        part, inside = call.part, None
        if part is not None and part.migrate:
            inside = self._rollouts[self._planned, part.of, 0].layout
        params, received = self.weights.for_inference(
            call.role, layout, layers=form_read(role, call.kind, layout),
            version=self._version_read(call),
            merged=reads_merged(role.model, role.lora, call.num_tokens), inside=inside,
        )  # fmt: skip
        if received is not None:
            self._watch_reallocation(call.role, params, layout, started, received)
        return params

    def _trained(self, ready: "_Ready", arguments: tuple[Any, ...], results: Any) -> Leaves:
        """The metrics of a train call, whose new weights go back to the store."""
        call, layout = ready.call, ready.layout
        assert call.role is not None
        params, optimizer, *_ = arguments
        if results is None:
            metrics = _absent_outputs(call, layout)
        else:
            params, optimizer, metrics = results
        self.weights.trained(call.role, layout, params, optimizer)
        return jax.tree.leaves(metrics)

    def _pin_before(self, train: Call, graph: CallGraph, plan: Plan) -> None:
        """Keeps the version of weights that a train call is about to change, for calls that still read it: of this
        step, or, if they are stale, of later ones."""
        if train.writes is None:
            return
        later, per_step = graph.calls[graph.calls.index(train) :], _trains(graph, train.weights)
        for call in graph.calls:
            if call.weights != train.weights or call.kind == "train":
                continue
            in_later_steps = call.stale and (train.reads - call.reads) % per_step == 0
            if not in_later_steps and not (call in later and call.reads == train.reads):
                continue
            assert call.role is not None
            layout, started = Layout.over(plan[call].devices, plan[call].strategy), time.perf_counter()
            layers = form_read(self._model_role(call), call.kind, layout)
            kept, received = self.weights.pin(call.role, layout, layers=layers)
            if received is not None:
                self._watch_reallocation(call.role, kept, layout, started, received)

    def _own(self, call: Call) -> str:
        """The set of weights of which a call reads some version."""
        assert call.role is not None
        return self.weights.read_by(call.role)[0]

    def _steps_behind(self, call: Call, graph: CallGraph) -> int:
        """The steps by which the weights that a stale call reads are older than current ones."""
        current = self._first_versions[self._own(call)] + call.reads + call.stale * (n := _trains(graph, call.weights))
        return (current - self._version_read(call)) // n if n else 0

    def _version_read(self, call: Call) -> int:
        """The version that a call reads: in the first steps of a run, a stale one reads the oldest that there is."""
        name = self._own(call)
        return max(self._first_versions[name] + call.reads, self.weights.oldest(name))

    def _offload_after(self, call: Call, later: Sequence[Call], plan: Plan) -> None:
        """Offloads roles whose weights no later call of the step reads, and starts to reload those of the next call.

        Reloading starts one call ahead, while the call just dispatched runs: earlier would fill the devices again.
        """
        used, still_used = self._sets(call), {name for other in later for name in self._sets(other)}
        for role in plan.offload:
            own = set(self.weights.owned_by(role))
            if own & used and not own & still_used:
                self._offload(role)
        following = next((other for other in later if other.kind != "host"), None)
        if following is not None:
            self._reload(following, plan)

    def _offload(self, role: str) -> None:
        started = time.perf_counter()
        moving = self.weights.offload(role)
        if moving is not None:
            self._watch_memory(moving, f"{role}.offload", self.weights.home(self.weights.owned_by(role)[0]), started)

    def _sets(self, call: Call) -> set[str]:
        """The sets of weights that a call reads."""
        is_model = isinstance(self._roles.get(call.role or ""), ModelRole)
        return set(self.weights.read_by(call.role)) if is_model and call.role else set()

    def _reload(self, call: Call, plan: Plan) -> None:
        """Starts to reload the weights of a call's role from host memory, if they rest there."""
        resting = {name for role in plan.offload for name in self.weights.owned_by(role)}
        if call.role is None or not resting & self._sets(call):
            return
        placement, started = plan[call], time.perf_counter()
        layout = Layout.over(placement.devices, placement.strategy)
        layers = form_read(self._model_role(call), call.kind, layout)
        moving = self.weights.prefetch(call.role, layout, layers=layers, for_training=call.kind == "train")
        if moving is not None:
            self._watch_memory(moving, f"{call.role}.reload", layout, started)

    def _watch_memory(self, moving: Any, name: str, layout: Layout, started: float) -> None:
        size = sum(shard.data.nbytes for x in jax.tree.leaves(moving) for shard in x.addressable_shards)
        # reloaded arrays may be donated to a train call; resting ones never are
        self._watch(moving, name, "offload", layout, started, copy=not rests_on_host(moving), bytes=size)

    def _model_role(self, call: Call) -> ModelRole:
        assert call.role is not None
        role = self._roles[call.role]
        assert isinstance(role, ModelRole)
        return role

    def _program(self, ready: "_Ready") -> Program | None:
        """The program of a call; None in a process that owns none of its devices."""
        layout = ready.layout
        if not is_here(layout.mesh):
            return None
        if ready.key not in self._programs:
            self._programs[ready.key] = self._new_program(ready)
            if layout.own_devices != layout.devices:
                self._in_flight.wait()  # so that no device is late
                meet(layout.mesh.devices.flat)
        return self._programs[ready.key]

    def _new_program(self, ready: "_Ready") -> Program:
        call, layout = ready.call, ready.layout
        split = splits_rows(call, layout.strategy)
        if call.kind == "compute":
            assert call.function is not None
            rows_out = tuple(ref.has_rows and split for ref in call.output_refs)
            make = functools.partial(compute_program, call.function, ready.rebuild, rows_out, layout)
            return shared_program(call, (rows_out, *ready.key[1:]), make)
        role = self._model_role(call)
        if call.kind == "train" and call.part is not None:
            updates, given = call.writes is not None, (role, ready.rebuild, ready.has_rows, layout)
            make = functools.partial(training_part_program, *given, updates=updates)
            return shared_program(call, (call.kind, role, *ready.key[1:]), make)
        is_long = call.kind == "generate" and call.args[1].max_new_tokens > self._part_tokens
        part_tokens = self._part_tokens if is_long else 0
        make = functools.partial(
            model_program, call.kind, call.method, role, ready.rebuild, ready.has_rows, layout, uneven=not split,
            part_tokens=part_tokens,
        )  # fmt: skip
        if layout.is_pipelined or part_tokens:  # it keeps what belongs to a run
            return make()
        read = role if call.kind == "train" or call.method == "loss" else role.model
        return shared_program(call, (call.kind, read, split, *ready.key[1:]), make)

    def _wait(self, name: str) -> contextlib.AbstractContextManager[None]:
        phase, number = self._at
        return self._timeline.host(name, kind=WAIT, step=number, phase=phase)

    def _watch(
        self,
        arrays: Any,
        name: str,
        kind: str,
        layout: Layout,
        dispatched: float,
        *,
        inputs: Sequence[Any] = (),
        bytes: int = 0,
        copy: bool = False,
        describe: Callable[[list[Any]], str] | None = None,
    ) -> None:
        """Records in the timeline when arrays are complete. `copy`: they may be donated before that."""
        if not layout.own_devices:
            return
        # of weights over pipeline stages, one on a stage of this process
        here = (x for x in jax.tree.leaves(arrays) if not isinstance(x, jax.Array) or x.sharding.addressable_devices)
        first = list(itertools.islice(here, 1))
        phase, number = self._at
        event = Event(name, kind, layout.own_devices, number, dispatched, dispatched, phase, bytes)
        self._watcher.watch(event, [x + 0 for x in first] if copy else first, inputs=inputs, describe=describe)

    def _part_watcher(self, ready: "_Ready") -> Callable[[Progress], None]:
        """Records the parts of a generation, and tells how far it is."""
        call = ready.call
        num_sequences = call.args[0].tokens.shape[0] * call.args[1].num_samples
        reports = PartReports(call.plan_name, num_sequences, self.say)

        def watch(part: Progress) -> None:
            self._watch(
                part.progress, call.plan_name, call.kind, ready.layout, ready.dispatched, inputs=ready.arrays,
                describe=functools.partial(reports.after, part.name),
            )  # fmt: skip

        return watch

    def _watch_reallocation(self, role: str, arrays: Any, layout: Layout, started: float, received: int) -> None:
        self._watch(arrays, f"{role}.reallocate", "reallocate", layout, started, copy=True, bytes=received)

    def _bound_in_flight(self, outputs: Leaves, layout: Layout) -> None:
        if layout.own_devices:
            self._in_flight.add(outputs)
        self._watcher.check()

    def _wait_for(self, outputs: Leaves) -> None:
        """Waits for a call in flight."""
        with self._wait("calls in flight"):
            jax.block_until_ready(outputs)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A call with its inputs on its devices."""

    call: Call
    layout: Layout
    rebuild: Rebuild
    has_rows: list[bool]
    """One flag for each array among its arguments."""
    arrays: Leaves
    key: tuple[Hashable, ...]
    """The key of its program: the role and its method, or the function; the layout, the settings, and the shapes."""
    noise: np.ndarray
    dispatched: float


def _trains(graph: CallGraph, weights: str | None) -> int:
    """The versions that a step makes of a set of weights."""
    return sum(call.weights == weights and call.writes is not None for call in graph.calls)


def _absent_outputs(call: Call, layout: Layout) -> Leaves:
    """The outputs, without shards, of a call that runs in other processes."""
    split = splits_rows(call, layout.strategy)
    if call.kind in ("infer", "train") and layout.is_pipelined:
        layout = layout.stage(layout.strategy.num_stages - 1)
    return [absent(ref, layout.rows if ref.has_rows and split else layout.replicated) for ref in call.output_refs]


def _without_temperature(settings: Any) -> Hashable:
    """The settings of a call of `generate` without the temperature, which is an argument of its program."""
    structure, values = settings
    return structure, tuple(dataclasses.replace(x, temperature=1.0) if isinstance(x, Sampling) else x for x in values)
