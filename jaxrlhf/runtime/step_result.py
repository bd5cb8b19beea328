"""What a step gave: its next state, what its calls gave, and how that is read."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrlhf.call_graph import CallGraph, Ref
from jaxrlhf.runtime.channel import Channel
from jaxrlhf.runtime.host_arrays import to_host

Leaves = list[Any]
Wait = Callable[[str], contextlib.AbstractContextManager[None]]
"""Given what is waited for: a context to wait in, which the timeline then shows."""


def _untold(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclasses.dataclass
class StepResult:
    """What a step gave. Its arrays may still be under way.

    What reads arrays gives them to every process of the run, and every process must call it, in the same order.
    """

    graph: CallGraph
    state: Any
    """The state for the next step."""
    _values: dict[str, "Leaves | concurrent.futures.Future[Leaves]"]
    _channel: Channel = dataclasses.field(default_factory=Channel)
    _wait: Wait = _untold

    def fetch(self) -> Any:
        """What the step function returned beside its state, as numpy arrays. Waits for it."""
        return self.read(self.graph.results[0])

    def outputs(self, call_name: str) -> Any:
        """A call's outputs as numpy arrays. Waits for them."""
        (call,) = (c for c in self.graph.calls if c.name == call_name)
        return self.read(call.outputs)

    def read(self, tree: Any) -> Any:
        """A tree with the arrays in place of the graph's references to them, as numpy arrays. Waits for them."""
        refs = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Ref)]
        with self._wait("results"):
            arrays = iter(to_host([lookup(self._values, ref) for ref in refs], self._channel))
        return jax.tree.map(lambda x: next(arrays) if isinstance(x, Ref) else x, tree)


def lookup(values: dict[str, Any], ref: Ref, wait: Wait = _untold) -> Any:
    """What a call gave for a reference. Waits for what a Python function gives, in the context that `wait` makes."""
    leaves = values[ref.call]
    if isinstance(leaves, concurrent.futures.Future):
        with wait(ref.call):
            leaves = leaves.result()
    return leaves[ref.leaf]
