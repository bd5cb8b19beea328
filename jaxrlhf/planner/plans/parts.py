"""Graphs in parts: every part of a call, and every share of it, becomes a call of its own.

    graph, plan = in_parts(graph, plan)

A row-wise call may run on one block of its rows after another, and its rows may be split over several placements
(`Placement.parts`, `shares`, `tail`). Here such a call is replaced by a call for each block, so that whatever works on
graphs and plans (dispatch, transfers, timelines, simulation) works on parts without knowing of them:

    actor.generate            actor.generate/1   judge.scores/1   actor.generate/2   judge.scores/2
    judge.scores        -->   actor.generate     judge.scores     ppo_batch
    ppo_batch

A generation hands on rows as they finish. A call that takes rows of one generation takes them in that order. If it has
as many parts as there are blocks, these are its parts; otherwise its parts are equal, and a `compute` call cuts them
out of the blocks. A call that needs all rows, such as `train`, gets them in their own order, from a `compute` call with
the name of the whole call.

A train call in parts adds up gradients; its last part makes the update, and keeps the name of the whole. `compute`
calls between it and the generation run on each part's rows too (`ppo_batch/0-8`), where the algorithm declares that
they may (`tracing.compute`). For their outputs without rows they run on all rows as well.

The order of calls: those on the host, and those on devices that the generation does not need any more, as soon as their
rows are there; but none that waits for the host before the generation has been dispatched. All others are in the order
of the step.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.call_graph import Call, CallGraph, Part, Ref
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.plans.row_blocks import block_bounds, near_blocks, split_rows, split_sequences
from jaxrlhf.planner.plans.row_groups import group_of, row_refs_of_terms, sequences_together
from jaxrlhf.sharding.strategy import Strategy

Positions = Ref | range
"""The places of rows among all rows of a call."""
Span = tuple[int, int, int]
"""Of a block by its number, the rows from the first to the last."""


def in_parts(graph: CallGraph, plan: Plan) -> tuple[CallGraph, Plan]:
    """The graph with a call for each part, and their placements. Both are as they were if all calls are whole. Raises
    PlanError if the parts of a call do not fit its rows."""
    if all(placement.is_whole for placement in plan.placements.values()):
        return graph, plan
    return _Expansion(graph, plan).run()


@dataclasses.dataclass(frozen=True)
class Block:
    """Some rows that a call has handed on, or will."""

    rows: int
    positions: Positions
    outputs: Any
    """References, in the structure of the whole call's outputs."""


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A call of the new graph."""

    call: Call
    placement: Placement
    """Of a call on the host, one without devices."""


class _Expansion:
    """One graph on its way to parts: first the units of every call, then their order."""

    def __init__(self, graph: CallGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._blocks: dict[str, list[Block]] = {}
        """Call in parts -> its blocks, in the order in which they are ready."""
        self._source: dict[str, str] = {}
        """Call in parts -> the call whose order its rows have."""
        self._computed: dict[tuple[str, tuple[int, int]], tuple[list[Ref], str]] = {}
        """A `compute` call and its rows -> the leaves of its outputs, and the generation in whose order rows count."""
        self._together = sequences_together(graph, plan)
        self._units = {call.name: self._units_of(call) for call in graph.calls}
        self._gathers = {name: self._gather(name) for name in self._blocks}
        self._ordered: list[_Unit] = []
        self._there: set[str] = set()
        self._wait_for_host: set[str] = set()
        """Calls there that are on the host, or need what is."""

    def run(self) -> tuple[CallGraph, Plan]:
        for call in self._graph.calls:
            self._finish(call)
        for name in list(self._gathers):
            self._add_gather(name)
        calls = tuple(unit.call for unit in self._ordered)
        placements = {u.call.plan_name: u.placement.alone() for u in self._ordered if u.call.kind != "host"}
        return dataclasses.replace(self._graph, calls=calls), dataclasses.replace(self._plan, placements=placements)

    def _placement(self, call: Call) -> Placement:
        return self._plan.placements.get(call.plan_name) or Placement()

    # Units

    def _units_of(self, call: Call) -> list[_Unit]:
        placement = self._placement(call)
        if placement.is_whole:
            return [_Unit(call, placement)]
        kinds = {"generate": self._generation, "train": self._training}
        return kinds.get(call.kind, self._inference)(call, placement)

    def _generation(self, call: Call, placement: Placement) -> list[_Unit]:
        """Parts of all shares, the first of each and then as they are expected to be ready; and those of the tail."""
        where, n = f"plan.calls.{call.plan_name}", call.num_drawn
        together = self._together.get(call.name, 1)
        split, shares = split_sequences(where, call, placement, together), (placement, *placement.shares)
        firsts = [sum(split.prompts[:i]) for i in range(len(shares))]
        parts = [
            ((i + 1) / (len(bounds) - 1), share, i)
            for share, bounds in enumerate(split.bounds)
            for i in range(len(bounds) - 1)
        ]
        of_tail = [(1.0, len(shares), i) for i in range(len(split.tail_bounds) - 1)]
        units, names, last = list[_Unit](), itertools.count(1), dict[int, str]()
        cuts = [
            self._rows_of(call, first, count, share)
            for first, count, share in zip(firsts, split.prompts, shares, strict=True)
        ]
        units += [unit for unit, _ in cuts if unit is not None]
        blocks: list[tuple[float, Block]] = []
        in_turn = sorted(parts, key=lambda part: (part[2] > 0, *part[:2]))  # all shares begin before any goes on
        for number, (ready, share, i) in enumerate([*in_turn, *of_tail]):
            is_tail = share == len(shares)
            bounds = split.tail_bounds if is_tail else split.bounds[share]
            on = placement.tail if is_tail else shares[share]
            assert on is not None
            handed_on, after = (bounds[i], bounds[i + 1]), (last[share],) if share in last else ()
            if is_tail and i == 0:
                after = tuple(last.values())
            rows = (handed_on[1] - handed_on[0]) * on.strategy.num_row_shards
            part = Part(
                of=call.plan_name, number=number, count=len(parts) + len(of_tail), after=after, share=share,
                first_sequence=0 if is_tail else firsts[share] * n, handed_on=handed_on,
                migrate=placement.tail.migrate if is_tail and placement.tail else "",
                sequences=bounds[-1] * on.strategy.num_row_shards if is_tail else split.prompts[share] * n,
                stay=split.stay[0] if is_tail else 0, together=together,
            )  # fmt: skip
            name = f"{call.name}/{next(names)}"
            given = () if is_tail else cuts[share][1]
            outputs = self._references(name, call, rows)
            positions = Ref(name, len(jax.tree.leaves(outputs)), _positions_aval(rows), has_rows=True, recorder=None)
            made = dataclasses.replace(
                call, name=name, args=(given, call.args[1]), outputs=(outputs, positions) if rows else (), part=part
            )
            units.append(_Unit(made, Placement(on.devices, on.strategy)))
            last[share] = name
            if rows:
                blocks.append((ready + is_tail, Block(rows, positions, outputs)))
        self._blocks[call.name] = [block for _, block in sorted(blocks, key=lambda each: each[0])]
        return units

    def _inference(self, call: Call, placement: Placement) -> list[_Unit]:
        """Blocks of rows of each share, in the order in which their source hands them on."""
        where, shares = f"plan.calls.{call.plan_name}", (placement, *placement.shares)
        source = self._blocks_of_inputs(call)
        units: list[_Unit] = []
        blocks: list[Block] = []
        count, first = sum(share.parts for share in shares), 0
        sizes = [block.rows for block in source]
        for share, rows in zip(shares, near_blocks(split_rows(where, call, placement), sizes), strict=True):
            if share.parts > rows:
                raise PlanError(f"{where}.parts: must be at most its rows, {rows}. Got {share.parts}. Use fewer parts.")
            for start, stop in itertools.pairwise(block_bounds(sizes, first, first + rows, share.parts)):
                number = len(blocks)
                name = f"{call.name}/{number + 1}"
                cut, block = self._cut(name, source, start, stop, share)
                units += [cut] if cut is not None else []
                args = _with_refs(call.args, block.outputs)
                outputs = self._references(name, call, stop - start)
                part = Part(of=call.plan_name, number=number, count=count)
                shapes = tuple((stop - start, columns) for _, columns in call.sequence_shapes)
                made = dataclasses.replace(
                    call, name=name, args=args, outputs=outputs, part=part, sequence_shapes=shapes
                )
                units.append(_Unit(made, share))
                blocks.append(Block(stop - start, block.positions, outputs))
            first += rows
        self._blocks[call.name] = blocks
        return units

    def _training(self, call: Call, placement: Placement) -> list[_Unit]:
        """Equal parts of the rows of every term, and what makes these rows."""
        where, count = f"plan.calls.{call.plan_name}.parts", placement.parts
        units, after, orders = list[_Unit](), (), set[str]()
        for number in range(count):
            is_last = number == count - 1
            found: dict[tuple[str, int], Ref] = {}
            for refs in row_refs_of_terms(call):
                rows, group = refs[0].shape[0], group_of(self._graph, refs, where)
                if rows % (count * group):
                    raise PlanError(
                        f"{where}: must divide {rows // group} {f'groups of {group} ' if group > 1 else ''}rows. Got "
                        f"{count}. Use another number of parts."
                    )
                bounds = rows // count * number, rows // count * (number + 1)
                more, some_rows, order = self._some_rows(call, refs, bounds, placement)
                units += more
                found |= some_rows
                orders.add(order)
            part = dataclasses.replace(
                call, name=call.name if is_last else f"{call.name}/{number + 1}", args=_with_refs(call.args, found),
                outputs=call.outputs if is_last else (), writes=call.writes if is_last else None,
                sequence_shapes=tuple((rows // count, columns) for rows, columns in call.sequence_shapes),
                part=Part(of=call.plan_name, number=number, count=count, after=after),
            )  # fmt: skip
            units.append(_Unit(part, placement))
            after = (part.name,)
        orders.discard("")
        if len(orders) != 1:
            raise PlanError(
                f"{where}: a train call in parts begins while a generation in parts goes on. Got rows of "
                f"{' and '.join(sorted(orders)) or 'no generation in parts'}. Leave `parts` out here, or give them to "
                "one generation."
            )
        (self._source[call.name],) = orders
        return units

    def _some_rows(
        self, of: Call, refs: Sequence[Ref], bounds: tuple[int, int], on: Placement
    ) -> tuple[list[_Unit], dict[tuple[str, int], Ref], str]:
        """The calls that make some rows for a part of a train call, (call, leaf) -> the reference to these rows, and
        the generation in whose order they are counted; empty for their own."""
        units, found = list[_Unit](), dict[tuple[str, int], Ref]()
        orders = dict[str, str]()
        for name in dict.fromkeys(ref.call for ref in refs):
            wanted = {(ref.call, ref.leaf): ref for ref in refs if ref.call == name}
            made = next((call for call in self._graph.calls if call.name == name), None)
            if made is not None and made.kind == "compute":
                more, outputs, orders[name] = self._compute_on_rows(of, made, bounds, on)
                units += more
                found |= {key: outputs[key[1]] for key in wanted}
                continue
            blocks = [Block(rows := refs[0].shape[0], range(rows), wanted)]
            if name in self._blocks:
                blocks = [
                    dataclasses.replace(x, outputs={key: jax.tree.leaves(x.outputs)[key[1]] for key in wanted})
                    for x in self._blocks[name]
                ]
                is_generated = made is not None and made.kind == "generate"
                orders[name] = name if is_generated else self._source.get(name, "")
            cut, block = self._cut(f"{of.name}/{name}/{bounds[0]}-{bounds[1]}", blocks, *bounds, on)
            units += [cut] if cut is not None else []
            found |= block.outputs
            orders.setdefault(name, "")
        if len(set(orders.values())) > 1:
            got = ", ".join(f"{name} {f'as {x} hands them on' if x else 'whole'}" for name, x in orders.items())
            raise PlanError(
                f"plan.calls.{of.plan_name}.parts: all calls between one generation in parts and a train call in parts "
                f"must be in parts too. Got {got}. Give them `parts`, or leave them out here."
            )
        return units, found, next(iter(orders.values()), "")

    def _compute_on_rows(
        self, of: Call, call: Call, bounds: tuple[int, int], on: Placement
    ) -> tuple[list[_Unit], list[Ref], str]:
        """A `compute` call on some rows: as `_some_rows`, with the leaves of its outputs."""
        units = list[_Unit]()
        if (call.name, bounds) not in self._computed:
            inputs = [ref for ref in call.refs if ref.has_rows]
            units, found, order = self._some_rows(of, inputs, bounds, on)
            name, rows = f"{call.name}/{bounds[0]}-{bounds[1]}", bounds[1] - bounds[0]
            outputs = self._references(name, call, rows)
            part = dataclasses.replace(call, name=name, args=_with_refs(call.args, found), outputs=outputs)
            units.append(_Unit(part, self._beside(on)))
            self._computed[call.name, bounds] = jax.tree.leaves(outputs), order
        return units, *self._computed[call.name, bounds]

    def _references(self, name: str, call: Call, rows: int) -> Any:
        """References to the outputs of a part with so many rows."""
        leaves, structure = jax.tree.flatten(call.outputs)

        def of_part(leaf: int, ref: Ref) -> Ref:
            shape = (rows, *ref.shape[1:]) if ref.has_rows else ref.shape
            aval = jax.ShapeDtypeStruct(shape, ref.dtype)
            return Ref(name, leaf, aval, has_rows=ref.has_rows, recorder=ref.recorder)

        return structure.unflatten([of_part(leaf, ref) for leaf, ref in enumerate(leaves)])

    def _blocks_of_inputs(self, call: Call) -> list[Block]:
        """The rows among a call's inputs in blocks, whose `outputs` map each of its references to that of the block.
        Those of one call in parts are its blocks; otherwise there is one block, of all rows in their order."""
        refs = [ref for ref in call.refs if ref.has_rows]
        sources = {ref.call for ref in refs}
        name = next(iter(sources)) if len(sources) == 1 else ""
        if name not in self._blocks:
            return [Block(call.num_rows, range(call.num_rows), {(ref.call, ref.leaf): ref for ref in refs})]
        self._source[call.name] = self._source.get(name, name)
        return [
            Block(
                block.rows,
                block.positions,
                {(name, ref.leaf): jax.tree.leaves(block.outputs)[ref.leaf] for ref in refs},
            )
            for block in self._blocks[name]
        ]

    def _rows_of(self, call: Call, first: int, rows: int, share: Placement) -> tuple[_Unit | None, Any]:
        """The prompts of a share, and the call that cuts them out of all, if it does not have them all."""
        prompts = call.args[0]
        if rows == call.num_rows:
            return None, prompts
        refs = jax.tree.leaves(prompts)
        block = Block(call.num_rows, range(call.num_rows), {(ref.call, ref.leaf): ref for ref in refs})
        cut, cut_block = self._cut(f"{call.name}/{first}", [block], first, first + rows, share)
        return cut, _with_refs(prompts, cut_block.outputs)

    def _cut(self, name: str, source: list[Block], start: int, stop: int, on: Placement) -> tuple[_Unit | None, Block]:
        """Some rows of consecutive blocks, counted over all of them; and the call that cuts them out, unless they are
        one of the blocks."""
        spans: list[Span] = []
        first = 0
        for number, block in enumerate(source):
            low, high = max(start, first), min(stop, first + block.rows)
            if low < high:
                spans.append((number, low - first, high - first))
            first += block.rows
        if len(spans) == 1 and spans[0][2] - spans[0][1] == source[spans[0][0]].rows:
            return None, source[spans[0][0]]
        name, rows = f"{name}.rows", stop - start
        used = [source[number] for number, _, _ in spans]
        keys = list(used[0].outputs)
        trees = [[block.outputs[key] for key in keys] for block in used]
        known = [block.positions for block in used]
        outputs = [
            Ref(name, i, jax.ShapeDtypeStruct((rows, *ref.shape[1:]), ref.dtype), has_rows=True, recorder=ref.recorder)
            for i, ref in enumerate(trees[0])
        ]
        if any(isinstance(positions, Ref) for positions in known):
            trees = [[*tree, positions] for tree, positions in zip(trees, known, strict=True)]
            positions = Ref(name, len(outputs), _positions_aval(rows), has_rows=True, recorder=None)
            all_outputs = [*outputs, positions]
        else:  # blocks in the order of the call
            at = [positions[low:high] for positions, (_, low, high) in zip(known, spans, strict=True)]
            positions, all_outputs = range(at[0].start, at[-1].stop), outputs
        bounds = tuple((low, high) for _, low, high in spans)
        call = Call(
            name=name, kind="compute", function=cut_rows, args=(trees, bounds), outputs=all_outputs,
            iteration=self._graph.calls[0].iteration,
        )  # fmt: skip
        return _Unit(call, self._beside(on)), Block(rows, positions, dict(zip(keys, outputs, strict=True)))

    def _beside(self, on: Placement | None) -> Placement:
        """Where a `compute` call runs that serves a call on a placement; of one on the host, on the first device."""
        first = next(iter(self._plan.placements.values())).devices[:1]
        devices = on.devices if on is not None and on.devices else first
        return Placement(devices, Strategy(data=len(devices)))

    def _gather(self, name: str) -> _Unit:
        """The call that puts the blocks of a call into its own order."""
        (whole,) = (call for call in self._graph.calls if call.name == name)
        blocks, later = self._blocks[name], self._graph.calls[self._graph.calls.index(whole) + 1 :]
        needing = [c for c in later if any(ref.call == name for ref in c.refs) and self._placement(c).is_whole]
        first = next((c for c in needing if c.kind != "host"), None)
        on = self._placement(first) if first is not None else self._placement(whole)
        trees = [jax.tree.leaves(block.outputs) for block in blocks]
        positions = [block.positions for block in blocks]
        settings = tuple((x.start, x.stop) if isinstance(x, range) else None for x in positions)
        args = (trees, [x for x in positions if isinstance(x, Ref)], settings)
        call = Call(
            name=name, kind="compute", function=in_order, args=args, outputs=whole.outputs, iteration=whole.iteration
        )
        return _Unit(call, self._beside(on))

    # Their order

    def _finish(self, call: Call) -> None:
        """Adds what is left of a call."""
        units = self._units[call.name]
        while units:
            unit = units.pop(0)
            self._add(unit)
            if unit.call.kind == "generate":
                if not any(other.call.kind == "generate" for other in units):  # all of it has been dispatched
                    self._begin_others(call, unit, units, before=unit.call.name)
                self._begin_others(call, unit, units)

    def _add(self, unit: _Unit) -> None:
        for ref in unit.call.refs:
            self._add_gather(ref.call)
        self._ordered.append(unit)
        self._there.add(unit.call.name)
        if self._needs_host(unit):
            self._wait_for_host.add(unit.call.name)

    def _needs_host(self, unit: _Unit) -> bool:
        return unit.call.kind == "host" or any(ref.call in self._wait_for_host for ref in unit.call.refs)

    def _add_gather(self, name: str) -> None:
        if (unit := self._gathers.pop(name, None)) is not None:
            self._ordered.append(unit)
            self._there.add(name)

    def _begin_others(self, generation: Call, now: _Unit, left: Sequence[_Unit], before: str = "") -> None:
        """Adds parts of later calls whose rows are there, and whose devices the generation does not need any more.
        `before`: a part of the generation that is not counted as there, so that what needs none of its rows goes
        first."""
        placement = self._placement(generation)
        busy = {device for unit in (now, *left) for device in unit.placement.devices}
        if any(unit.call.part and unit.call.part.migrate and not unit.call.part.handed_on[0] for unit in left):
            busy |= {device for share in (placement, *placement.shares) for device in share.devices}  # rows leave them
        for call in self._graph.calls:
            if self._source.get(call.name) != generation.name:
                continue
            version = (call.weights, call.reads)
            if not {c.name for c in self._graph.calls if c.writes and (c.weights, c.writes) == version} <= self._there:
                continue
            units = self._units[call.name]
            while units:
                unit, needs = units[0], {ref.call for ref in units[0].call.refs} - set(self._graph.inputs)
                is_busy = unit.call.kind != "host" and not busy.isdisjoint(unit.placement.devices)
                waits = not needs <= self._there - {before} or (
                    bool(left) and unit.call.kind != "host" and self._needs_host(unit)
                )
                if is_busy or waits:
                    break
                self._add(units.pop(0))


def _positions_aval(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows,), np.dtype(np.int32))


def _with_refs(args: Any, found: dict[tuple[str, int], Ref]) -> Any:
    """Arguments with other references in the place of those that have rows."""
    return jax.tree.map(lambda x: found.get((x.call, x.leaf), x) if isinstance(x, Ref) else x, args)


def cut_rows(blocks: list[list[jax.Array]], spans: tuple[tuple[int, int], ...]) -> list[jax.Array]:
    """Rows of consecutive blocks: from each block those of its span."""
    cut = [[x[low:high] for x in block] for block, (low, high) in zip(blocks, spans, strict=True)]
    return [jnp.concatenate(each) for each in zip(*cut, strict=True)]


def in_order(
    blocks: list[list[jax.Array]], positions: list[jax.Array], spans: tuple[tuple[int, int] | None, ...]
) -> list[jax.Array]:
    """The rows of all blocks in the order of the whole call. `spans`: the first and last position of a block, or None
    where `positions` has those of each row."""
    given = iter(positions)
    places = [next(given) if span is None else jnp.arange(*span, dtype=jnp.int32) for span in spans]
    place_B = jnp.concatenate(places)
    every = [jnp.concatenate(each) for each in zip(*blocks, strict=True)]
    return [jnp.zeros_like(x).at[place_B].set(x, unique_indices=True) for x in every]
