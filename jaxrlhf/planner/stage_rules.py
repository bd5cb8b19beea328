"""What pipeline stages ask of a call, and how a call runs through them, in words."""

from jaxrlhf.call_graph import Call
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.schedules.schedule import bubble_warning
from jaxrlhf.sharding.stages import layers_of_stages
from jaxrlhf.sharding.strategy import Strategy


def stage_fault(call: Call, strategy: Strategy, model: ModelConfig) -> str | None:
    """What is wrong with the stages of a call of a model, after the call's name in the plan. None: nothing.

    A stage has a layer at least. Generation has one part of the layers on a stage.
    """
    layers, pipeline, chunks = model.num_layers, strategy.pipeline, strategy.chunks
    if call.kind == "generate" and chunks > 1:
        entry = f"{{pipeline: {pipeline}, data: {strategy.data}, fsdp: {strategy.fsdp}, tensor: {strategy.tensor}}}"
        return (
            f".chunks: must be 1 where a call generates, since its stages have one part of the layers each. Got "
            f"{chunks}. Leave chunks out; if they are from `default`, give the call an entry of its own, {entry}."
        )
    if strategy.num_stages <= layers:
        return None
    if pipeline <= layers:
        most = layers // pipeline
        remedy = f"Use chunks {most} or fewer" if most > 1 else "Leave chunks out"
    else:
        remedy = f"Use pipeline {layers} or fewer" if layers > 1 else "Leave pipeline out"
    product = "pipeline x chunks" if chunks > 1 else "pipeline"
    got = f"{pipeline} x {chunks} = {strategy.num_stages}" if chunks > 1 else str(pipeline)
    return f": {product} must be at most num_layers={layers}, a layer for each stage. Got {got}. {remedy}."


def computes_in_stages(strategy: Strategy) -> str | None:
    """What is wrong with an entry of a `compute` call. None: nothing."""
    if strategy.pipeline == 1:
        return None
    return (
        f".pipeline: must be 1, since a `compute` call has no layers to put on stages. Got {strategy.pipeline}. Leave "
        "pipeline out, or use data."
    )


def stage_warning(call: Call, strategy: Strategy) -> str | None:
    """What to say of a call whose stages have too little to do. None: nothing."""
    if call.kind not in ("train", "infer"):  # generation makes as many micro-batches as there are stages
        return None
    warning = bubble_warning(strategy.pipeline, strategy.chunks, strategy.micro_batches)
    return None if warning is None else f"plan.{call.plan_name}: {warning}"


def micro_batches_of(call: Call, strategy: Strategy) -> int:
    """Micro-batches of a call of a model. Generation cuts each into as many again as there are stages."""
    return strategy.micro_batches * (strategy.pipeline if call.kind == "generate" else 1)


def stages_in_words(call: Call, strategy: Strategy, model: ModelConfig, fused_with: str = "") -> str:
    """`through 2 stages of 3 + 2 layers, 1F1B`; empty for a call without stages.

    Args:
        fused_with: The call that it shares a schedule with.
    """
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
