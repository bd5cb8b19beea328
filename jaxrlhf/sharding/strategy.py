"""How one call is parallelized: its degrees over the mesh axes, how it deals its rows, and what it recomputes."""

import dataclasses
from typing import Literal, get_args

Remat = Literal["none", "dots", "layer"]
"""What a train call keeps of each layer for its backward pass: `none` keeps everything and recomputes nothing, `dots`
keeps the results of matrix products with weights, `layer` keeps only the layer's input."""


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
    """Stages of layers. Only 1 so far: no mesh has an axis for them yet."""
    micro_batches: int = 1
    """Parts into which a train call cuts each mini-batch, and an inference call its rows, to bound activation
    memory."""
    remat: Remat = "none"
    balance: bool = False
    """Deal the rows of a train or inference call to shards and micro-batches so that each gets as many tokens."""

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor", "pipeline", "micro_batches"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: must be at least 1. Got {value}.")
        if self.pipeline != 1:
            raise ValueError(f"pipeline: only 1 so far. Got {self.pipeline}. Split over data, fsdp or tensor instead.")
        if self.remat not in get_args(Remat):
            raise ValueError(f"remat: must be none, dots or layer. Got {self.remat!r}.")

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_row_shards(self) -> int:
        """Parts into which rows are split over devices."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        degrees = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1) or "one device"
