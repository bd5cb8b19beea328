"""A cluster as the planner sees it: kinds of devices, nodes, links, and the sets of devices that a call may have.

Devices are numbers, node after node, group after group, as in `jax.devices()`. Rates are those of one device, and of
links in one direction, in bytes a second, seconds, and operations a second (a multiplication and an addition are two).
Numbers have their provenance in `source`; `cluster_text` reads them.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

from jaxrlhf.require import require_fields, require_not_negative, require_positive, require_positive_fraction

MAX_NODES = 1024
"""The most nodes of a cluster. A call may use any consecutive nodes, which are half a million choices."""
MEASURED = "measured on"
"""The beginning of the provenance of numbers that were measured on devices of their kind."""
AS_GIVEN = "as given"
"""The provenance of numbers without a `source`."""


@dataclasses.dataclass(frozen=True)
class PeakFlops:
    """Peak operations a second of matrix products, by the type of their factors."""

    float32: float
    tf32: float
    """float32 rounded to TF32, as JAX multiplies float32 on GPUs unless asked for more precision."""
    bfloat16: float
    source: str = AS_GIVEN

    def __post_init__(self) -> None:
        require_fields(self, require_positive, "float32", "tf32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Memory:
    """A device's own memory; of virtual devices, that of their host, which they share."""

    bytes: int
    bandwidth: float
    usable: float
    """The fraction that a plan may fill."""
    source: str = AS_GIVEN

    def __post_init__(self) -> None:
        require_fields(self, require_positive, "bytes", "bandwidth")
        require_fields(self, require_positive_fraction, "usable")


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection between two devices of a node."""

    bandwidth: float
    source: str = AS_GIVEN

    def __post_init__(self) -> None:
        require_fields(self, require_positive, "bandwidth")


@dataclasses.dataclass(frozen=True)
class Network:
    """The connection of a node to the others, which its devices share."""

    bandwidth: float
    """Bytes a second of the whole node, in one direction."""
    adapters: int = 1
    """Network adapters, which divide the bandwidth: a device that communicates alone has that of one adapter."""
    source: str = AS_GIVEN

    def __post_init__(self) -> None:
        require_fields(self, require_positive, "bandwidth", "adapters")

    def shared_by(self, num_devices: int) -> float:
        """Bytes a second of each device when `num_devices` of a node communicate."""
        return self.bandwidth / self.adapters * min(1.0, self.adapters / num_devices)


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties of an absent GPU that XLA's compiler needs."""

    capability: str
    """CUDA's compute capability: '8.0'."""
    cores: int
    """Streaming multiprocessors."""
    float_units_per_core: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block: int
    """Bytes, the most that a kernel may request."""
    l2_bytes: int
    accelerated: bool = False
    """True if it has instructions of this capability only, as Hopper's sm_90a has."""
    source: str = AS_GIVEN

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+\.\d+", self.capability):
            raise ValueError(
                f"capability: must be two numbers with a point between. Got {self.capability!r}. Write '8.0' in quotes."
            )
        numbers = [name for name, value in vars(self).items() if type(value) in (int, float)]
        require_fields(self, require_positive, *numbers)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The fractions of its peak rates that a device reaches, and the overheads of kernels, programs and collectives."""

    matmul_efficiency: float
    """Fraction of peak operations a second that large matrix products reach."""
    half_dim: float
    """Width of a weight at which matrix products with it are half as fast as large ones."""
    memory_efficiency: float
    """Fraction of the memory bandwidth that kernels reach."""
    link_efficiency: float
    """Fraction of a link's bandwidth that large collectives within a node reach."""
    network_efficiency: float
    """The same between nodes."""
    kernel_seconds: float
    """Seconds between the starts of two kernels, at the least."""
    graph_kernel_seconds: float
    """The same inside a captured CUDA graph, as the body of a loop may be."""
    dispatch_seconds: float
    """Seconds a program takes to start, before its first kernel."""
    step_seconds: float
    """Seconds that a device waits for the host in every decoding step; 0 if the loop runs on the device."""
    collective_seconds: float
    """Seconds of the smallest collective within a node, per doubling of the devices that take part."""
    network_collective_seconds: float
    """Seconds of the smallest collective between nodes, per doubling of the nodes that take part."""
    host_bandwidth: float
    """Bytes a second between a device and pinned memory of its host, when all devices of the node copy."""
    host_seconds: float = 0.0
    """Seconds that host-side work (arguments, layouts, dispatch) adds to a call per device, if these are virtual
    ones of the host's CPU."""
    source: str = AS_GIVEN

    @property
    def is_measured(self) -> bool:
        """True if they were measured on such a device, by `python -m jaxrlhf.calibrate`."""
        return self.source.startswith(MEASURED)

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.name != "source"]
        require_fields(self, require_not_negative, *names)
        require_fields(self, require_positive_fraction, *(name for name in names if name.endswith("_efficiency")))
        require_fields(self, require_positive, "host_bandwidth")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device, with its link and its network in nodes of this kind."""

    name: str
    """Its name in descriptions of clusters: 'a100-80g'."""
    names: tuple[str, ...]
    """Its names in JAX: 'NVIDIA A100-SXM4-80GB'."""
    peak_flops: PeakFlops
    memory: Memory
    link: Link
    """The link between devices of a node."""
    network: Network
    """The default network of its nodes."""
    coefficients: Coefficients
    target: Target | None = None
    """None for a CPU."""

    @property
    def capacity(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory.bytes * self.memory.usable)

    def matmul_flops(self, dtype: str) -> float:
        """Operations a second that large products of matrices in 'float32' or 'bfloat16' reach."""
        peaks = {"float32": self.peak_flops.tf32, "bfloat16": self.peak_flops.bfloat16}
        return peaks[dtype] * self.coefficients.matmul_efficiency


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """Nodes that are all alike."""

    nodes: int
    devices_per_node: int
    kind: Kind
    network: Network
    host_bytes: int | None = None
    """Bytes of a node's own memory that a plan may fill with weights at rest. None if not known."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if not 1 <= getattr(self, name) <= MAX_NODES:
                raise ValueError(f"{name}: must be 1 to {MAX_NODES}. Got {getattr(self, name)}.")

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}:{self.kind.name}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Groups of nodes, which all have equally many devices."""

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups: must not be empty. Got []. Describe at least one group of nodes.")
        sizes = [group.devices_per_node for group in self.groups]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"groups: their nodes must have as many devices as one another. Got {sizes}. Describe a larger node as "
                f"several of {math.gcd(*sizes)}."
            )
        if self.num_nodes > MAX_NODES:
            raise ValueError(f"groups: must have at most {MAX_NODES} nodes together. Got {self.num_nodes}.")

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        return self.groups[0].devices_per_node

    def group_of(self, device: int) -> NodeGroup:
        """The group of the node that a device is in. Raises ValueError if there is no such device."""
        if not 0 <= device < self.num_devices:
            raise ValueError(f"device: must be one of 0 to {self.num_devices - 1}. Got {device}.")
        ends = itertools.accumulate(group.num_devices for group in self.groups)
        return next(group for group, end in zip(self.groups, ends, strict=True) if device < end)

    def kind_of(self, device: int) -> Kind:
        return self.group_of(device).kind

    @property
    def devices_per_memory(self) -> int:
        """Devices that share one memory: all of a node where they are virtual devices of its CPU."""
        return self.devices_per_node if all(group.kind.target is None for group in self.groups) else 1

    def capacity(self, device: int) -> int:
        """Bytes that a plan may fill of a device's memory, or of the one that it shares."""
        return self.kind_of(device).capacity

    def slowest(self, devices: range) -> Kind:
        """The kind of some devices with the fewest operations a second; among equals, the one with slower memory."""
        kinds = {group.kind for group in self._groups_of(devices)}
        return min(kinds, key=lambda kind: (kind.peak_flops.bfloat16, kind.memory.bandwidth, kind.name))

    def network(self, devices: range) -> Network:
        """The slowest of the networks of the nodes that some devices are in."""
        networks = {group.network for group in self._groups_of(devices)}
        return min(networks, key=lambda network: network.bandwidth)

    def _groups_of(self, devices: range) -> list[NodeGroup]:
        return [self.group_of(device) for device in (*devices[:: self.devices_per_node], devices[-1])]

    def with_kinds(self, change: Callable[[Kind], Kind]) -> "Cluster":
        """The same of other kinds of devices."""
        return Cluster(tuple(dataclasses.replace(group, kind=change(group.kind)) for group in self.groups))

    @functools.cached_property
    def meshes(self) -> tuple[range, ...]:
        """All sets of devices that a call may have: a part of a node that is a power of two, divides it and starts at a
        multiple of itself; or consecutive whole nodes. From the smallest on, then from the first device on.

        Reference:
            Mei et al. 2024, arXiv:2406.14088, section 4 (ReaL).
        """
        per_node = self.devices_per_node
        parts = [2**i for i in range(per_node.bit_length()) if 2**i < per_node and per_node % 2**i == 0]
        within = [range(first, first + size) for size in parts for first in range(0, self.num_devices, size)]
        whole = [
            range(node * per_node, (node + nodes) * per_node)
            for nodes in range(1, self.num_nodes + 1)
            for node in range(self.num_nodes - nodes + 1)
        ]
        return (*within, *whole)
