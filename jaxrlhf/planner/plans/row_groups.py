"""Rows that belong together on the way from a generation to a train call in parts, such as the samples of a prompt."""

from collections.abc import Sequence

import jax

from jaxrlhf.call_graph import Call, CallGraph, Ref
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError


def sequences_together(graph: CallGraph, plan: Plan) -> dict[str, int]:
    """Generation -> neighboring sequences that it hands on together, for the groups of a train call in parts."""
    together: dict[str, int] = {}
    for call in graph.calls:
        placement = plan.placements.get(call.plan_name) or Placement()
        if call.kind != "train" or placement.is_whole:
            continue
        where = f"plan.calls.{call.plan_name}.parts"
        for refs in row_refs_of_terms(call):
            size = group_of(graph, refs, where)
            for source in _generations(graph, refs) if size > 1 else ():
                if source.num_drawn % size:
                    raise PlanError(
                        f"{where}: groups of rows that belong together must be samples of one prompt. Got groups of "
                        f"{size}, and {source.num_drawn} samples of {source.plan_name}. Leave `parts` out."
                    )
                together[source.name] = source.num_drawn
    return together


def row_refs_of_terms(call: Call) -> list[list[Ref]]:
    """The references with rows of each term of a train call."""
    leaves = (jax.tree.leaves(term) for term in call.terms)
    return [[x for x in each if isinstance(x, Ref) and x.has_rows] for each in leaves]


def group_of(graph: CallGraph, refs: Sequence[Ref], where: str) -> int:
    """The rows that belong together where some rows are made. Raises PlanError if all do."""
    calls, size = {call.name: call for call in graph.calls}, 1
    for name in {ref.call for ref in refs}:
        made = calls.get(name)
        if made is None or made.kind != "compute":
            continue
        if isinstance(made.groups_of, str):
            why = f"needs the whole batch for {made.groups_of}"
            why = why if made.groups_of else "does not say which rows belong together"
            raise PlanError(
                f"{where}: a train call begins on some rows only if the calls that make them need no others. Got "
                f"{made.plan_name}, which {why}. Leave `parts` out, or change the setting; a function of your own says "
                "so by `compute(..., groups_of=1)`."
            )
        inputs = [ref for ref in made.refs if ref.has_rows]
        size = max(size, made.groups_of, group_of(graph, inputs, where))
    return size


def _generations(graph: CallGraph, refs: Sequence[Ref]) -> list[Call]:
    """The calls that generate the rows that some rows are made of."""
    found, names = dict[str, Call](), {ref.call for ref in refs}
    for call in reversed(graph.calls):
        if call.name in names:
            names |= {ref.call for ref in call.refs if ref.has_rows}
            if call.kind == "generate":
                found[call.name] = call
    return list(found.values())
