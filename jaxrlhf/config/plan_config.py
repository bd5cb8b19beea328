"""The section `plan` of a config: placements of calls, offloaded roles, fused calls, automatic planning, and the
lengths of responses that forecasts assume."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from flax.core import FrozenDict

from jaxrlhf.brief import brief, cut, did_you_mean
from jaxrlhf.config.device_text import MAX_DEVICES, devices_from_text, devices_to_text
from jaxrlhf.config.placement_strategy import STRATEGIES, PlacementStrategy
from jaxrlhf.config.placement_text import is_line, placement_from_text
from jaxrlhf.config.reading import FORM, INLINE, ConfigError, merge, to_tree
from jaxrlhf.require import (
    errors_as,
    require,
    require_at_least_one,
    require_fraction,
    require_not_negative,
    require_positive_fraction,
)
from jaxrlhf.reshard.protocols import AUTO
from jaxrlhf.sharding.strategy import Strategy

Migration = Literal["cache", "prefill"]
"""How sequences move to the devices of the tail: with their keys and values, or as tokens that are prefilled there."""


def _positions() -> Any:
    """A field of positions of devices."""
    return dataclasses.field(default=(), metadata={FORM: (str, devices_from_text, devices_to_text)})


@dataclasses.dataclass(frozen=True)
class Tail:
    """Where the last sequences of a generation go on, while the other devices do what comes next.

    >>> Placement((0, 1), Strategy(data=2), parts=2, tail=Tail((0,), rows=0.25)).is_whole
    False
    """

    devices: tuple[int, ...] = _positions()
    strategy: Strategy = dataclasses.field(default=Strategy(), metadata={INLINE: True})
    parts: int = 1
    """Blocks in which it hands on its sequences."""
    rows: float = 0.2
    """The fraction of the sequences that move, once at most so many have not finished; rounded down to what divides
    over the devices of the tail. With 0 nothing moves."""
    migrate: Migration = "cache"

    def __post_init__(self) -> None:
        require_at_least_one(self.parts, "parts")
        require_fraction(self.rows, "rows")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a call and the strategy on them.

    In configs and saved plans, its keys and those of the strategy are in one mapping: `{devices: 0-3, fsdp: 2}`. A call
    whose rows are split over several placements has a list of them: `[{devices: 0-3}, {devices: 4-7, rows: 0.25}]`.

    >>> str(Placement((0, 1, 2, 3), Strategy(fsdp=2, tensor=2)))
    'fsdp 2 x tensor 2 on 0-3'
    """

    devices: tuple[int, ...] = _positions()
    """Positions in `jax.devices()`, in the order of the mesh: consecutive ones of one node, or whole nodes. Empty in a
    config means the first ones, as many as the degrees need (`with_devices`)."""
    strategy: Strategy = dataclasses.field(default=Strategy(), metadata={INLINE: True})
    protocol: str = AUTO
    """The transfer protocol of rows: a name in `reshard.protocols`, or `auto`."""
    parts: int = 1
    """Blocks of rows that a row-wise call hands on one after another. One that generates hands on block i of n when i/n
    of its rows have finished; others run on a block when its inputs are there. A train call adds up the gradients of so
    many blocks before its update."""
    tail: Tail | None = None
    """Of a call that generates: where its last sequences go on."""
    rows: float = 1.0
    """Of a call on several placements, the fraction of the rows that this one has; the first has what is left."""
    shares: "tuple[Placement, ...]" = ()
    """The other placements of the call."""

    def __post_init__(self) -> None:
        require_at_least_one(self.parts, "parts")
        require_positive_fraction(self.rows, "rows")
        for share in self.shares:
            for key, value in (("tail", share.tail), ("shares", share.shares)):
                require(not value, key, "must stand with the first placement of a call", to_tree(value))
            require(share.rows < 1, "rows", "must be less than 1 for each placement but the first", share.rows)
        if self.shares:
            rule = "must be left out for the first placement, which has what is left"
            require(self.rows == 1, "rows", rule, self.rows)
            others = sum(share.rows for share in self.shares)
            require(others < 1, "rows", "must leave rows to the first placement", others, "Lower the fractions.")

    @property
    def is_whole(self) -> bool:
        """True if the call runs on one placement with all of its rows at once."""
        return self.parts == 1 and self.tail is None and not self.shares

    def alone(self) -> "Placement":
        """Its devices and strategy, for a call that is whole."""
        return Placement(self.devices, self.strategy, protocol=self.protocol)

    def with_devices(self) -> "Placement":
        """The placement; without devices, on the first ones, as many as its degrees need."""
        tail = None if self.tail is None else dataclasses.replace(self.tail, devices=_devices_of(self.tail))
        shares = tuple(share.with_devices() for share in self.shares)
        return dataclasses.replace(self, devices=_devices_of(self), tail=tail, shares=shares)

    def __str__(self) -> str:
        return f"{self.strategy} on {devices_to_text(self.devices)}"


