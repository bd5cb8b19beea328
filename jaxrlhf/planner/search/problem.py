"""The input of the search for a plan: the calls of a step, the ways to run each of them, and the costs of each way.

It is plain data, made once by `choices`, so that thousands of plans a second can be compared. A plan is one number for
each call: the index of its choice.

Every device has a memory of its own, or all devices of a node share one, as the virtual devices of a CPU do. What a
memory holds under a plan is

    what rests there: of every set of weights, `resting` of the call that it rests with, in that call's memories; of the
    weights that adapters adapt, `base` of every call that reads them with adapters
    + for the call that takes most:  its `working`
                                     + `working` of one call that may run beside it, on other devices of the memory
                                     + the copies alive meanwhile: `copy` of every reader of a trained set, in the
                                       reader's memories, from the reader's place in the step to the train call's;
                                       less `shared_with_training` where both have one layout.

A set that is trained rests with its first train call. One that never changes rests with each of its readers, once for
every different layout, whether they read it as it is or with adapters.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrlhf.call_graph import CallKind
from jaxrlhf.models.params import LayerForm
from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.sharding.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a call. Seconds are those of its slowest device, bytes those of its fullest memory."""

    first: int
    """Position of its first device."""
    end: int
    """Position after its last one: devices are consecutive."""
    strategy: Strategy
    seconds: float
    resting: int = 0
    """Bytes that stay in each memory between calls: master weights, optimizer state and gradients of a set that the
    call trains; weights of a set that never changes. 0 where they rest in host memory."""
    working: int = 0
    """Bytes in each memory while it runs: activations, keys and values, logits, and what it loads from host memory."""
    copy: int = 0
    """Bytes in each memory of its own copy of weights that another call trains; alive until that call."""
    shared_with_training: int = 0
    """Bytes of that copy which are the trained weights themselves, where they are trained in its layout: in float32."""
    base: int = 0
    """Bytes in each memory of the weights that its adapters adapt, which stay there between calls."""
    load: float = 0.0
    """Seconds of bringing its weights from host memory before it, on its devices."""
    unload: float = 0.0
    """Seconds of bringing them back to host memory after it."""
    offloaded: bool = False
    """True if its set rests in host memory."""
    layers: LayerForm = "list"
    """The form of the layers that it reads: other forms of the same weights are other arrays."""

    @property
    def devices(self) -> range:
        return range(self.first, self.end)

    @property
    def busy(self) -> float:
        """Seconds in which its devices work for it."""
        return self.load + self.seconds + self.unload


@dataclasses.dataclass(frozen=True)
class CallChoices:
    """A call of a step and the ways to run it."""

    name: str
    """`actor.generate`."""
    kind: CallKind
    role: str
    weights: str
    """The set of weights that it reads."""
    trains: bool
    needs: tuple[str, ...]
    """Calls of the same step whose outputs it takes, by way of `compute` and host calls too, or whose weights it waits
    to be made in the same step, or which must have read the weights before it trains them."""
    choices: tuple[Choice, ...]
    base: str = ""
    """The set of weights that its adapters adapt, which never changes. Empty if it has no adapters."""
    stale: int = 0
    """The steps by which the weights that it reads are older than the current ones."""


@dataclasses.dataclass(frozen=True)
class PairSeconds:
    """Seconds for every choice of one call and every choice of another. Each distinct row and column is stored once:
    layouts of weights do not depend on micro-batches, and those of outputs depend on devices alone."""

    values: np.ndarray
    """[row, column]"""
    row: np.ndarray
    """Choice of the one call -> its row."""
    column: np.ndarray
    """Choice of the other call -> its column."""

    @classmethod
    def of(cls, seconds: np.ndarray) -> "PairSeconds":
        """From seconds [choices of the one, choices of the other]."""
        values, row = np.unique(seconds, axis=0, return_inverse=True)
        columns, column = np.unique(values, axis=1, return_inverse=True)
        return cls(columns, row.reshape(-1), column.reshape(-1))

    def __getitem__(self, pair: tuple[int, int]) -> float:
        return float(self.values[self.row[pair[0]], self.column[pair[1]]])

    @property
    def shape(self) -> tuple[int, int]:
        """(choices of the one, choices of the other)"""
        return len(self.row), len(self.column)

    def of_choices(self, ones: Sequence[int], others: Sequence[int]) -> "PairSeconds":
        """The same for some of the choices."""
        rows, row = np.unique(self.row[list(ones)], return_inverse=True)
        columns, column = np.unique(self.column[list(others)], return_inverse=True)
        return PairSeconds(self.values[np.ix_(rows, columns)], row.reshape(-1), column.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that a search needs to know. Calls are in the order of the step.

    A call that reads a set which is trained waits, in the next iteration, for the last train call of that set before
    it; a train call waits for all readers of the version before.
    """

    calls: tuple[CallChoices, ...]
    num_devices: int
    devices_per_node: int
    capacity: tuple[int, ...]
    """Memory -> bytes that a plan may fill."""
    reallocations: Mapping[tuple[int, int], PairSeconds]
    """(train call, reader of its set) -> seconds of bringing new weights from where they were trained to where they are
    read. 0 if they are there already."""
    transfers: Mapping[tuple[int, int], PairSeconds]
    """(call, call that needs its outputs) -> seconds of bringing them there."""
    tokens: int
    """Tokens that one iteration works on: prompts and responses."""
    one_at_a_time: bool = False
    """Devices share one processor, so that nothing runs at the same time as anything else."""
    devices_per_memory: int = 1
    """Consecutive devices that share one memory."""

    def memories(self, devices: range) -> range:
        """The memories of some devices."""
        return range(devices.start // self.devices_per_memory, -(-devices.stop // self.devices_per_memory))

    @property
    def size(self) -> float:
        """The number of plans."""
        return float(np.prod([float(len(call.choices)) for call in self.calls]))

    def with_choices(self, kept: Sequence[Sequence[int]]) -> "Problem":
        """The same with some of the choices of every call."""
        return dataclasses.replace(
            self,
            calls=tuple(
                dataclasses.replace(call, choices=tuple(call.choices[k] for k in some))
                for call, some in zip(self.calls, kept, strict=True)
            ),
            reallocations={(i, j): t.of_choices(kept[i], kept[j]) for (i, j), t in self.reallocations.items()},
            transfers={(i, j): t.of_choices(kept[i], kept[j]) for (i, j), t in self.transfers.items()},
        )

    def require_choices(self) -> None:
        """Checks that every call has a choice. Raises PlanError if a call has none."""
        for call in self.calls:
            if not call.choices:
                raise PlanError(
                    f"plan: {call.name}: must have at least one way to run. Got none on {self.num_devices} devices. "
                    "Use more devices, or batches and degrees that divide each other."
                )
