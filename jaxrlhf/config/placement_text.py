"""A placement in one line, as tables of plans show it: `fsdp 2 x tensor 2 on 0-3`."""

import re
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.device_text import devices_from_text

DEGREES = ("pipeline", "data", "fsdp", "tensor")
ONE_DEVICE = "one device"
_EXAMPLE = "Write 'fsdp 2 x tensor 2 on 0-3', or 'one device on 0'; without devices, it is on the first ones."


def placement_from_text(text: str) -> dict[str, Any]:
    """The keys of a placement that a line stands for. Raises ValueError.

    >>> placement_from_text("fsdp 2 x tensor 2 on 0-3")
    {'fsdp': 2, 'tensor': 2, 'devices': '0-3'}
    >>> placement_from_text("one device on 4")
    {'devices': '4'}
    """
    strategy, on, devices = (part.strip() for part in text.partition(" on "))
    keys: dict[str, Any] = {}
    for part in strategy.split(" x ") if strategy != ONE_DEVICE else ():
        degree = re.fullmatch(r"\s*([A-Za-z_]+) +([0-9]{1,7})\s*", part)
        if degree is None:
            raise ValueError(f"must be degrees of parallelism on devices. Got {brief(text)}. {_EXAMPLE}")
        name = degree[1]
        if name not in DEGREES:
            hint = did_you_mean(name, DEGREES)
            raise ValueError(f"a degree must be one of {', '.join(DEGREES)}. Got {brief(name)} in {brief(text)}.{hint}")
        if name in keys:
            raise ValueError(f"must have each degree once. Got {name} twice in {brief(text)}.")
        keys[name] = int(degree[2])
    if on:
        if not devices_from_text(devices):
            raise ValueError(f"must name devices after 'on'. Got {brief(text)}. {_EXAMPLE}")
        keys["devices"] = devices
    return keys


def is_line(value: Any) -> bool:
    """True for text that begins with a word, as these lines do, and positions of devices do not."""
    return isinstance(value, str) and re.match("[A-Za-z_]+ ", value) is not None
