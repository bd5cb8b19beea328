"""The result of a step: its next state and the outputs of its calls."""

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrlhf.call_graph import Call, CallGraph, Ref
from jaxrlhf.execution.host_arrays import to_host
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.programs.roles import ENCODE

Leaves = list[Any]
"""The outputs of a call in the order of `jax.tree.leaves`: arrays, possibly not computed yet, or the NumPy arrays of a
Python function, with the number of its timeouts, or of the sequences that it cut, after them."""
Values = dict[str, "Leaves | concurrent.futures.Future[Leaves]"]
"""Call, 'state' or 'data' -> its outputs."""
RecordWait = Callable[[str], contextlib.AbstractContextManager[None]]
"""From the name of what is waited for to a context that records the wait in the timeline."""


@dataclasses.dataclass
class StepResult:
    """The result of a step. Its arrays may not be computed yet.

    Methods that read arrays return them in every process of the run, and every process must call them, in the same
    order.
    """

    graph: CallGraph
    state: Any
    """The state for the next step."""
    _values: Values
    _channel: Channel = dataclasses.field(default_factory=Channel)
    _wait: RecordWait = lambda _: contextlib.nullcontext()
    _on_host: tuple[Call, ...] = ()
    """Its calls of Python functions, in parts where they ran in parts."""
    staleness: int | None = None
    """The steps by which the weights that generated are older than the current ones; None if no generation is stale."""

    def fetch(self) -> Any:
        """The results that the step function returned beside its state, as NumPy arrays. Waits for them."""
        return self.read(self.graph.results[0])

    def outputs(self, call_name: str) -> Any:
        """The outputs of a call as NumPy arrays. Waits for them."""
        (call,) = (c for c in self.graph.calls if c.name == call_name)
        return self.read(call.outputs)

    def read(self, tree: Any) -> Any:
        """A tree with NumPy arrays in place of the graph's references. Waits for them."""
        refs = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Ref)]
        with self._wait("results"):
            arrays = iter(to_host([lookup(self._values, ref) for ref in refs], self._channel))
        return jax.tree.map(lambda x: next(arrays) if isinstance(x, Ref) else x, tree)

    def counts(self) -> dict[str, int]:
        """What Python functions count, over the calls of this step, by the end of a metric's name: `role/timeouts`,
        samples that took a function too long, for roles that count them; `role/cut_sequences`, those that were cut for
        a scorer with its own tokenizer. Waits for the functions."""
        counts: dict[str, int] = collections.Counter()
        for call in self._on_host:
            leaves = self._values[call.name]
            *_, count = leaves.result() if isinstance(leaves, concurrent.futures.Future) else leaves
            if count is not None:
                counts[f"{call.role}/{'cut_sequences' if call.method == ENCODE else 'timeouts'}"] += count
        return dict(counts)


def lookup(values: Values, ref: Ref, wait: RecordWait = lambda _: contextlib.nullcontext()) -> Any:
    """The output that a reference stands for. Waits for a Python function, in the context from `wait`."""
    leaves = values[ref.call]
    if isinstance(leaves, concurrent.futures.Future):
        with wait(ref.call):
            leaves = leaves.result()
    return leaves[ref.leaf]
