"""The part of a plan that a config writes out."""

import re
from collections.abc import Mapping

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import PlacementConfig
from jaxrlhf.planner.plan import Placement
from jaxrlhf.sharding.strategy import Strategy


def written_plan(plan: Mapping[str, PlacementConfig], num_devices: int) -> dict[str, Placement]:
    """The placements that a config writes out.

    Raises:
        ConfigError: One has no meaning.
    """
    written = {}
    for name, entry in plan.items():
        try:
            strategy = Strategy(
                data=entry.data, fsdp=entry.fsdp, tensor=entry.tensor, pipeline=entry.pipeline,
                chunks=entry.chunks, schedule=entry.schedule,
                micro_batches=entry.micro_batches, remat=entry.remat, balance=entry.balance,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"plan.{name}.{error}") from error
        devices = tuple(range(min(strategy.num_devices, num_devices + 1)))  # one too many is refused below
        if entry.devices:
            devices = parse_devices(entry.devices, f"plan.{name}.devices")
        written[name] = Placement(devices, strategy, entry.protocol)
    return written


def parse_devices(text: str, where: str) -> tuple[int, ...]:
    """Positions of devices: '0-3', '3,2,1,0', '0-1,4-5'. At most four digits each.

    Raises:
        ConfigError: Anything else.
    """
    devices: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if last < first:
            raise ConfigError(f"{where}: must be positions of devices, such as '0-3' or '3,2,1,0'. Got {brief(text)}.")
        devices.extend(range(first, last + 1))
    return tuple(devices)
