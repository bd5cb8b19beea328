"""Early transfers of outputs to the calls that need them.

The inputs of a call could be moved when its turn comes. But devices work in the order of dispatch: the transfer of a
rollout to the critic's devices would then wait for the reference on the actor's devices. So a transfer is dispatched
right after the call that makes the array, if that does not delay other work:

- Copies of whole shards (`shards`) run beside programs, and always begin at once.
- An exchange is a program on the devices of both calls, which begins when all of them reach it. It is dispatched at
  once if every call in between, in this step, that takes devices of the target has to wait for the source anyway: it
  depends on the source, or takes one of its devices too. Otherwise it is dispatched when the call's turn comes. Work
  left from the step before delays the source's devices too.
- Arrays that stay on their devices (`jit`) need no early transfer, and copies by the host (`host`) make it wait.

The plan decides this, so every process dispatches the same transfers in the same order.

Early inputs live longer. They are token ids, masks and log-probabilities, at most 14 bytes for each token of a rollout
(512 rows of 2,048 tokens: 15 MB over all devices of a call that split them), beside gigabytes of weights and
activations, so that forecasts of memory leave them out.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxrlhf.call_graph import Call, CallGraph, Ref
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import splits_rows
from jaxrlhf.reshard.protocols import input_shardings
from jaxrlhf.reshard.reallocate import is_placed, reallocate, signature_of, transfer_method
from jaxrlhf.sharding.layout import Layout


class HandOvers:
    """Moves outputs to the calls of one step that need them."""

    def __init__(self, graph: CallGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._brought: dict[tuple[str, str, int], Any] = {}
        """(target call, source call, leaf) -> the array in the layout of the target."""

    def start(self, source: Call, outputs: Sequence[Any]) -> None:
        """Dispatches the early transfers of the outputs of a call that was just dispatched.

        Every process calls it after every call that runs on devices, in the same order.
        """
        keys, arrays, shardings = [], [], []
        later = self._graph.calls[self._graph.calls.index(source) + 1 :]
        for call in later:
            refs = [ref for ref in call.refs if ref.call == source.name]
            if call.kind == "host" or not refs:
                continue
            for ref, sharding in zip(refs, self._shardings(call, refs), strict=True):
                array = outputs[ref.leaf]
                method = transfer_method(signature_of(array, sharding)) if is_placed(array) else None
                if method == "shards" or (method == "exchange" and self._nothing_between(source, call)):
                    keys.append((call.name, source.name, ref.leaf))
                    arrays.append(array)
                    shardings.append(sharding)
        if arrays:  # all at once: calls of one layout share transfers
            self._brought.update(zip(keys, reallocate(arrays, shardings), strict=True))

    def inputs(self, call: Call, refs: Sequence[Ref], lookup: Callable[[Ref], Any]) -> list[Any]:
        """The inputs of a call on its devices. Those that were not moved early are moved now."""
        near = [self._brought.pop((call.name, ref.call, ref.leaf), lookup(ref)) for ref in refs]
        return reallocate(near, self._shardings(call, refs))

    def _shardings(self, call: Call, refs: Sequence[Ref]) -> list[NamedSharding]:
        placement = self._plan[call]
        layout = Layout.over(placement.devices, placement.strategy)
        split = splits_rows(call, placement.strategy)
        return input_shardings([ref.has_rows and split for ref in refs], layout, placement.protocol)

    def _nothing_between(self, source: Call, call: Call) -> bool:
        """Returns whether all calls on a call's devices before it, in this step, wait for its source or precede it."""
        devices, at = set(self._plan[call].devices), self._graph.calls.index(source)
        of_source = set(self._plan[source].devices)
        return all(
            source.name in self._before[other.name]
            or other.name in self._before[source.name]
            or (number >= at and not of_source.isdisjoint(self._plan[other].devices))
            for number, other in enumerate(self._graph.calls[: self._graph.calls.index(call)])
            if other.kind != "host" and not devices.isdisjoint(self._plan[other].devices)
        )

    @functools.cached_property
    def _before(self) -> dict[str, set[str]]:
        """Call -> all calls that must have ended before it."""
        before: dict[str, set[str]] = {}
        for call in self._graph.calls:
            names = self._graph.dependencies(call)
            before[call.name] = set(names).union(*(before[name] for name in names))
        return before
