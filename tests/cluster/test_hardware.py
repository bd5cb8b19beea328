"""What a cluster is: its devices, links and meshes, and how it is read from text and from files."""

import dataclasses
import re

import pytest

from jaxrlhf.cluster import cluster_text
from jaxrlhf.cluster.cluster_text import kinds, local_cluster, read_cluster
from jaxrlhf.cluster.hardware import Network
from jaxrlhf.cluster.host_memory import for_arrays
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import MemoryLimits


def test_devices_nodes_and_kinds_of_a_mixed_cluster():
    cluster = read_cluster("2x8:h100+4x8:a100-80g")
    assert (cluster.num_devices, cluster.num_nodes, cluster.devices_per_node) == (48, 6, 8)
    assert [cluster.kind_of(device).name for device in (0, 15, 16, 47)] == ["h100", "h100", "a100-80g", "a100-80g"]
    assert cluster.slowest(range(16)).name == "h100"
    assert cluster.slowest(range(8, 24)).name == "a100-80g"
    assert cluster.slowest(range(14, 17)).name == "a100-80g"
    assert read_cluster("1x8:h200+1x8:h100").slowest(range(16)).name == "h100"  # as fast, but for its memory
    assert str(cluster) == "2x8:h100+4x8:a100-80g"
    for device in (-1, 48):
        with pytest.raises(ValueError, match=f"device: must be one of 0 to 47. Got {device}."):
            cluster.kind_of(device)


