"""The devices of every call under a placement strategy.

    devices_of_calls(strategy, workload, cluster)       # call -> (range(0, 4),)

A set of weights has the fraction of the devices that the strategy says, rounded down to what a mesh may have: a part of
a node that is a power of two, or whole nodes. Sets whose calls wait for nothing of each other get disjoint devices
where there are, else those that have the least weights so far. Devices that are not one mesh are several, from the
largest on.

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, sections IV-A and IV-B.
"""

from collections.abc import Iterable, Mapping, Sequence

from jaxrlhf.brief import did_you_mean
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.placement_strategy import (
    DISAGGREGATED,
    INFER,
    INTERLEAVING,
    INTERLEAVING_2,
    TRAIN,
    Extent,
    PlacementStrategy,
)
from jaxrlhf.planner.costs.memory import weight_bytes
from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.sharding.strategy import Strategy

Ranges = tuple[range, ...]
"""Devices of a call: a mesh, or several, each for a share of the rows."""
_WHERE = "plan.placement"


def devices_of_calls(strategy: PlacementStrategy, workload: Workload, cluster: Cluster) -> dict[str, Ranges]:
    """Call -> its devices. Raises PlanError if the strategy does not fit the roles or the devices."""
    return _Groups(workload, cluster).of_calls(strategy)


