"""The bound on programs in flight: dispatched, and not awaited."""

import collections
from collections.abc import Callable
from typing import Any

import jax

MAX_IN_FLIGHT = 8
"""A CPU backend deadlocks with some dozens of programs that communicate."""


class InFlight:
    """Programs in flight, of which there are no more than `MAX_IN_FLIGHT`.

    Args:
        wait_for: Waits until an output of a program is there.
    """

    def __init__(self, wait_for: Callable[[Any], None]) -> None:
        self._wait_for = wait_for
        self._outputs: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Outputs of another program, of which the first stands for all. May wait for an older one."""
        self._outputs.append(jax.tree.leaves(outputs)[:1])
        if len(self._outputs) > MAX_IN_FLIGHT:
            self._wait_for(self._outputs.popleft())

    def wait(self) -> None:
        """Waits for all."""
        while self._outputs:
            self._wait_for(self._outputs.popleft())


def settle(arrays: Any) -> None:
    """Waits until arrays are there on a CPU backend; on others every device has a queue that takes them all."""
    if jax.default_backend() == "cpu":
        for x in jax.tree.leaves(arrays):
            if not x.is_deleted():  # donated to a later program, which is waited for in its turn
                jax.block_until_ready(x)
