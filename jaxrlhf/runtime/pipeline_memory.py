"""What a train call over stages takes of each stage's devices: from its compiled programs and its schedule."""

import dataclasses
from typing import Any

import jax

from jaxrlhf.models.stages import pick, pick_virtual
from jaxrlhf.planner.schedules.instructions import Schedule
from jaxrlhf.runtime.optimizer import init_optimizer
from jaxrlhf.runtime.stage_programs import TrainPrograms
from jaxrlhf.runtime.weight_sets import set_of


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage."""

    weights: int
    """Master weights."""
    optimizer: int
    gradients: int
    """What the backwards add to."""
    kept: int
    """Of micro-batches between their forwards and backwards, at most at a time."""
    working: int
    """What the largest program of the stage takes beside what it is given."""

    @property
    def total(self) -> int:
        """With what there is most of at a time: what is kept and worked with, or, at the end of a mini-batch, the sum
        of the gradients beside those of the groups."""
        return self.weights + self.optimizer + self.gradients + max(self.kept + self.working, self.gradients)


def stage_memory(programs: TrainPrograms, schedule: Schedule) -> list[StageMemory]:
    """The memory of every stage, of programs that have been compiled in this process, for the first term of the loss.

    Kept of a micro-batch is what its forward gave for its backward and what the stage was given; of the last stage, the
    latter. Programs of the first data-parallel group are asked: all are alike.
    """
    role, layout = programs.role, programs.layout
    assert role.optimizer is not None
    config, abstract = role.optimizer, set_of(role).abstract(how="list")
    state = jax.eval_shape(lambda p: init_optimizer(config, p), abstract)
    memories = []
    for stage in range(layout.strategy.pipeline):
        virtual = range(stage, programs.num_stages, layout.strategy.pipeline)
        kept, working = _kept(programs, schedule, stage), max(_working(programs, v) for v in virtual)
        weights, optimizer = (
            sum(jax.tree.leaves(jax.tree.map(_bytes, *(pick(x, stage, programs.num_layers, layout) for x in both))))
            for both in ((abstract, programs.shardings), (state, programs.state_shardings))
        )
        gradients = sum(
            sum(jax.tree.leaves(jax.tree.map(lambda x, s: _bytes(x, s) * 4 // x.dtype.itemsize, *each)))
            for v in virtual
            for each in [
                [pick_virtual(x, v, programs.num_layers, programs.num_stages) for x in (abstract, programs.shardings)]
            ]
        )
        memories.append(StageMemory(weights, optimizer, gradients, kept, working))
    return memories


def _kept(programs: TrainPrograms, schedule: Schedule, node: int) -> int:
    """The most that a node keeps for backwards, as its instructions come."""
    now = most = 0
    for instruction in schedule.orders[node]:
        size = _kept_of(programs, instruction.stage)
        now += size if instruction.forward else -size
        most = max(most, now)
    return most


def _kept_of(programs: TrainPrograms, stage: int) -> int:
    """What a virtual stage keeps of a micro-batch."""
    given = _size(programs.forward(0, stage - 1, 0).outputs[0]) if stage else 0  # tokens are few bytes
    last = stage == programs.num_stages - 1
    return given + (0 if last else _size(programs.forward(0, stage, 0).outputs[1]))


def _working(programs: TrainPrograms, stage: int) -> int:
    if stage == programs.num_stages - 1:
        memory = [programs.last_backward(0, 0).memory]
    else:
        memory = [programs.forward(0, stage, 0).memory, programs.backward(0, stage, 0).memory]
    return max(m.temp_size_in_bytes for m in memory)


def _size(tree: Any) -> int:
    return sum(_bytes(x, x.sharding) for x in jax.tree.leaves(tree))


def _bytes(x: Any, sharding: Any) -> int:
    """On one device."""
    size = x.dtype.itemsize
    for dim in sharding.shard_shape(x.shape):
        size *= dim
    return size
