"""A plan as a table: the calls of a graph, their placements, and how their rows are cut."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.plan_config import Placement, Tail
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import copied_rows, micro_batches_of, term_rows
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Strategy


def plan_rows(plan: Plan, graph: CallGraph, models: Mapping[str, ModelConfig]) -> list[dict[str, Any]]:
    """The graph and its plan as a table, with every batch size that follows. `models` are those of roles."""
    table = []
    for call in graph.calls:
        fused_with = next((name for name in plan.fuse if name != call.plan_name), "")
        row: dict[str, Any] = {
            "call": call.name,
            "needs": ", ".join(graph.dependencies(call)) or "-",
            "placement": "host" if call.kind == "host" else str(plan[call]),
            "rows": call.num_rows * call.num_drawn,
            "tokens": call.num_tokens if call.role else None,
            "cut into": "-",
        }
        if call.kind != "host":
            model = models.get(call.role or "")
            row["cut into"] = _cut(call, plan[call].strategy, model, fused_with if call.plan_name in plan.fuse else "")
        if (placement := plan.placements.get(call.plan_name)) is not None and not placement.is_whole:
            row["cut into"] = parts_in_words(placement, on_host=call.kind == "host")
        table.append(row)
    return table


def parts_in_words(placement: Placement, *, on_host: bool) -> str:
    """`2 parts on 0-3; 25 % of the rows in 1 part on 4-7; the last 20 % go on on 0`."""

    def count(each: Placement | Tail) -> str:
        return f"{each.parts} part{'s' if each.parts > 1 else ''}"

    if on_host:
        return count(placement)
    words = [f"{count(placement)} on {devices_to_text(placement.devices)}"]
    for share in placement.shares:
        words.append(f"{share.rows:.0%} of the rows in {count(share)}, {share}")
    if (tail := placement.tail) is not None:
        how = "with their caches" if tail.migrate == "cache" else "as tokens"
        words.append(
            f"the last {tail.rows:.0%} move {how} to {devices_to_text(tail.devices)}, {tail.strategy}, in {count(tail)}"
        )
    return "; ".join(words)


def _cut(call: Call, strategy: Strategy, model: ModelConfig | None, fused_with: str) -> str:
    """The cut of a call's rows, in words: '4 updates of 128 rows in 2 micro-batches of 64, 16 a device'; and its
    layers: 'through 2 stages of 4 layers, 1F1B'."""
    rows = (call.num_rows + copied_rows(call, strategy)) * call.num_drawn
    micro_batches, words = micro_batches_of(call, strategy), []
    if not rows:
        return "-"
    if call.kind == "train":
        count, epochs = call.update.mini_batches, call.update.epochs
        rows_each = [rows // count for rows in term_rows(call)]
        updates = f"{count} update{'s' if count > 1 else ''} of {' + '.join(map(str, rows_each))} rows"
        words.append(f"{epochs} epochs of {updates}" if epochs > 1 else updates)
        rows = max(rows_each)
    if call.kind != "compute" and micro_batches > 1:
        rows //= micro_batches
        words.append(f"{micro_batches} micro-batches of {rows}")
    copies = copied_rows(call, strategy) * call.num_drawn
    cut = " in ".join(words) + (", " if words else "") + f"{rows // strategy.num_row_shards} a device"
    cut += f" ({copies} of no weight among them)" if copies else ""
    if call.kind == "generate" and strategy.slots:
        cut += f", in {strategy.slots} slots"
        cut += f" that share {strategy.shared_prompts} prompts" if strategy.shared_prompts else ""
    stages = _stages_in_words(call, strategy, model, fused_with) if model is not None else ""
    return f"{cut}; {stages}" if stages else cut


def _stages_in_words(call: Call, strategy: Strategy, model: ModelConfig, fused_with: str) -> str:
    """`through 2 stages of 3 + 2 layers, 1F1B`; empty for a call without stages."""
    if strategy.pipeline == 1:
        return ""
    counts = [len(layers) for layers in layers_of_stages(model.num_layers, strategy.num_stages)]
    each = f"{counts[0]} layer{'s' if counts[0] > 1 else ''}"
    if len(set(counts)) > 1 and len(counts) <= 4:
        each = " + ".join(map(str, counts)) + " layers"
    elif len(set(counts)) > 1:
        each = f"{counts.index(counts[-1])} x {counts[0]} + {counts.count(counts[-1])} x {counts[-1]} layers"
    stages = f"{strategy.pipeline} stages"
    if strategy.chunks > 1:
        stages += f" with {strategy.chunks} chunks each"
    words = f"through {stages} of {each}"
    if fused_with:
        words += f", fused with {fused_with}"
    elif call.kind == "train":
        names = {"1f1b": "1F1B", "gpipe": "GPipe"}
        words += f", {'interleaved ' if strategy.chunks > 1 else ''}{names[strategy.schedule]}"
    return words
