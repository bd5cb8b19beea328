"""From devices to meshes. The only place that asks JAX which devices there are, or tells it how many to make up."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.sharding.axes import MESH_AXES
from jaxrlhf.sharding.strategy import Strategy

_NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""One of which is there where a GPU is: of a machine, a container, and WSL."""


def use_virtual_cpu_devices(count: int, *, or_more: bool = False) -> None:
    """Make this host's processor appear as `count` devices. Must come before anything else uses JAX.

    Args:
        or_more: Where JAX runs already, more of them do too.

    Raises:
        ValueError: JAX already runs with other devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:  # JAX is up already: good enough if it has these devices
        there, platform = jax.local_device_count(), jax.default_backend()
        if platform != "cpu" or (there < count if or_more else there != count):
            same = f", or use devices: cpu:{there}" if platform == "cpu" else ""
            raise ValueError(
                f"devices: must be those that JAX runs on already, {there} {platform} device{'s' if there > 1 else ''}."
                f" Got {count} virtual CPU devices. Start in a fresh process{same}."
            ) from error


def first_virtual_devices(count: int) -> tuple[Any, ...]:
    """So many virtual devices of this host's processor.

    Raises:
        ValueError: JAX runs with fewer.
    """
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"devices: JAX runs with {len(devices)} virtual CPU devices already, and {count} are asked for. Start in a "
            "fresh process."
        )
    return tuple(devices[:count])


def use_processor_alone() -> None:
    """Start no accelerator. Of no effect where JAX runs already."""
    jax.config.update("jax_platforms", "cpu")


def skip_cuda_check_without_gpu() -> None:
    """Where there is no NVIDIA GPU, keep JAX's CUDA plugin from checking for NVIDIA's libraries, which nobody needs
    there: the extras `planner` and `test` bring the plugin for its compiler, and JAX would print that they are missing.
    Must come before anything else uses JAX."""
    if not any(Path(device).exists() for device in _NVIDIA_DEVICES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def num_devices() -> int:
    """Devices that JAX sees."""
    return len(jax.devices())


def device_kind() -> str:
    """What the devices are, in JAX's words: 'cpu', 'NVIDIA H100 80GB HBM3' ..."""
    return jax.devices()[0].device_kind


def kinds_of_processes() -> list[str]:
    """Process -> what its devices are, in JAX's words."""
    kinds = {device.process_index: device.device_kind for device in jax.devices()}
    return [kinds[process] for process in sorted(kinds)]


def memory_bytes() -> int | None:
    """Bytes for arrays on the device of this process that has least. None: JAX does not say, as on a CPU."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return min(limits) if len(limits) == len(stats) else None


def platform() -> str:
    """'cpu', 'gpu' or 'tpu'."""
    return jax.default_backend()


def processor() -> Any:
    """The host's processor as a device, beside the accelerators; None where JAX does not have it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.cache
def build_mesh(devices: tuple[int, ...], strategy: Strategy) -> Mesh:
    """A mesh over some of JAX's devices, given by their positions in `jax.devices()`."""
    everything = jax.devices()
    return mesh_over([everything[i] for i in devices], strategy)


def mesh_over(devices: Sequence[Any], strategy: Strategy) -> Mesh:
    """A mesh over devices as JAX knows them, be they there or only described."""
    assert len(devices) == strategy.num_devices, (devices, strategy)
    shape = (strategy.pipeline, strategy.data, strategy.fsdp, strategy.tensor)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@functools.cache
def mesh_positions(mesh: Mesh, process: int | None = None) -> tuple[int, ...]:
    """Positions in `jax.devices()` of a mesh's devices, or of those of them that belong to one process.

    Ids would not do: with several processes, they have gaps.
    """
    position = {device: i for i, device in enumerate(jax.devices())}
    return tuple(position[d] for d in mesh.devices.flat if process is None or d.process_index == process)


def own_positions() -> tuple[int, ...]:
    """Positions in `jax.devices()` of the devices of this process."""
    return mesh_positions(everywhere(), jax.process_index())


def own_ids() -> tuple[int, ...]:
    """Ids of the devices of this process, by which JAX's shardings know them."""
    return tuple(device.id for device in jax.local_devices())


def everywhere() -> Mesh:
    """All devices of all processes, along one axis."""
    return Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))


def devices_per_process() -> int:
    """How many devices each process has."""
    return jax.local_device_count()
