"""Strategies: the degrees of parallelism of a call, its micro-batches, and its rematerialization."""

import dataclasses
from typing import Literal

from jaxrlhf.require import require_at_least_one, require_fields, require_not_negative

Remat = Literal["none", "dots", "layer"]
"""The residuals that a train call saves of each layer for its backward pass: `none` saves all and recomputes nothing,
`dots` saves the results of matrix products with weights, `layer` saves only the input of the layer."""
PipelineSchedule = Literal["1f1b", "gpipe"]
"""The order of the work of a stage in a train call: one forward, one backward (Narayanan et al. 2019, PipeDream-Flush),
or all forwards before all backwards (Huang et al. 2019, arXiv:1811.06965), which saves all micro-batches' residuals."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Degrees of parallelism. Their product is the number of devices.

    >>> Strategy(data=2, tensor=4).num_devices, str(Strategy(pipeline=2, fsdp=2))
    (8, 'pipeline 2 x fsdp 2')
    """

    data: int = 1
    """Copies of the weights, each working on its own rows."""
    fsdp: int = 1
    """Shards of weights at rest that also split the rows; gathered layer by layer at use."""
    tensor: int = 1
    """Shards of each matrix product: heads, MLP columns and vocabulary."""
    pipeline: int = 1
    """Stages: groups of devices that each hold some of the layers, and pass micro-batches on."""
    chunks: int = 1
    """Parts of the layers on each stage: of 8 layers, 2 stages with 2 chunks hold layers 0-1 and 4-5, 2-3 and 6-7.
    A train call is then scheduled as interleaved 1F1B."""
    schedule: PipelineSchedule = "1f1b"
    micro_batches: int = 1
    """Parts into which a train call cuts each mini-batch, and an inference call its rows, to bound activation memory;
    with stages, the parts that pass through them. Generation cuts each part further, into one part for each stage."""
    slots: int = 0
    """Sequences that a generate call decodes at a time on each row shard: one that finishes makes room for a waiting
    prompt. 0 means all at once, until the longest has finished."""
    prefill_rows: int = 8
    """Prompts that are prefilled together where a generate call has `slots`."""
    prefill_tokens: int = 0
    """Tokens of each of these prompts that go through the layers together, which bounds the memory that long ones take.
    0 means all."""
    shared_prompts: int = 0
    """Prompts whose keys and values a generate call with `slots` keeps, and reads, once for all of their samples; of
    each row shard. 0 means that each sample has a copy."""
    remat: Remat = "none"
    balance: bool = False
    """Distribute the rows of a train or inference call so that shards and micro-batches get equally many tokens."""

    def __post_init__(self) -> None:
        require_fields(
            self, require_at_least_one, "data", "fsdp", "tensor", "pipeline", "chunks", "micro_batches", "prefill_rows"
        )
        require_fields(self, require_not_negative, "slots", "prefill_tokens", "shared_prompts")
        if self.shared_prompts and not self.slots:
            raise ValueError(
                f"shared_prompts: are for generation in slots. Got {self.shared_prompts} without slots. Set slots, or "
                "leave shared_prompts out."
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError(
                f"chunks: are parts of a stage, and need a pipeline. Got {self.chunks} with pipeline 1. Set "
                "pipeline to 2, say, or chunks to 1."
            )
        if self.chunks > 1 and self.schedule != "1f1b":
            raise ValueError(
                f"schedule: with chunks it must be 1f1b, interleaved. Got {self.schedule!r}. Remove schedule or chunks."
            )

    @property
    def num_devices(self) -> int:
        return self.pipeline * self.data * self.fsdp * self.tensor

    @property
    def num_stages(self) -> int:
        """Virtual stages: parts of the layers that a micro-batch passes through."""
        return self.pipeline * self.chunks

    @property
    def num_row_shards(self) -> int:
        """The number of parts into which rows are split over devices."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        degrees = {"pipeline": self.pipeline, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1) or "one device"
