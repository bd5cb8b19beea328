"""`plan.placement`: which devices each role has, as a short description from which the planner makes a plan.

    placement: interleaving                                          # by name
    placement: {actor: 1, critic: 1, reference: 0.5, reward: 0.5}    # fractions of the devices
    placement: {train: 0-7, infer: 8-15}                             # training and inference apart

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, section IV.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.device_text import devices_from_text, devices_to_text
from jaxrlhf.require import require

INTERLEAVING, INTERLEAVING_2, DISAGGREGATED = "interleaving", "interleaving-2", "disaggregated"
STRATEGIES = (INTERLEAVING, INTERLEAVING_2, DISAGGREGATED)
"""Placement strategies by name: roles that are not trained on halves of the devices; all roles on halves; training on
one half, inference on the other."""
TRAIN, INFER = "train", "infer"
"""The keys of the devices of training and of inference, where these are apart."""
PARTS, REPLICAS = "parts", "replicas"

Extent = float | tuple[int, ...]
"""A fraction of all devices, or their positions."""


@dataclasses.dataclass(frozen=True)
class PlacementStrategy:
    """Which devices each role has."""

    name: str = ""
    """One of `STRATEGIES`; empty if `extents` say it."""
    extents: Mapping[str, Extent] = FrozenDict()
    """Role, `train` or `infer` -> its devices. Beside `train` or `infer`, a role has those of its inference calls."""
    parts: int = 0
    """Blocks in which each replica hands on what it generates. 0: as many as a simulation finds fastest."""
    replicas: int = 0
    """Shares of the generation, each on nodes of its own. 0: as many as a simulation finds fastest."""

    def __post_init__(self) -> None:
        for name in (PARTS, REPLICAS):
            require(getattr(self, name) >= 0, name, "must be at least 1, or 0 to have it chosen", getattr(self, name))

    @property
    def is_disaggregated(self) -> bool:
        """True if training and inference have devices of their own."""
        return self.name == DISAGGREGATED or TRAIN in self.extents or INFER in self.extents

    @classmethod
    def from_data(cls, data: Any) -> "PlacementStrategy | None":
        """From plain data in the form of a config. Raises ValueError."""
        if data is None:
            return None
        if isinstance(data, str):
            hint = did_you_mean(data, STRATEGIES)
            rule = f"must be one of {', '.join(STRATEGIES)}, or a mapping of roles to devices"
            require(data in STRATEGIES, "placement", rule, data, hint.strip())
            return cls(data)
        require(isinstance(data, Mapping) and bool(data), "placement", "must be a name or a mapping", data)
        counts = {}
        for name in (key for key in (PARTS, REPLICAS) if key in data):
            require(type(data[name]) is int, f"placement.{name}", "must be a whole number", data[name])
            counts[name] = data[name]
        name = data.get("name", "")
        if name:
            return dataclasses.replace(cls.from_data(name) or cls(), **counts)
        extents = {str(key): _extent(key, value) for key, value in data.items() if key not in (PARTS, REPLICAS, "name")}
        require(bool(extents), "placement", "must say where roles are", data, "Write `train: 0.5`, say.")
        return cls("", FrozenDict(extents), **counts)

    def to_data(self) -> Any:
        """As `from_data` reads it."""
        counts = {name: getattr(self, name) for name in (PARTS, REPLICAS) if getattr(self, name)}
        if self.name:
            return {"name": self.name, **counts} if counts else self.name
        texts = {key: devices_to_text(x) if isinstance(x, tuple) else x for key, x in self.extents.items()}
        return {**texts, **counts}


def _extent(key: object, value: Any) -> Extent:
    """A fraction of the devices, or positions of devices."""
    where = f"placement.{key}"
    if isinstance(value, str):
        try:
            devices = devices_from_text(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        require(bool(devices), where, "must be devices", value, "Write '0-7', or a fraction.")
        return devices
    is_fraction = type(value) in (int, float) and 0 < value <= 1
    rule = "must be a fraction of the devices in (0, 1], or their positions in quotes"
    if not is_fraction:
        raise ValueError(f"{where}: {rule}. Got {brief(value)}. Write 0.5 or '0-7'.")
    return float(value)