def test_a_larger_node_counts_as_several_of_the_smaller_size():
    cluster = read_cluster("4x8:a100-80g+2x4:v100-32g")
    assert str(cluster) == "8x4:a100-80g+2x4:v100-32g" and cluster.num_devices == 40
    assert [cluster.kind_of(device).name for device in (0, 31, 32, 39)] == ["a100-80g"] * 2 + ["v100-32g"] * 2
    whole, parts = kinds()["a100-80g"].network, cluster.groups[0].network
    assert (parts.bandwidth, parts.adapters) == (whole.bandwidth / 2, whole.adapters // 2)
    assert parts.shared_by(4) == whole.shared_by(8) and cluster.groups[1].network == kinds()["v100-32g"].network


def test_the_network_between_nodes_is_that_of_the_slower_end():
    cluster = read_cluster("2x8:h100+4x8:a100-80g")
    assert cluster.network(range(16)).bandwidth == 400e9
    assert cluster.network(range(8, 24)).bandwidth == 200e9


def test_a_network_is_shared_by_the_devices_of_a_node():
    eight, one = Network(200e9, adapters=8), Network(25e9)
    assert [eight.shared_by(n) for n in (1, 4, 8)] == [25e9, 25e9, 25e9]
    assert [one.shared_by(n) for n in (1, 4, 8)] == [25e9, 25e9 / 4, 25e9 / 8]


def test_capacity_is_a_fraction_of_memory():
    kind = kinds()["a100-80g"]
    assert read_cluster("8x8:a100-80g").capacity(63) == int(0.9 * kind.memory.bytes) < kind.memory.bytes


def test_meshes_are_aligned_parts_of_a_node_or_whole_nodes():
    assert read_cluster("2x4:h100").meshes == (
        *(range(i, i + 1) for i in range(8)),
        *(range(i, i + 2) for i in (0, 2, 4, 6)),
        range(4),
        range(4, 8),
        range(8),
    )
    six = read_cluster("1x6:h100").meshes  # 4 of 6 would leave 2 that no part fills
    assert [len(mesh) for mesh in six] == [1] * 6 + [2] * 3 + [6]


def test_every_number_has_its_provenance():
    for kind in kinds().values():
        parts = [kind.peak_flops, kind.memory, kind.link, kind.network, kind.coefficients]
        for part in parts + ([kind.target] if kind.target else []):
            assert len(part.source) >= len("assumed")
            assert part.source != "as given"


def test_kinds_that_come_with_the_package():
    assert list(kinds()) == ["a100-80g", "a100-40g", "h100", "h200", "h800", "v100-32g", "cpu"]
    assert kinds()["a100-80g"].peak_flops.bfloat16 == 312e12
    assert kinds()["a100-40g"].peak_flops == kinds()["a100-80g"].peak_flops
    assert kinds()["h200"].memory.bandwidth == 4.8e12
    assert kinds()["a100-80g"].matmul_flops("float32") == pytest.approx(156e12 * 0.7)


def test_coefficients_can_be_replaced():
    coefficients = kinds()["h100"].coefficients
    assert dataclasses.replace(coefficients, matmul_efficiency=0.5).matmul_efficiency == 0.5
    with pytest.raises(ValueError, match=re.escape("matmul_efficiency: must lie in (0, 1]. Got 1.5.")):
        dataclasses.replace(coefficients, matmul_efficiency=1.5)


@pytest.fixture
def available(monkeypatch) -> int:
    """Bytes of this machine's memory that a run may take."""
    monkeypatch.setattr(cluster_text, "host_room", lambda limit=None: min(limit or 16 * 10**9, 16 * 10**9))
    return 16 * 10**9


def test_virtual_devices_share_the_processor(monkeypatch, available):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    one, eight = read_cluster("cpu"), read_cluster("cpu:8")
    assert (one.num_devices, eight.num_devices, eight.num_nodes) == (1, 8, 1)
    core = kinds()["cpu"].peak_flops.float32
    assert one.kind_of(0).peak_flops.float32 == 4 * core
    assert eight.kind_of(0).peak_flops.float32 == core / 2
    assert read_cluster("1x8:cpu") == eight


def test_virtual_devices_share_what_is_available_beside_the_process(monkeypatch, available):
    one, eight = read_cluster("cpu"), read_cluster("cpu:8")
    assert one.capacity(0) == eight.capacity(7) == for_arrays(available)
    assert (one.devices_per_memory, eight.devices_per_memory) == (1, 8)
    assert read_cluster("2x8:h100").devices_per_memory == 1
    limited = read_cluster("cpu:8", MemoryLimits(device="1 GB", host="9.5 GB"))
    assert limited.capacity(0) == for_arrays(9_500_000_000)
    monkeypatch.setattr(cluster_text, "host_room", lambda limit: None)
    assert read_cluster("cpu:8").capacity(0) == int(8 * kinds()["cpu"].memory.bytes * kinds()["cpu"].memory.usable)


def test_the_memory_of_gpus_that_are_here(monkeypatch, available):
    """What JAX has for arrays of each, if that is less than of its kind is usual, and no more than the config says."""
    monkeypatch.setattr(cluster_text.mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(cluster_text.mesh, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    usual = kinds()["h100"].capacity
    for told, limits, expected in (
        (None, None, usual), (10**12, None, usual), (50 * 10**9, None, 50 * 10**9),
        (50 * 10**9, MemoryLimits(device="20 GB", host="5 GiB"), 20 * 10**9),
    ):  # fmt: skip
        monkeypatch.setattr(cluster_text.mesh, "memory_bytes", lambda told=told: told)
        cluster = local_cluster(limits)
        assert cluster.capacity(0) == expected and cluster.devices_per_memory == 1
        assert cluster.groups[0].host_bytes == (available if limits is None else 5 * 2**30)


def test_local_devices(monkeypatch, available):
    assert local_cluster() == read_cluster("local") == read_cluster("cpu:8")  # as conftest sets JAX up
    monkeypatch.setattr(cluster_text.mesh, "platform", lambda: "gpu")
    monkeypatch.setattr(cluster_text.mesh, "num_devices", lambda: 16)
    monkeypatch.setattr(cluster_text.mesh, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    group = dataclasses.replace(read_cluster("2x8:h100").groups[0], host_bytes=available)
    assert local_cluster().groups == (group,)
    monkeypatch.setattr(cluster_text.mesh, "device_kind", lambda: "NVIDIA T4")
    message = "cluster: local: must be devices of a known kind. Got 'NVIDIA T4'. Known: "
    with pytest.raises(ConfigError, match=re.escape(message)):
        local_cluster()
    assert local_cluster(any_kind=True).kind_of(0).names == ("NVIDIA T4",)


def test_a_file_with_kinds_and_networks_of_its_own(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
        kinds:
          ours:
            base: h100
            memory: {usable: 0.9}
            coefficients: {matmul_efficiency: 0.5, source: measured}
        groups:
          - {nodes: 2, kind: ours, network: {bandwidth: 25e9}}
          - {nodes: 1, kind: a100-80g, devices_per_node: 8}
        """
    )
    cluster = read_cluster(str(path))
    ours, h100 = cluster.kind_of(0), kinds()["h100"]
    assert cluster.capacity(0) == int(0.9 * h100.memory.bytes)
    assert ours.memory.source == f"usable: as given; the rest: {h100.memory.source}"
    assert ours.coefficients == dataclasses.replace(h100.coefficients, matmul_efficiency=0.5, source="measured")
    assert cluster.network(range(16)).bandwidth == 25e9
    assert cluster.kind_of(16) == kinds()["a100-80g"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8:a100", "cluster: '8x8:a100': unknown kind of device 'a100'. Known: a100-80g, a100-40g, h100, h200, "),
        ("8x8:a100", "Did you mean 'a100-80g'?"),
        ("8x8:h10", "Did you mean 'h100'?"),
        ("8xh100", "cluster: must be groups of nodes. Got '8xh100'. Write nodes x devices : kind, as 8x8:a100-80g"),
        ("lcal", "Did you mean 'local'?"),
        ("", "cluster: must be groups of nodes. Got ''."),
        ("1x8:h100+", "cluster: must be groups of nodes. Got '1x8:h100+'."),
        ("0x8:h100", "cluster: '0x8:h100': nodes: must be 1 to 1024. Got 0."),
        ("cpu:0", "cluster: 'cpu:0': devices_per_node: must be 1 to 1024. Got 0."),
        ("1000x8:h100+25x8:h100", "groups: must have at most 1024 nodes together. Got 1025."),
        ("2x8:h100+2x3:a100-80g", "must have as many devices as one another. Got [8, 3]. Describe a larger node as "),
        ("1x8:h100+1x4:cpu", "must have as many devices as one another. Got [8, 4]. Describe a larger node as "),
        ("nowhere.yaml", "nowhere.yaml: no such file. Give the path of one that describes a cluster."),
    ],
)
def test_texts_that_are_no_cluster(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_cluster(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("groups: []", "groups: must not be empty. Got []."),
        ("groups: [{nodes: 1}]", "groups[0].kind: required. Got nothing."),
        ("groups: [{nodes: 1, kind: h100, gpus: 8}]", "groups[0]: unknown key 'gpus'."),
        ("groups: [{nodes: 1, kind: h1000}]", "unknown kind of device 'h1000'."),
        ("kinds: {a: 3}\ngroups: [{nodes: 1, kind: h100}]", "kinds.a: expected a mapping. Got 3."),
        ("kinds: {a: {base: b}}\ngroups: [{nodes: 1, kind: a}]", "kinds.a.base: unknown kind of device 'b'."),
        ("kinds: {a: {}}\ngroups: [{nodes: 1, kind: a}]", "kinds.a.peak_flops: required. Got nothing."),
        (
            "kinds: {a: {base: h100, memory: {usable: most}}}\ngroups: [{nodes: 1, kind: a}]",
            "kinds.a.memory.usable: expected a number",
        ),
        (
            "kinds: {a: {base: h100, memory: {usable: 2.0}}}\ngroups: [{nodes: 1, kind: a}]",
            "kinds.a.memory.usable: must lie in (0, 1]. Got 2.0.",
        ),
        (
            "kinds: {a: {base: h100, target: {capability: '9'}}}\ngroups: [{nodes: 1, kind: a}]",
            "kinds.a.target.capability: must be two numbers with a point between. Got '9'. Write '8.0' in quotes.",
        ),
    ],
)
def test_files_that_are_no_cluster(tmp_path, content, message):
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_cluster(str(path))
    assert str(path) in str(caught.value)


def test_a_file_of_another_version(tmp_path, monkeypatch):
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "hardware.yaml").write_text("version: 2\nkinds: {}")
    monkeypatch.setattr(cluster_text.importlib.resources, "files", lambda package: tmp_path)
    kinds.cache_clear()
    try:
        with pytest.raises(ConfigError, match=re.escape("hardware.yaml: version: must be 1. Got 2.")):
            kinds()
    finally:
        kinds.cache_clear()
