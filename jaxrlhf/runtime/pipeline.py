"""A pipeline at work: the instructions of a schedule, one after another, each a program on the devices of its stage.

Python walks through one order of all instructions in which every one comes after what it needs, and dispatches each
without waiting for it, so that devices run the schedule beside one another. What a stage hands on goes straight to the
devices of the next. In several processes all walk through the same order; each dispatches what runs on devices of its
own, and takes part in the hand-overs from and to them.
"""

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax

from jaxrlhf.planner.schedules.instructions import Instruction
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here, meet

MAX_IN_FLIGHT = 8
"""Instructions dispatched and not awaited on a CPU backend, which deadlocks with some dozens of programs that
communicate."""


class Worker(Protocol):
    """What carries out the instructions of one pipe."""

    def forward(self, micro_batch: int, stage: int) -> Any:
        """Runs one, and returns something that is there when it is done."""

    def backward(self, micro_batch: int, stage: int) -> Any:
        """Runs one, and returns something that is there when it is done."""


class Pipelined:
    """A call that runs as a pipeline."""

    ends: Mapping[Layout, Any] = MappingProxyType({})
    """After a call: the stages of which this process has devices, and what of each is there when it is done."""


def carry_out(order: Iterable[Instruction], workers: Mapping[int, Worker]) -> None:
    """Every instruction in its turn.

    Args:
        order: As `topological_order` gives it.
        workers: Number of the pipe -> what carries out its instructions.
    """
    flight = Flight()
    for instruction in order:
        worker = workers[instruction.pipe]
        step = worker.forward if instruction.forward else worker.backward
        flight.add(step(instruction.micro_batch, instruction.stage))
    flight.land()


class Flight:
    """Programs that are under way: no more than a backend takes."""

    def __init__(self) -> None:
        self._under_way: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Outputs of another one. May wait for an older one."""
        self._under_way.append(jax.tree.leaves(outputs)[:1])
        if len(self._under_way) > MAX_IN_FLIGHT:
            settle(self._under_way.popleft())

    def land(self) -> None:
        """May wait for all."""
        while self._under_way:
            settle(self._under_way.popleft())


def settle(arrays: Any) -> None:
    """Waits until arrays are there on a CPU backend, which takes few programs at a time; others have a queue for each
    device."""
    if jax.default_backend() == "cpu":
        for x in jax.tree.leaves(arrays):
            if not x.is_deleted():  # given on to a later program, which is waited for in its turn
                jax.block_until_ready(x)


class StageProgram:
    """A program on the devices of a stage, or of all, compiled for the shapes of its first call.

    Args:
        function: Of pytrees of arrays.
        shardings: Of its outputs, as `jax.jit` takes them.
        donated: Positions of the arguments that it may overwrite.
        elsewhere: From the arguments to the outputs, in a process that owns none of the devices. None: absent arrays.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        shardings: Any,
        mesh: Any,
        *,
        donated: tuple[int, ...] = (),
        elsewhere: Callable[..., Any] | None = None,
    ) -> None:
        self._jitted = jax.jit(function, out_shardings=shardings, donate_argnums=donated)
        self._function, self._shardings, self.mesh = function, shardings, mesh
        self._elsewhere = elsewhere
        self._compiled: Any = None
        self._absent: Any = None

    def compile(self, *arguments: Any) -> None:
        """Compiles it where it runs. Arguments are arrays, or shapes with dtypes and shardings."""
        if self.is_new:
            self._compiled = self._jitted.lower(*arguments).compile()

    @property
    def is_new(self) -> bool:
        """Whether it has not been compiled, and is to be."""
        return self._compiled is None and is_here(self.mesh)

    @property
    def outputs(self) -> Any:
        """Shapes, dtypes and shardings of its outputs, once it is compiled."""
        compiled: Any = self._compiled
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            compiled.out_info,
            compiled.output_shardings,
        )

    @property
    def text(self) -> str:
        """The compiled program, as HLO."""
        return self._compiled.as_text()

    @property
    def memory(self) -> Any:
        """What the compiler says of its memory on each device."""
        return self._compiled.memory_analysis()

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
        compiled: Any = self._compiled
        return compiled(*arguments)


def absent_like(avals: Any, shardings: Any) -> Any:
    """Arrays in other processes, for shardings that may stand for whole subtrees: where one is None, None."""

    def make(sharding: Any, tree: Any) -> Any:
        return None if sharding is None else jax.tree.map(lambda x: absent(x, sharding), tree)

    return jax.tree.map(make, shardings, avals, is_leaf=lambda x: x is None)


def compile_all(jobs: Sequence[Callable[[], None]], mesh: Any) -> None:
    """Compiles side by side, and waits until all processes of a mesh have."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        for done in [threads.submit(job) for job in jobs]:
            done.result()
    meet(mesh.devices.flat)


def hand_over(x: jax.Array, sharding: Any) -> jax.Array:
    """What a stage gave, on the devices of another. Every process that owns a device of either calls it."""
    devices = x.sharding.device_set | sharding.device_set
    if len({device.process_index for device in devices}) > 1:
        return reallocate(x, sharding)
    return jax.device_put(x, sharding) if is_here(sharding) else absent(x, sharding)
