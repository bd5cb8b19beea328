"""What tests need that start processes."""

import os
import random
import socket

_draw = random.Random(os.getpid())


def free_port() -> int:
    """A port that nobody listens on.

    Below those that the kernel hands out to outgoing connections: one of these could be taken before the coordinator
    has started.
    """
    while True:
        port = _draw.randrange(20_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("localhost", port))
            except OSError:
                continue
        return port


def flags_of_one_processor() -> str:
    """XLA's flags as conftest.py sets them, but for the number of devices: compiling takes no longer than it must."""
    return " ".join(f for f in os.environ["XLA_FLAGS"].split() if "force_host_platform_device_count" not in f)
