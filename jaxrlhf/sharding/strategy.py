"""How one call is parallelized: its degrees over the mesh axes, how it deals its rows, and what it recomputes."""

import dataclasses
from typing import Literal, get_args

from jaxrlhf.require import require_at_least_one, require_fields

Remat = Literal["none", "dots", "layer"]
"""What a train call keeps of each layer for its backward pass: `none` keeps everything and recomputes nothing, `dots`
keeps the results of matrix products with weights, `layer` keeps only the layer's input."""


PipelineSchedule = Literal["1f1b", "gpipe"]
"""In which order a stage of a train call works: one forward, one backward (Narayanan et al. 2019, PipeDream-Flush), or
all forwards before all backwards (Huang et al. 2019, arXiv:1811.06965), which keeps every micro-batch's activations."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Degrees of parallelism. Their product is the number of devices."""

    data: int = 1
    """Copies of the weights, each working on its own rows."""
    fsdp: int = 1
    """Shards of weights at rest that also split the rows; gathered layer by layer at use."""
    tensor: int = 1
    """Shards of each matrix product: heads, MLP columns and vocabulary."""
    pipeline: int = 1
    """Stages: groups of devices that each have some of the layers, and pass micro-batches on."""
    chunks: int = 1
    """Parts of the layers that a stage has: of 8 layers, 2 stages with 2 chunks have layers 0-1 and 4-5, 2-3 and 6-7.
    A train call is then scheduled as interleaved 1F1B."""
    schedule: PipelineSchedule = "1f1b"
    micro_batches: int = 1
    """Parts into which a train call cuts each mini-batch, and an inference call its rows, to bound activation memory;
    with stages, what passes through them. Generation cuts each part into as many again as there are stages."""
    remat: Remat = "none"
    balance: bool = False
    """Deal the rows of a train or inference call to shards and micro-batches so that each gets as many tokens."""

    def __post_init__(self) -> None:
        require_fields(self, require_at_least_one, "data", "fsdp", "tensor", "pipeline", "chunks", "micro_batches")
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError(
                f"chunks: are parts of a stage, and need a pipeline. Got {self.chunks} with pipeline 1. Set "
                "pipeline to 2, say, or chunks to 1."
            )
        if self.schedule not in get_args(PipelineSchedule):
            raise ValueError(f"schedule: must be 1f1b or gpipe. Got {self.schedule!r}.")
        if self.chunks > 1 and self.schedule != "1f1b":
            raise ValueError(
                f"schedule: with chunks it must be 1f1b, interleaved. Got {self.schedule!r}. Remove schedule or chunks."
            )
        if self.remat not in get_args(Remat):
            raise ValueError(f"remat: must be none, dots or layer. Got {self.remat!r}.")

    @property
    def num_devices(self) -> int:
        return self.pipeline * self.data * self.fsdp * self.tensor

    @property
    def num_stages(self) -> int:
        """Virtual stages: parts of the layers that a micro-batch passes through."""
        return self.pipeline * self.chunks

    @property
    def num_row_shards(self) -> int:
        """Parts into which rows are split over devices."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        degrees = {"pipeline": self.pipeline, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1) or "one device"
