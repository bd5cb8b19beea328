"""Outputs on their way to the calls that need them, from when their source is dispatched.

A call's inputs could be brought when its turn comes. But devices work off what they are given in the order of dispatch:
what brings a rollout to the critic's devices would then stand behind the reference on the actor's. So it is dispatched
right after the call that makes it, wherever that keeps no device from work that it could do:

- Copies of whole shards (`shards`) run beside programs, and may always begin at once.
- An exchange is a program of the devices of both calls, which begins when all of them reach it. It is dispatched at
  once if its target's devices have nothing to do between, in this step, but what waits for the same outputs; otherwise
  when the call's turn comes. What the step before left to do there holds up the source's devices too.
- What stays on its devices (`jit`) needs no head start, and what the host copies (`host`) makes it wait.

Which call goes to which layout is in the plan, so every process dispatches the same in the same order.

Inputs that are there early live longer, from the end of their source instead of the end of what comes between. These
are token ids, masks and log-probabilities, at most 14 bytes a token of a rollout (512 rows of 2,048 tokens: 15 MB over
all devices of a call that split them), beside gigabytes of weights and activations: forecasts of memory leave them out.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxrlhf.call_graph import Call, CallGraph, Ref
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import splits_rows
from jaxrlhf.reshard.protocols import input_shardings
from jaxrlhf.reshard.reallocate import is_placed, reallocate, signature_of, way_of
from jaxrlhf.sharding.layout import Layout


class HandOvers:
    """Brings outputs to the calls of one step that need them."""

    def __init__(self, graph: CallGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._brought: dict[tuple[str, str, int], Any] = {}
        """(call that needs it, source, leaf) -> the array in the layout of that call."""

    def start(self, source: Call, outputs: Sequence[Any]) -> None:
        """Begins to bring the outputs of a call, just dispatched, to all that need them and whose turn is not at once.

        Every process calls it after every call that runs on devices, in the same order.
        """
        keys, arrays, shardings = [], [], []
        later = self._graph.calls[self._graph.calls.index(source) + 1 :]
        for call in later:
            refs = [ref for ref in call.refs if ref.call == source.name]
            if call.kind == "host" or not refs:
                continue
            needed = [outputs[ref.leaf] for ref in refs]
            for ref, array, sharding in zip(refs, needed, self._shardings(call, refs, needed), strict=True):
                way = way_of(signature_of(array, sharding)) if is_placed(array) else None
                if way == "shards" or (way == "exchange" and self._nothing_between(source, call)):
                    keys.append((call.name, source.name, ref.leaf))
                    arrays.append(array)
                    shardings.append(sharding)
        if arrays:  # all at once: calls of one layout share what is brought
            self._brought.update(zip(keys, reallocate(arrays, shardings), strict=True))

    def inputs(self, call: Call, refs: Sequence[Ref], lookup: Callable[[Ref], Any]) -> list[Any]:
        """A call's inputs on its devices: what is not there yet is brought now."""
        arrays = [lookup(ref) for ref in refs]
        shardings = self._shardings(call, refs, arrays)
        near = [self._brought.pop((call.name, r.call, r.leaf), x) for r, x in zip(refs, arrays, strict=True)]
        return reallocate(near, shardings)

    def _shardings(self, call: Call, refs: Sequence[Ref], arrays: Sequence[Any]) -> list[Any]:
        placement = self._plan[call]
        layout = Layout.over(placement.devices, placement.strategy)
        split = splits_rows(call, placement.strategy)
        return input_shardings(arrays, [ref.has_rows and split for ref in refs], layout, placement.protocol)

    def _nothing_between(self, source: Call, call: Call) -> bool:
        """True where all that a call's devices do in this step before it must come before its source or after it."""
        devices = set(self._plan[call].devices)
        return all(
            other is source or source.name in self._before[other.name] or other.name in self._before[source.name]
            for other in self._graph.calls[: self._graph.calls.index(call)]
            if other.kind != "host" and not devices.isdisjoint(self._plan[other].devices)
        )

    @functools.cached_property
    def _before(self) -> dict[str, set[str]]:
        """Call -> all that must have ended before it."""
        before: dict[str, set[str]] = {}
        for call in self._graph.calls:
            names = self._graph.dependencies(call)
            before[call.name] = set(names).union(*(before[name] for name in names))
        return before