class _Groups:
    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._meshes = sorted(cluster.meshes, key=lambda mesh: (-len(mesh), mesh.start))
        self._behind: dict[str, frozenset[str]] = {}  # call -> all that must end before it
        for call in workload.calls:
            self._behind[call.name] = frozenset(call.needs).union(*(self._behind[name] for name in call.needs))

    def of_calls(self, strategy: PlacementStrategy) -> dict[str, Ranges]:
        extents = self._extents(strategy)
        self._check_roles(extents)
        calls = self._workload.calls
        if not strategy.is_disaggregated:
            return self._placed(calls, extents, tuple(range(self._cluster.num_devices)))
        if not any(call.trains for call in calls) or all(call.trains for call in calls):
            missing = "train call" if not any(call.trains for call in calls) else "call beside those that train"
            raise PlanError(f"{_WHERE}: training and inference apart need both. Got a step without a {missing}.")
        train, infer = self._apart(extents)
        placed = {call.name: self._meshes_of(train) for call in calls if call.trains}
        return placed | self._placed([call for call in calls if not call.trains], extents, infer)

    def _extents(self, strategy: PlacementStrategy) -> Mapping[str, Extent]:
        """The devices of roles, those of strategies by name written out."""
        if not strategy.name:
            return strategy.extents
        if strategy.name == DISAGGREGATED:
            return {TRAIN: 0.5}
        trained, roles = self._workload.trained, {call.role: call.weights for call in self._workload.calls}
        halved = {role: 0.5 for role, weights in roles.items() if weights not in trained}
        if strategy.name == INTERLEAVING and not halved:
            raise PlanError(
                f"{_WHERE}: {INTERLEAVING} is for roles whose weights are not trained. Got a step without any. Use "
                f"{INTERLEAVING_2}."
            )
        return halved if strategy.name == INTERLEAVING else dict.fromkeys(roles, 0.5)

    def _check_roles(self, extents: Mapping[str, Extent]) -> None:
        """Checks the names of roles, and that those of one set of weights are in one place."""
        weights = {call.role: call.weights for call in self._workload.calls}
        for role in (key for key in extents if key not in (TRAIN, INFER)):
            if role not in weights:
                raise PlanError(
                    f"{_WHERE}.{role}: must be a role with calls of a model in the step, {TRAIN} or {INFER}. Roles: "
                    f"{', '.join(weights)}.{did_you_mean(role, [*weights, TRAIN, INFER])}"
                )
            for other in (name for name in extents if weights.get(name) == weights[role]):
                if extents[other] != extents[role]:
                    raise PlanError(
                        f"{_WHERE}.{role}: must be that of {other}, whose weights it has. Got {_text(extents[role])} "
                        f"and {_text(extents[other])}. Make them equal, or leave one out."
                    )

    def _apart(self, extents: Mapping[str, Extent]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Devices of training and of inference. One that is not given has what the other leaves."""
        everywhere = range(self._cluster.num_devices)
        train = self._first(TRAIN, extents[TRAIN], tuple(everywhere)) if TRAIN in extents else ()
        free = tuple(device for device in everywhere if device not in train)
        infer = self._first(INFER, extents[INFER], free) if INFER in extents else free
        train = train or tuple(device for device in everywhere if device not in infer)
        if both := set(train) & set(infer):
            raise PlanError(
                f"{_WHERE}: {TRAIN} and {INFER} must have devices of their own. Got "
                f"{devices_to_text(tuple(sorted(both)))} in both. Change one of them."
            )
        for name, devices in ((TRAIN, train), (INFER, infer)):
            if not devices:
                raise PlanError(f"{_WHERE}: must leave devices to {name}. Got none. Lower the other fraction.")
        return train, infer

    def _first(self, name: str, extent: Extent, among: tuple[int, ...]) -> tuple[int, ...]:
        """The first of some devices, as many as an extent says, or those that it names."""
        if isinstance(extent, tuple):
            return self._named(name, extent)
        size = self._size(name, extent, among)
        return tuple(next(mesh for mesh in self._in(among) if len(mesh) == size))

    def _placed(
        self, calls: Sequence[ModelCall], extents: Mapping[str, Extent], among: tuple[int, ...]
    ) -> dict[str, Ranges]:
        """Devices for calls: the sets of weights with the most of them first, each where the fewest calls run that
        could run beside its own."""
        of_sets: dict[str, Extent | None] = {}
        for call in calls:
            of_sets[call.weights] = of_sets.get(call.weights) or extents.get(call.role)
        names = {call.weights: call.role for call in reversed(calls)}
        placed: dict[str, Ranges] = {}
        fractions = {w: len(self._of_extent(names[w], x, among)) for w, x in of_sets.items()}
        for weights in sorted(of_sets, key=lambda each: -fractions[each]):
            extent = of_sets[weights]
            if extent is None or isinstance(extent, tuple):
                placed[weights] = self._meshes_of(self._of_extent(names[weights], extent, among))
                continue
            size = fractions[weights]
            options = [mesh for mesh in self._in(among) if len(mesh) == size]
            placed[weights] = (min(options, key=lambda mesh: self._crowding(weights, mesh, calls, placed)),)
        return {call.name: placed[call.weights] for call in calls}

    def _of_extent(self, role: str, extent: Extent | None, among: tuple[int, ...]) -> tuple[int, ...]:
        """As many devices as a role has; those that it names where it names some."""
        if extent is None:
            return among
        return self._named(role, extent) if isinstance(extent, tuple) else among[: self._size(role, extent, among)]

    def _crowding(
        self, weights: str, mesh: range, calls: Sequence[ModelCall], placed: Mapping[str, Ranges]
    ) -> tuple[int, int, int]:
        """How much there is on some devices: pairs of calls that could run side by side, then bytes of weights."""
        there = {other for other, ranges in placed.items() if any(_overlap(mesh, each) for each in ranges)}
        own = [call for call in calls if call.weights == weights]
        others = [call for call in calls if call.weights in there]
        pairs = sum(self._independent(one.name, other.name) for one in own for other in others)
        return pairs, sum(_bytes([call for call in others if call.weights == other]) for other in there), mesh.start

    def _independent(self, one: str, other: str) -> bool:
        return one not in self._behind[other] and other not in self._behind[one]

    def _size(self, name: str, fraction: float, among: Iterable[int]) -> int:
        """The devices that a fraction of all of them is, as many as a mesh may have."""
        wanted = fraction * self._cluster.num_devices + 1e-9
        if wanted < 1:
            raise PlanError(
                f"{_WHERE}.{name}: must be at least one of {self._cluster.num_devices} devices. Got {fraction:g} of "
                f"them. Use {1 / self._cluster.num_devices:.3g} or more."
            )
        return max(len(mesh) for mesh in self._in(among) if len(mesh) <= wanted)

    def _named(self, name: str, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Devices that are named. Raises PlanError if one is not there."""
        if missing := sorted({d for d in devices if d >= self._cluster.num_devices}):
            raise PlanError(
                f"{_WHERE}.{name}: must be among the {self._cluster.num_devices} devices, 0 to "
                f"{self._cluster.num_devices - 1}. Got {devices_to_text(tuple(missing))}. Leave them out."
            )
        return tuple(sorted(set(devices)))

    def _in(self, among: Iterable[int]) -> list[range]:
        """Meshes of some devices, the largest first."""
        inside = set(among)
        return [mesh for mesh in self._meshes if mesh[0] in inside and mesh[-1] in inside and inside.issuperset(mesh)]

    def _meshes_of(self, devices: tuple[int, ...]) -> Ranges:
        """The meshes that some devices make up, the largest first."""
        left, found = set(devices), list[range]()
        while left:
            found.append(self._in(left)[0])
            left -= set(found[-1])
        return tuple(found)


def _bytes(calls: Sequence[ModelCall]) -> int:
    """Bytes of the weights of some calls: of such that are trained, with the optimizer's state."""
    size = weight_bytes(calls[0].model, Strategy(), calls[0].model.itemsize)
    return 8 * size if any(call.trains for call in calls) else size


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _text(extent: Extent) -> str:
    return devices_to_text(extent) if isinstance(extent, tuple) else f"{extent:g}"