def _devices_of(placement: Placement | Tail) -> tuple[int, ...]:
    return placement.devices or tuple(range(min(placement.strategy.num_devices, MAX_DEVICES)))


@dataclasses.dataclass(frozen=True)
class ResponseLengths:
    """The lengths of responses that forecasts assume: their mean and 99th percentile, or a run that recorded both.

    >>> ResponseLengths(mean=120.0, p99=900).p99
    900
    """

    mean: float = 0.0
    """Tokens of a response on average, stop token included; those that the limit cuts off count as cut off."""
    p99: int = 0
    """The tokens that 99 % of all responses have at most."""
    run: str = ""
    """The folder of a run: mean and percentile are those of its last steps. Empty for none."""

    def __post_init__(self) -> None:
        if self.run:
            given = [name for name in ("mean", "p99") if getattr(self, name)]
            require(not given, "run", "gives mean and p99 by itself", ", ".join(given), "Remove one or the other.")
            return
        require(math.isfinite(self.mean) and self.mean >= 1, "mean", "must be at least 1 token", self.mean)
        rule = f"must be at least the mean, {self.mean:g} tokens"
        require(self.p99 >= self.mean, "p99", rule, self.p99, "Raise p99, or lower mean.")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The section `plan` of a config.

    >>> plan = PlanConfig(calls={"actor.train": Placement((0, 1), Strategy(fsdp=2))}, offload=("reference",))
    >>> str(plan.placements["actor.train"])
    'fsdp 2 on 0-1'
    """

    default: Placement | None = None
    """The placement of calls without an entry. None means that they split their rows over all devices."""
    calls: Mapping[str, Placement] = dataclasses.field(default_factory=FrozenDict)
    """Call -> its placement. `actor.generate` also applies to `actor.generate#2`, unless that has its own entry."""
    offload: tuple[str, ...] = ()
    """Roles whose weights rest in host memory while no call needs them."""
    fuse: tuple[str, ...] = ()
    """Two train calls that run as one pipeline."""
    auto: bool = False
    """Plan the calls that have no entry."""
    placement: PlacementStrategy | None = dataclasses.field(
        default=None,
        metadata={FORM: (Any, PlacementStrategy.from_data, lambda x: None if x is None else x.to_data())},
    )
    """Which devices each role has: the plan is the fastest on these. None leaves the devices to the planner too."""
    file: str = ""
    """A plan written by `python -m jaxrlhf.plan --out`; empty for none."""
    lengths: ResponseLengths | None = None
    """The lengths of responses in forecasts. None means that every response is as long as it may be."""
    longest_first: bool = False
    """Slots admit prompts by the expected length of their responses, longest first. It is the mean length of earlier
    responses to the same prompt."""
    refine_tails: int = 0
    """Steps after which the sizes of tails (`rows`) are chosen anew, by simulation with the lengths of the responses of
    the last steps. 0 means never."""

    def __post_init__(self) -> None:
        require_not_negative(self.refine_tails, "refine_tails")
        of_any_plan = ("file", "longest_first", "refine_tails")
        others = [name for name, value in vars(self).items() if name not in of_any_plan and value]
        if self.file and others:
            raise ValueError(
                f"file: a file has the placements of all calls. Got also {', '.join(others)}. Remove one or the other; "
                "or change the file, which is JSON."
            )
        if self.placement is not None and not self.auto:
            raise ValueError("placement: is for calls that are planned for. Got it with `auto: false`. Remove one.")
        if self.auto and self.default is not None:
            raise ValueError(
                f"default: calls that the plan does not name are planned for. Got {brief(to_tree(self.default))} "
                "beside `auto: true`. Remove one of them."
            )
        if self.auto and (unnamed := [name for name in self.fuse if name not in self.calls]):
            raise ValueError(
                f"fuse: calls that are planned for run by themselves. Got {unnamed[0]}. Give it a placement of its "
                "own under plan.calls, or leave fuse out."
            )

    @property
    def placements(self) -> dict[str, Placement]:
        """Call -> its placement with devices, for every entry of `calls`."""
        return {name: placement.with_devices() for name, placement in self.calls.items()}


def expand_plan(tree: dict[str, Any], where: str) -> None:
    """Expands short forms of the section `plan` in the tree of a config, in place.

    `plan: auto` becomes `{auto: true}`, `plan: interleaving` becomes `{auto: true, placement: interleaving}`,
    `plan: a/plan.json` becomes `{file: a/plan.json}`, `lengths: runs/a` becomes `{run: runs/a}`, a plan with
    `placement` gets `auto: true`, and under `calls` `{actor: {train: ...}}`, as `--set plan.calls.actor.train.data=2`
    makes it, becomes `{actor.train: ...}`. `plan: {actor.train: ...}` is short for `plan: {calls: {actor.train: ...}}`,
    and a placement may be a line, `fsdp 2 x tensor 2 on 0-3`.
    """
    plan = tree.get("plan")
    if isinstance(plan, str):
        if plan != "auto" and plan not in STRATEGIES and not plan.endswith(".json"):
            raise ConfigError(
                f"{where}: plan: must be a mapping, auto, {', '.join(STRATEGIES)}, or the path of a plan, which ends "
                f"in .json. Got {brief(plan)}.{did_you_mean(plan, ['auto', *STRATEGIES])}"
            )
        file = {"file": plan} if plan.endswith(".json") else {"auto": True, "placement": plan}
        tree["plan"] = {"auto": True} if plan == "auto" else file
    if not isinstance(plan, dict):
        return
    keys = [field.name for field in dataclasses.fields(PlanConfig)]
    named = [key for key in plan if key not in keys and "." in str(key)]
    if named and isinstance(plan.get("calls", {}), dict):
        calls = {**plan.get("calls", {}), **{key: plan[key] for key in named}}
        plan = {**{key: entry for key, entry in plan.items() if key not in named}, "calls": calls}
    for name, entry in _joined({key: entry for key, entry in plan.items() if key not in keys}).items():
        if isinstance(entry, dict) or "." in str(name):
            raise ConfigError(
                f"{where}: plan: placements of calls stand under plan.calls. Got {brief(name)} beside it. Write "
                f"plan.calls.{cut(str(name))}.{did_you_mean(str(name), keys)}"
            )
    if isinstance(plan.get("calls"), dict):
        calls = _joined(plan["calls"])
        plan = {**plan, "calls": {call: _from_line(x, f"{where}: plan.calls.{call}") for call, x in calls.items()}}
    if "default" in plan:
        plan = {**plan, "default": _from_line(plan["default"], f"{where}: plan.default")}
    if plan.get("placement") is not None:
        plan = {"auto": True, **plan}
    if isinstance(plan.get("lengths"), str):
        plan = {**plan, "lengths": {"run": plan["lengths"]}}
    tree["plan"] = plan


def _from_line(entry: Any, where: str) -> Any:
    """The entry of a call; a line as the keys that it stands for."""
    if not isinstance(entry, str):
        return entry
    with errors_as(ConfigError, f"{where}: "):
        return placement_from_text(entry)


def _with_shares(entry: Any) -> Any:
    """The entry of a call; a list of placements as the first with the others in it."""
    if _is_shares(entry):
        return {**entry[0], "shares": entry[1:]} if len(entry) > 1 else entry[0]
    return entry


def _joined(calls: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by the names of calls. Of two entries of one call, the later one is merged over the earlier one."""
    joined: dict[str, Any] = {}
    for name, entry in calls.items():
        is_role = isinstance(entry, dict) and entry and "." not in str(name)  # `a.b: {tail: {...}}` is a call
        is_role = is_role and all(isinstance(x, dict) or _is_shares(x) or is_line(x) for x in entry.values())
        entries = {f"{name}.{method}": placement for method, placement in entry.items()} if is_role else {name: entry}
        for call, placement in entries.items():
            placement = _with_shares(placement)
            if isinstance(before := joined.get(call), dict) and isinstance(placement, dict):
                placement = merge(before, placement)
            joined[call] = placement
    return joined


def _is_shares(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(isinstance(item, dict) for item in entry)
