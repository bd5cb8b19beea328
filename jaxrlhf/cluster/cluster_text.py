"""From a user's description of a cluster to the cluster.

8x8:a100-80g                  8 nodes of 8 A100s
2x8:h100+4x8:a100-80g         nodes of two kinds
4x8:a100-80g+2x4:v100-32g     nodes of unlike sizes: each larger one counts as several of the smaller size
cpu:8                         this machine's processor, as 8 virtual devices, which share its memory
local                         the devices that JAX shows
path/to/cluster.yaml          groups of nodes, with kinds and networks of the user's own:

    kinds:
      our-h100:
        base: h100
        memory: {usable: 0.9}
    groups:
      - {nodes: 2, kind: our-h100, network: {bandwidth: 25e9}}
"""

import dataclasses
import functools
import importlib.resources
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax.core import FrozenDict

from jaxrlhf.brief import brief, cut, did_you_mean
from jaxrlhf.cluster.hardware import AS_GIVEN, Cluster, Kind, Memory, Network, NodeGroup, PeakFlops
from jaxrlhf.cluster.host_memory import UNLIMITED, for_arrays, host_room
from jaxrlhf.config.reading import ConfigError, Tree, build, merge, read_yaml, to_tree
from jaxrlhf.config.schema import MemoryLimits
from jaxrlhf.sharding import mesh

VERSION = 1
"""The version of the file of kinds that comes with the package."""
CPU, LOCAL = "cpu", "local"
_USUAL_DEVICES_PER_NODE = 8
_GROUP = re.compile(r"(?P<nodes>\d+)x(?P<devices>\d+):(?P<kind>[^\s:+]+)")
_PROCESSOR = re.compile(rf"{CPU}(:(?P<devices>\d+))?")
_FORMS = "Write nodes x devices : kind, as 8x8:a100-80g or 2x8:h100+4x8:a100-80g; or cpu:8; or local; or a .yaml file."


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group as a file describes it."""

    nodes: int
    kind: str
    devices_per_node: int = _USUAL_DEVICES_PER_NODE
    network: Network | None = None
    """None means that of the kind."""


@dataclasses.dataclass(frozen=True)
class _Description:
    """A file that describes a cluster."""

    groups: tuple[_Group, ...]
    kinds: Mapping[str, Any] = FrozenDict()
    """Kinds of the user's own, by name, for `_kinds_of`."""


def read_cluster(text: str, limits: MemoryLimits | None = None) -> Cluster:
    """The cluster that a text describes, as at the top of this file. If it is this machine, memory has limits. Raises
    ConfigError if the text or the file is not valid, or names an unknown kind."""
    if Path(text).suffix in (".yaml", ".yml"):
        return _from_file(text)
    if text == LOCAL:
        return local_cluster(limits)
    if match := _PROCESSOR.fullmatch(text):
        groups = [_Group(1, CPU, int(match["devices"] or 1))]
    else:
        matches = [_GROUP.fullmatch(part.strip()) for part in text.split("+")]
        groups = [_Group(int(m["nodes"]), m["kind"], int(m["devices"])) for m in matches if m]
        if len(groups) < len(matches):
            hint = did_you_mean(text, [LOCAL, CPU, *(f"1x8:{name}" for name in kinds())])
            raise ConfigError(f"cluster: must be groups of nodes. Got {brief(text)}. {_FORMS}{hint}")
    return _cluster(groups, kinds(), where=f"cluster: {brief(text)}", limits=limits)


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """The kinds that come with the package, by name."""
    path = Path(str(importlib.resources.files("jaxrlhf"))) / "cluster" / "hardware.yaml"
    tree = read_yaml(path)
    version = tree.get("version")
    if version != VERSION:
        raise ConfigError(f"{path.name}: version: must be {VERSION}. Got {version!r}. Reinstall jaxrlhf.")
    return _kinds_of(tree["kinds"], {}, where=path.name)


def local_cluster(limits: MemoryLimits | None = None, *, any_kind: bool = False) -> Cluster:
    """The devices that JAX shows, a node for each process, with the memory that is available. Those of an unknown kind
    raise ConfigError or, if any kind will do, are taken as H100s with the memory that JAX reports."""
    name = CPU if mesh.platform() == "cpu" else mesh.device_kind()
    by_name = {known: kind for kind in kinds().values() for known in kind.names}
    if name not in by_name and any_kind:
        memory = dataclasses.replace(kinds()["h100"].memory, bytes=mesh.memory_bytes() or UNLIMITED, usable=1.0)
        by_name[name] = dataclasses.replace(kinds()["h100"], name=name, names=(name,), memory=memory)
    if name not in by_name:
        raise ConfigError(
            f"cluster: local: must be devices of a known kind. Got {brief(name)}. Known: {', '.join(by_name)}. "
            f"Describe yours in a .yaml file, with a kind that has one of {', '.join(kinds())} as its base."
        )
    devices_per_node = mesh.devices_per_process()
    nodes = mesh.num_devices() // devices_per_node
    kind, limits = by_name[name], limits or MemoryLimits()
    groups = [_Group(nodes, kind.name, devices_per_node)]
    cluster = _cluster(groups, {kind.name: kind}, where="cluster: local", limits=limits)
    group = cluster.groups[0]
    if group.kind.target is None:
        return cluster
    own = [size for size in (mesh.memory_bytes(), limits.device_bytes) if size is not None]
    kind = dataclasses.replace(group.kind, memory=_at_most(group.kind.memory, own))
    return Cluster((dataclasses.replace(group, kind=kind, host_bytes=host_room(limits.host_bytes)),))


