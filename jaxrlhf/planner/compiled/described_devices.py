"""Devices that are only described: GPUs that are not there, for XLA to compile programs for.

XLA compiles for a GPU from its description, if JAX's CUDA plugin is installed (the extra `planner`), on a machine
without a GPU and without CUDA. Where the plugin is missing, virtual devices of the CPU stand in: products and most
collectives are the same, but bfloat16 computations are widened to float32, and fusions are those of a CPU.
"""

import dataclasses
import functools
import importlib.util
import pkgutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from jaxrlhf.cluster.hardware import Kind, Target
from jaxrlhf.sharding.mesh import first_virtual_devices, skip_cuda_check_without_gpu
from jaxrlhf.xla_flags import known_flags

NO_COMPILER = (
    "no compiler for GPUs: counted on virtual devices of the processor, with bytes of bfloat16 corrected. Install "
    "jaxrlhf[planner], on Linux"
)
NO_CUDNN = "attention compiled as matrix products: cuDNN's cannot be lowered here"
_CUDNN_VERSION = 90800
_CUDNN_CAPABILITY = (8, 0)
"""The least compute capability for which cuDNN has attention in one kernel for bfloat16."""


@dataclasses.dataclass(frozen=True)
class DescribedDevices:
    """Devices to lower and compile programs for."""

    devices: tuple[Any, ...]
    """JAX devices."""
    options: Mapping[str, Any]
    """Options for `lowered.compile`."""
    has_cudnn: bool = False
    """True if attention can be lowered to cuDNN's. If not, `attention` of a model must be `xla`."""
    stands_in: bool = False
    """True if they are virtual devices of the CPU in place of GPUs."""
    notes: tuple[str, ...] = ()
    """Caveats of counts made with them."""

    @property
    def is_gpu(self) -> bool:
        return self.devices[0].platform == "gpu"


def has_gpu_compiler() -> bool:
    """True if JAX's CUDA plugin is installed. Does not load it."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders))


@functools.cache
def described_devices(kind: Kind, count: int) -> DescribedDevices:
    """`count` devices of a kind, in one node. Raises ValueError if JAX runs already with fewer virtual devices.

    Loads the CUDA plugin, if the kind is a GPU. A process that has loaded it should not be one that trains.
    """
    if kind.target is None:
        return DescribedDevices(first_virtual_devices(count), known_flags(_PROCESSOR_OPTIONS))
    text = target_config(kind, kind.target)
    topology = f"1x1x{count}"  # partitions x hosts x GPUs of each
    skip_cuda_check_without_gpu()
    try:
        described = topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology)
    except NotImplementedError:
        virtual, options = first_virtual_devices(count), known_flags(_PROCESSOR_OPTIONS)
        return DescribedDevices(virtual, options, stands_in=True, notes=(NO_COMPILER,))
    major, minor = map(int, kind.target.capability.split("."))
    has_cudnn = (major, minor) >= _CUDNN_CAPABILITY and _assume_cudnn()
    return DescribedDevices(
        tuple(described.devices),
        known_flags({"xla_gpu_cuda_data_dir": _toolkit().name, **_FASTER, **_ONE_CUBLAS_CALL_EACH}),
        has_cudnn=has_cudnn,
        notes=() if has_cudnn else (NO_CUDNN,),
    )


_FASTER = {"xla_backend_optimization_level": 0}
"""No optimization of the code generated from HLO, which never runs."""
_ONE_CUBLAS_CALL_EACH = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""On a GPU, XLA finds by autotuning which kernels multiply fastest, cuBLAS's or its own, into which it fuses their
inputs. Here it would have to guess, and may fail. Bytes agree with those of its own kernels to about 2 %."""
_PROCESSOR_OPTIONS = {
    **_FASTER,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": True,  # as by default; without them a scatter is a loop over rows
}


def target_config(kind: Kind, target: Target) -> str:
    """XLA's description of a GPU: a `GpuTargetConfigProto` as text."""
    major, minor = target.capability.split(".")
    extension = "ACCELERATED_FEATURES" if target.accelerated else "NONE"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {target.shared_memory_per_block}
  shared_memory_per_core: {target.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: {target.float_units_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(kind.memory.bandwidth)}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {kind.memory.bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN_VERSION // 10_000} minor: {_CUDNN_VERSION // 100 % 100} }}
device_description_str: "{(kind.names or (kind.name,))[0]}"
"""


@functools.cache
def _toolkit() -> tempfile.TemporaryDirectory[str]:
    """A folder in place of the CUDA toolkit, deleted when the process ends, with an assembler that does nothing and a
    library without functions.

    Programs for GPUs that are not there never run, so that only their HLO matters, which is the same with the real
    toolkit.
    """
    made = tempfile.TemporaryDirectory(prefix="jaxrlhf-cuda-")
    folder = Path(made.name)
    assembler = folder / "bin" / "ptxas"
    assembler.parent.mkdir()
    assembler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.0"; exit; fi\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    assembler.chmod(0o755)
    library = folder / "nvvm" / "libdevice" / "libdevice.10.bc"
    library.parent.mkdir(parents=True)
    library.write_text("; LLVM reads modules as text too\n")
    return made


def _assume_cudnn() -> bool:
    """Let JAX lower attention to cuDNN's where cuDNN is not installed; False if this version of JAX cannot be told."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as lowering

        find = lowering.check_cudnn_version
    except (ImportError, AttributeError):
        return False
    try:
        find()
    except RuntimeError:
        lowering.check_cudnn_version = lambda: _CUDNN_VERSION
    return True
