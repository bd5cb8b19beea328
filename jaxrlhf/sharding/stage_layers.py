"""The layers of the stages of a pipeline."""

import functools
import itertools

from jaxrlhf.sharding.strategy import Strategy


@functools.cache
def layers_of_stages(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of every virtual stage, in order. If they do not divide evenly, the first stages have one more, since
    the last one also computes the head. Raises ValueError if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ValueError(f"must be at most the number of layers, {num_layers}. Got {num_stages} stages.")
    each, more = divmod(num_layers, num_stages)
    ends = [each * stage + min(stage, more) for stage in range(num_stages + 1)]
    return tuple(range(first, end) for first, end in itertools.pairwise(ends))


@functools.cache
def stage_of_layer(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The virtual stage of every layer."""
    return tuple(stage for stage, layers in enumerate(layers_of_stages(num_layers, num_stages)) for _ in layers)


def device_group(stage: int, strategy: Strategy) -> int:
    """The group of devices of a virtual stage. Stages are assigned to groups round-robin."""
    return stage % strategy.pipeline
