"""Positions of devices as text: '0-3,8'."""

import re

from jaxrlhf.brief import brief

MAX_DEVICES = 2**20
"""The most devices that a placement can name."""


def devices_from_text(text: str) -> tuple[int, ...]:
    """Positions of devices: '0-3', '3,2,1,0', '0-1,4-5', up to `MAX_DEVICES`. An empty text means no devices."""
    devices: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not span or len(devices) + len(span) > MAX_DEVICES:
            raise ValueError(f"must be positions of devices, such as '0-3' or '3,2,1,0'. Got {brief(text)}.")
        devices += span
    return tuple(devices)


def devices_to_text(devices: tuple[int, ...]) -> str:
    """Positions of devices as `devices_from_text` reads them, consecutive ones as a range: '0-3,8'."""
    spans: list[list[int]] = []
    for device in devices:
        if spans and device == spans[-1][-1] + 1:
            spans[-1][1:] = [device]
        else:
            spans.append([device])
    return ",".join("-".join(map(str, span)) for span in spans)
