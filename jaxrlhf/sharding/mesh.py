"""Devices and meshes. Only this file asks JAX for its devices, or sets how many virtual ones it has."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import AxisType, Mesh

from jaxrlhf.sharding.axes import MESH_AXES
from jaxrlhf.sharding.strategy import Strategy

_NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device files, one of which exists where a GPU does: on a machine, in a container, and in WSL."""


def use_virtual_cpu_devices(count: int, *, or_more: bool = False) -> None:
    """Makes the CPU of this host appear as `count` devices. Must come before anything else uses JAX. `or_more`: if JAX
    runs already, accepts more of them too. Raises ValueError if JAX already runs with other devices."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:  # JAX runs already, possibly with these devices
        there, platform = jax.local_device_count(), jax.default_backend()
        if platform != "cpu" or (there < count if or_more else there != count):
            same = f", or use devices: cpu:{there}" if platform == "cpu" else ""
            raise ValueError(
                f"devices: must be those that JAX runs on already, {there} {platform} device{'s' if there > 1 else ''}."
                f" Got {count} virtual CPU devices. Start in a fresh process{same}."
            ) from error


def first_virtual_devices(count: int) -> tuple[Any, ...]:
    """The first `count` virtual devices of this host's CPU. Raises ValueError if JAX runs with fewer."""
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"devices: JAX runs with {len(devices)} virtual CPU devices already, and {count} are asked for. Start in a "
            "fresh process."
        )
    return tuple(devices[:count])


def use_processor_alone() -> None:
    """Makes JAX use the CPU alone. Has no effect if JAX runs already."""
    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def devices_left_open() -> Iterator[None]:
    """What the block does with JAX decides nothing about its devices: if JAX did not run before, it does not run after
    the block either, and a run can choose its devices. Meanwhile it runs on the CPU. Arrays of the block are lost."""
    if is_running():
        yield
        return
    name = "jax_platforms"
    before: str | None = getattr(jax.config, name)
    use_processor_alone()
    try:
        yield
    finally:
        if is_running():
            clear_backends()
            build_mesh.cache_clear()  # of devices that are gone
            mesh_positions.cache_clear()
        jax.config.update(name, before)


def is_running() -> bool:
    """True once JAX has chosen its devices."""
    name = "jax_num_cpu_devices"
    before: int = getattr(jax.config, name)
    try:
        jax.config.update(name, 2 if before == 1 else 1)  # which JAX refuses while it runs
    except RuntimeError:
        return True
    jax.config.update(name, before)
    return False


def skip_cuda_check_without_gpu() -> None:
    """Without an NVIDIA GPU, keeps JAX's CUDA plugin from checking for NVIDIA's libraries, which are not needed there:
    the extras `planner` and `test` bring the plugin for its compiler, and JAX would print that they are missing.
    Must come before anything else uses JAX."""
    if not any(Path(device).exists() for device in _NVIDIA_DEVICES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def num_devices() -> int:
    """The number of devices that JAX sees."""
    return len(jax.devices())


def device_kind() -> str:
    """JAX's name for the kind of the devices: 'cpu', 'NVIDIA H100 80GB HBM3' ..."""
    return jax.devices()[0].device_kind


def kinds_of_processes() -> list[str]:
    """The kind of devices of each process, as JAX names it."""
    kinds = {device.process_index: device.device_kind for device in jax.devices()}
    return [kinds[process] for process in sorted(kinds)]


def memory_bytes() -> int | None:
    """The least memory for arrays, in bytes, of the devices of this process; None if JAX does not tell, as on CPUs."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return min(limits) if len(limits) == len(stats) else None


def platform() -> str:
    """'cpu', 'gpu' or 'tpu'."""
    return jax.default_backend()


def processor() -> Any:
    """The CPU of the host as a device, beside accelerators; None if JAX does not have it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.cache
def build_mesh(devices: tuple[int, ...], strategy: Strategy) -> Mesh:
    """A mesh over devices, given by their positions in `jax.devices()`."""
    everything = jax.devices()
    return mesh_over([everything[i] for i in devices], strategy)


def mesh_over(devices: Sequence[Any], strategy: Strategy) -> Mesh:
    """A mesh over JAX devices, real or described ones."""
    assert len(devices) == strategy.num_devices, (devices, strategy)
    shape = (strategy.pipeline, strategy.data, strategy.fsdp, strategy.tensor)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@functools.cache
def mesh_positions(mesh: Mesh, process: int | None = None) -> tuple[int, ...]:
    """Positions in `jax.devices()` of a mesh's devices, or of those that belong to one process.

    Unlike ids, positions have no gaps with several processes.
    """
    position = {device: i for i, device in enumerate(jax.devices())}
    return tuple(position[d] for d in mesh.devices.flat if process is None or d.process_index == process)


def own_positions() -> tuple[int, ...]:
    """Positions in `jax.devices()` of the devices of this process."""
    return mesh_positions(everywhere(), jax.process_index())


def own_ids() -> tuple[int, ...]:
    """Ids of the devices of this process, as used in JAX's shardings."""
    return tuple(device.id for device in jax.local_devices())


def everywhere() -> Mesh:
    """All devices of all processes, along one axis."""
    return Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))


def devices_per_process() -> int:
    """The number of devices of each process."""
    return jax.local_device_count()
