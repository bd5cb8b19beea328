"""The tokens that the queries of each layer see, and the rotary positions that go with them.

A program that computes the same layer once for several, in a scan or on all stages of a pipeline, gets the spans as
arrays where they differ.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrlhf.models.attention import Window
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Rotation, rotary
from jaxrlhf.sharding.stage_layers import layers_of_stages

_NO_WINDOW = 2**30
"""A window that no sequence outgrows, in an array of windows."""


class Span(NamedTuple):
    """Of one layer."""

    window: Window
    is_local: bool | Bool[Array, ""]
    """True if its positions turn by `rope_local_theta`."""


def layer_spans(config: ModelConfig) -> list[Span]:
    """The span of every layer of a model, in order."""
    has_local = config.rope_local_theta > 0
    return [Span(window, has_local and config.slides(i)) for i, window in enumerate(config.windows)]


def span_of_all(config: ModelConfig) -> Span | None:
    """The span of all layers; None if they differ."""
    spans = layer_spans(config)
    return spans[0] if len(set(spans)) == 1 else None


def scanned_spans(config: ModelConfig) -> Span:
    """The spans of a scan over all layers, as arrays with a leading axis. They differ."""
    return _joined(layer_spans(config))


def spans_on_stage(config: ModelConfig, num_stages: int, stage: Int[Array, ""]) -> list[Span]:
    """The spans of the layers of a stage, in a program that is the same on all stages."""
    spans, numbers = layer_spans(config), layers_of_stages(config.num_layers, num_stages)
    slots = []
    for slot in range(len(numbers[0])):
        every = [spans[layers[slot]] for layers in numbers if slot < len(layers)]  # the first stages may have one more
        joined = _joined(every)
        slots.append(joined if _is_known(joined) else jax.tree.map(lambda x: x[stage], joined))
    return slots


def _is_known(span: Span) -> bool:
    return isinstance(span.is_local, bool)


def _joined(spans: Sequence[Span]) -> Span:
    """Their span, if all have the same; else arrays of them."""
    if len(set(spans)) == 1:
        return spans[0]
    windows = [_NO_WINDOW if span.window is None else span.window for span in spans]
    return Span(jnp.asarray(windows, jnp.int32), jnp.asarray([span.is_local for span in spans]))


def rotations(position: Int[Array, "*B"], config: ModelConfig) -> Callable[[Span], Rotation]:
    """The rotary positions of a layer, by its span."""
    usual = rotary(position, config)
    if not config.rope_local_theta:
        return lambda span: usual
    local = rotary(position, config, local=True)

    def of_span(span: Span) -> Rotation:
        if _is_known(span):
            return local if span.is_local else usual
        return jnp.where(span.is_local, local[0], usual[0]), jnp.where(span.is_local, local[1], usual[1])

    return of_span
