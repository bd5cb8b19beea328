"""The processes of a run, one for each node: how they connect, and where they wait for one another.

Every process runs the same Python program over the same global arrays; in a process that owns none of its devices, an
array has no data. A compiled program runs in the processes that own devices of its mesh; the others skip it and hold
its outputs as `absent` arrays.
"""

import collections
import dataclasses
import os
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import multihost

MEETING_SECONDS = 1800
"""The longest that a process waits for the others before the first run of a common program."""
_COORDINATOR, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

_meetings: collections.Counter[frozenset[int]] = collections.Counter()
_met: set[tuple[tuple[Any, ...], Hashable]] = set()


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run meet, how many there are, and which one this is. None in all fields means that JAX
    detects them from SLURM, Open MPI or Kubernetes."""

    coordinator: str | None = None
    """host:port of the first process."""
    count: int | None = None
    index: int | None = None


def rendezvous_of(environment: Mapping[str, str], *, detect: bool) -> Rendezvous | None:
    """The rendezvous of JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or, with `detect`, the one that
    JAX detects; None for a run in this process alone. Raises ValueError if only some of the three are set, or their
    values are invalid."""
    there = {name: environment[name] for name in (_COORDINATOR, _COUNT, _INDEX) if environment.get(name)}
    if not there:
        return Rendezvous() if detect else None
    if detect and there.keys() <= {_COORDINATOR}:
        return Rendezvous()
    if missing := [name for name in (_COORDINATOR, _COUNT, _INDEX) if name not in there]:
        raise ValueError(
            f"{', '.join(there)}: the address, count and index of processes go together. Got no {', '.join(missing)}. "
            "Set all three, or none."
        )
    _, colon, port = there[_COORDINATOR].rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"{_COORDINATOR}: must be host:port, as in node0:1234. Got {there[_COORDINATOR]!r}.")
    if not there[_COUNT].isdecimal() or int(there[_COUNT]) < 1:
        raise ValueError(f"{_COUNT}: must be a number of processes, at least 1. Got {there[_COUNT]!r}.")
    if not there[_INDEX].isdecimal() or int(there[_INDEX]) >= int(there[_COUNT]):
        raise ValueError(
            f"{_INDEX}: must lie between 0 and {_COUNT} - 1. Got {there[_INDEX]!r} of {there[_COUNT]} processes."
        )
    return Rendezvous(there[_COORDINATOR], int(there[_COUNT]), int(there[_INDEX]))


def join(rendezvous: Rendezvous) -> None:
    """Connects the processes of a run. Must come before anything else uses JAX. Raises ValueError if JAX detects no
    cluster, or the others cannot be reached."""
    # it would swallow SIGTERM, which a run handles itself
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            rendezvous.coordinator,
            rendezvous.count,
            rendezvous.index,
            # under SLURM and Open MPI, JAX gives a process one device by default, not all of its node
            local_device_ids=_gpus_of_this_node() or None,
            # this is for a process that hangs; one that ends is noticed at once, by its connection
            heartbeat_timeout_seconds=100,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"processes: must be able to join the others. Got {type(error).__name__}: {str(error).splitlines()[0]} Set "
            f"{_COORDINATOR}, {_COUNT} and {_INDEX}, or start under SLURM, Open MPI or Kubernetes."
        ) from error


def is_here(where: Mesh | NamedSharding) -> bool:
    """Returns whether this process owns a device of a mesh, and so runs its programs."""
    mesh = where if isinstance(where, Mesh) else where.mesh
    assert isinstance(mesh, Mesh)
    index = jax.process_index()
    return any(device.process_index == index for device in mesh.devices.flat)


def absent(avals: Any, shardings: Any) -> Any:
    """Arrays on devices of other processes: shapes and dtypes without data. `avals`: pytree of objects with shape and
    dtype. `shardings`: one sharding for all, or a pytree of them with the structure of `avals`."""

    def make(aval: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, [], dtype=aval.dtype)

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda aval: make(aval, shardings), avals)
    return jax.tree.map(make, avals, shardings)


def meet(devices: Iterable[Any]) -> None:
    """Waits until every process that owns one of the devices has called this.

    All of them call it, in the same order, before the first run of a program over several processes: a CPU backend
    gives them 30 seconds to connect, and compilation may take longer in one of them than in another.
    """
    there = frozenset(device.process_index for device in devices)
    if len(there) == 1 or jax.process_index() not in there:
        return
    name = f"jaxrlhf/{'-'.join(map(str, sorted(there)))}/{_meetings[there]}"
    _meetings[there] += 1
    multihost.get_barrier_sync_fn(processes=set(there))(key=name, timeout_ms=1000 * MEETING_SECONDS)


def meet_first(devices: tuple[Any, ...], key: Hashable = None) -> None:
    """Calls `meet` the first time that it is called with these arguments."""
    if (devices, key) not in _met:
        _met.add((devices, key))
        meet(devices)


def _gpus_of_this_node() -> list[int]:
    """The local ids of this node's NVIDIA GPUs, before JAX is up."""
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return []  # JAX reads this variable
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(range(len([name for name in visible.split(",") if name.strip()])))
    return list(range(len(list(Path("/proc/driver/nvidia/gpus").glob("*")))))
