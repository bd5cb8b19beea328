"""A pipeline at work: the instructions of a schedule, one after another, each a program on the devices of its stage.

Python walks through one order of all instructions in which every one comes after what it needs, and dispatches each
without waiting for it, so that devices run the schedule beside one another. A stage output goes straight to the
devices of the next stage. In several processes all walk through the same order; each dispatches what runs on devices of
its own, and takes part in the hand-overs from and to them.
"""

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jaxrlhf.programs.arrays import Abstract, Outputs, Program, with_shardings
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.schedules.instructions import Instruction
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here, meet

MAX_IN_FLIGHT = 8
"""A CPU backend deadlocks with some dozens of programs that communicate."""


class InFlight:
    """Programs that are dispatched and not awaited, of which there are no more than `MAX_IN_FLIGHT`.

    Args:
        wait_for: Waits until an output of a program is there.
    """

    def __init__(self, wait_for: Callable[[Any], None]) -> None:
        self._wait_for = wait_for
        self._outputs: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Outputs of another program, of which the first stands for all. May wait for an older one."""
        self._outputs.append(jax.tree.leaves(outputs)[:1])
        if len(self._outputs) > MAX_IN_FLIGHT:
            self._wait_for(self._outputs.popleft())

    def wait(self) -> None:
        """Waits for all."""
        while self._outputs:
            self._wait_for(self._outputs.popleft())


def settle(arrays: Any) -> None:
    """Waits until arrays are there on a CPU backend; on others every device has a queue that takes them all."""
    if jax.default_backend() == "cpu":
        for x in jax.tree.leaves(arrays):
            if not x.is_deleted():  # donated to a later program, which is waited for in its turn
                jax.block_until_ready(x)


class PipeRunner(Protocol):
    """Carries out the instructions of one pipe."""

    def forward(self, micro_batch: int, stage: int) -> Outputs:
        """Runs one instruction, and returns outputs that are ready when it is done."""

    def backward(self, micro_batch: int, stage: int) -> Outputs:
        """Runs one instruction, and returns outputs that are ready when it is done."""


class Pipelined:
    """A call that runs as a pipeline."""

    ends: Mapping[Layout, Outputs] = MappingProxyType({})
    """After a call: the stages with devices of this process, and of each an output that is ready when it is done."""


def carry_out(order: Iterable[Instruction], runners: Mapping[int, PipeRunner]) -> None:
    """Every instruction in its turn. `order`: as `topological_order` gives it. `runners`: number of the pipe -> what
    carries out its instructions."""
    in_flight = InFlight(settle)
    for instruction in order:
        runner = runners[instruction.pipe]
        step = runner.forward if instruction.forward else runner.backward
        in_flight.add(step(instruction.micro_batch, instruction.stage))
    in_flight.wait()


class StageProgram:
    """A program on the devices of a stage, or of all, compiled for the shapes of its first call.

    Args:
        function: Of pytrees of arrays.
        shardings: Those of its outputs, as `jax.jit` takes them.
        donated: Positions of the arguments that it may overwrite.
        elsewhere: From the arguments to the outputs, in a process that owns none of the devices. By default they are
            absent arrays.
    """

    def __init__(
        self,
        function: Program,
        shardings: PyTree,
        mesh: Mesh,
        *,
        donated: tuple[int, ...] = (),
        elsewhere: Program | None = None,
    ) -> None:
        self._jitted = jax.jit(function, out_shardings=shardings, donate_argnums=donated)
        self._function, self._shardings, self.mesh = function, shardings, mesh
        self._elsewhere = elsewhere
        self._compiled: jax.stages.Compiled | None = None
        self._absent: Outputs = None

    def compile(self, *arguments: Any, options: dict[str, Any] | None = None) -> None:
        """Compiles it where it runs. `arguments`: arrays, or shapes with dtypes and shardings. `options`: of XLA."""
        if self.is_new:
            self._compiled = self._jitted.lower(*arguments).compile(compiler_options=options)

    @property
    def is_new(self) -> bool:
        """True where it runs in this process and has not been compiled."""
        return self._compiled is None and is_here(self.mesh)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program, after `compile` or the first call."""
        assert self._compiled is not None
        return self._compiled

    @property
    def outputs(self) -> Abstract:
        """Shapes, dtypes and shardings of its outputs, once it is compiled."""
        return with_shardings(self.compiled.out_info, self.compiled.output_shardings)

    def __call__(self, *arguments: Any) -> Any:
        """Outputs; in a process that owns none of the devices they are absent."""
        if not is_here(self.mesh):
            if self._elsewhere is not None:
                return self._elsewhere(*arguments)
            if self._absent is None:
                self._absent = absent_like(jax.eval_shape(self._function, *arguments), self._shardings)
            return self._absent
        if self._compiled is None:
            self.compile(*arguments)
            meet(self.mesh.devices.flat)
        return self.compiled(*arguments)


def absent_like(avals: Abstract, shardings: PyTree) -> Outputs:
    """Arrays in other processes, for shardings that may stand for whole subtrees: where one is None, None."""

    def make(sharding: Any, tree: Any) -> Any:
        return None if sharding is None else jax.tree.map(lambda x: absent(x, sharding), tree)

    return jax.tree.map(make, shardings, avals, is_leaf=lambda x: x is None)


def compile_all(jobs: Sequence[Callable[[], None]], mesh: Mesh) -> None:
    """Compiles side by side, and waits until all processes of a mesh have."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        for done in [threads.submit(job) for job in jobs]:
            done.result()
    meet(mesh.devices.flat)


def hand_over(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Moves a stage output to the devices of another stage. Every process that owns a device of either calls it."""
    devices = x.sharding.device_set | sharding.device_set
    if len({device.process_index for device in devices}) > 1:
        return reallocate(x, sharding)
    return jax.device_put(x, sharding) if is_here(sharding) else absent(x, sharding)
