import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.mesh import build_mesh, device_kind, memory_bytes, num_devices, platform, use_virtual_cpu_devices
from jaxrlhf.sharding.strategy import Strategy


def test_devices_stand_in_the_order_given_with_tensor_fastest():
    mesh = build_mesh((7, 6, 5, 4, 3, 2, 1, 0), Strategy(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == ("pipeline", "data", "fsdp", "tensor")
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, [[[[7, 6], [5, 4]], [[3, 2], [1, 0]]]])


def test_some_of_the_devices():
    mesh = build_mesh((2, 5), Strategy(fsdp=2))
    assert mesh.devices.shape == (1, 1, 2, 1)
    assert [device.id for device in mesh.devices.flat] == [2, 5]


def test_axes_are_auto_so_that_constraints_work():
    mesh = build_mesh((0, 1), Strategy(data=2))
    assert mesh.axis_types == (AxisType.Auto,) * 4
    split = NamedSharding(mesh, PartitionSpec("data"))
    given = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, split))(np.arange(4))
    assert given.sharding.is_equivalent_to(split, 1)


def test_one_mesh_for_one_strategy():
    assert build_mesh((0, 1), Strategy(data=2)) is build_mesh((0, 1), Strategy(data=2))


def test_as_many_devices_as_the_strategy_has():
    with pytest.raises(AssertionError):
        build_mesh((0, 1, 2), Strategy(data=2))


def test_what_there_is():
    assert (num_devices(), platform(), device_kind(), memory_bytes()) == (8, "cpu", "cpu", None)


def test_virtual_devices_after_jax_is_up():
    use_virtual_cpu_devices(8)
    use_virtual_cpu_devices(2, or_more=True)
    for count in (2, 9):
        message = (
            f"devices: must be those that JAX runs on already, 8 cpu devices. Got {count} virtual CPU devices. "
            "Start in a fresh process, or use devices: cpu:8."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            use_virtual_cpu_devices(count)


def test_nvidia_libraries_are_checked_where_there_is_a_gpu(monkeypatch, tmp_path):
    for device, expected in ((tmp_path, {}), (tmp_path / "nvidia0", {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"})):
        monkeypatch.setattr(mesh, "_NVIDIA_DEVICES", (device,))
        monkeypatch.setattr(os, "environ", {})
        mesh.skip_cuda_check_without_gpu()
        assert os.environ == expected


def test_virtual_devices_in_a_fresh_process():
    code = (
        "from jaxrlhf.sharding.mesh import num_devices, platform, use_virtual_cpu_devices\n"
        "use_virtual_cpu_devices(3)\n"
        "print(num_devices(), platform())"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, timeout=120)
    assert output.split() == ["3", "cpu"]