def _at_most(memory: Memory, limits: Iterable[int]) -> Memory:
    """A memory of which plans fill no more than the least of some limits."""
    capacity = int(memory.bytes * memory.usable)
    least = min([capacity, *limits])
    return memory if least == capacity else dataclasses.replace(memory, bytes=least, usable=1.0)


def _shared_processor(core: Kind, num_devices: int, limit: int | None) -> Kind:
    """A virtual device of this machine's processor, whose cores and memory, up to a limit, `num_devices` of them share.
    Plans fill the memory that the process itself leaves."""
    share = (os.cpu_count() or 1) / num_devices
    peaks, memory, room = core.peak_flops, core.memory, host_room(limit)
    if room is None:
        memory = dataclasses.replace(memory, bytes=memory.bytes * num_devices)
    else:
        memory = dataclasses.replace(memory, bytes=for_arrays(room), usable=1.0)
    return dataclasses.replace(
        core,
        peak_flops=PeakFlops(peaks.float32 * share, peaks.tf32 * share, peaks.bfloat16 * share, peaks.source),
        memory=dataclasses.replace(memory, bandwidth=memory.bandwidth * share),
    )


def _from_file(text: str) -> Cluster:
    path = Path(text)
    if not os.path.isfile(path):  # a Path would raise where the name is too long for any file
        raise ConfigError(f"{cut(text)}: no such file. Give the path of one that describes a cluster. {_FORMS}")
    description = build(_Description, read_yaml(path), where=text)
    known = {**kinds(), **_kinds_of(description.kinds, kinds(), where=text)}
    return _cluster(description.groups, known, where=text)


def _cluster(
    groups: Sequence[_Group], known: Mapping[str, Kind], *, where: str, limits: MemoryLimits | None = None
) -> Cluster:
    made = []
    try:
        for group in groups:
            if group.kind not in known:
                raise ConfigError(_unknown(where, group.kind, known))
            kind = known[group.kind]
            if kind.target is None and group.devices_per_node > 0:
                kind = _shared_processor(kind, group.devices_per_node, limits.host_bytes if limits else None)
            made.append(NodeGroup(group.nodes, group.devices_per_node, kind, group.network or kind.network))
        return Cluster(tuple(_alike(made)))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _alike(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Groups with as many devices a node as one another, if GPUs can be divided so: a larger node counts as several,
    each with its part of the network, as where a process has a part of a node's devices."""
    size = math.gcd(*(group.devices_per_node for group in groups))
    if size == 1 or any(group.kind.target is None for group in groups):
        return list(groups)
    return [group if group.devices_per_node == size else _divided(group, size) for group in groups]


def _divided(group: NodeGroup, size: int) -> NodeGroup:
    """The same devices in nodes of a smaller size."""
    parts, network, host = group.devices_per_node // size, group.network, group.host_bytes
    network = dataclasses.replace(
        network, bandwidth=network.bandwidth / parts, adapters=max(1, network.adapters // parts)
    )
    return dataclasses.replace(
        group, nodes=group.nodes * parts, devices_per_node=size, network=network,
        host_bytes=None if host is None else host // parts,
    )  # fmt: skip


def _kinds_of(trees: Mapping[str, Any], known: Mapping[str, Kind], *, where: str) -> Mapping[str, Kind]:
    """Kinds from plain data, by name. A `base` is a known kind or an earlier one."""
    whole: dict[str, Tree] = {name: to_tree(kind) for name, kind in known.items()}
    found = {}
    for name, tree in trees.items():
        place = f"kinds.{name}"
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{where}: {place}: expected a mapping. Got {brief(tree)}. Write `base: h100`, say.")
        own = dict(tree)
        base = own.pop("base", None)
        if base is not None:
            if base not in whole:
                raise ConfigError(_unknown(f"{where}: {place}.base", base, whole))
            own = _over(whole[base], own)
        found[name] = build(Kind, {"names": [], **own, "name": name}, where=where, path=place)
        whole[name] = to_tree(found[name])
    return found


def _over(base: Tree, own: Tree) -> Tree:
    """The tree of a kind with a base. Sections with numbers of both have the source of each."""
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            own[key] = {"source": f"{', '.join(value)}: {AS_GIVEN}; the rest: {base[key]['source']}", **value}
    return merge(base, own)


def _unknown(where: str, name: object, known: Mapping[str, object]) -> str:
    alike = [other for other in known if isinstance(name, str) and other.startswith(name.lower())]
    suggestion = did_you_mean(name.lower(), alike or known) if isinstance(name, str) else ""
    return (
        f"{where}: unknown kind of device {brief(name)}. Known: {', '.join(known)}; or describe yours in a .yaml file."
        f"{suggestion}"
    )
