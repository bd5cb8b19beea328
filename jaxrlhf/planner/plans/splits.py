"""Splits of a call: its model over `tensor` and `fsdp`, its rows over mini-batches, micro-batches and devices."""

import functools

import jax

from jaxrlhf.call_graph import Call, Ref
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.axes import WEIGHTS_AT_REST
from jaxrlhf.sharding.row_padding import num_copies, row_parts
from jaxrlhf.sharding.strategy import Strategy

_SIZES = {"heads": "num_heads", "mlp": "intermediate_size", "embed": "hidden_size"}
"""Logical axis of weights -> the size of a model that a degree must divide if it splits the axis. Key-value heads are
repeated, and vocabularies padded, where they do not divide."""


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, from 1 on."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def undivided_sizes(model: ModelConfig, **degrees: int) -> list[tuple[str, str]]:
    """Pairs of a degree and a size of the model that it splits but does not divide. Empty if there are none.

    >>> undivided_sizes(ModelConfig(num_heads=4, intermediate_size=96), tensor=3, fsdp=2)
    [('tensor', 'num_heads')]
    """
    return [
        (name, size)
        for name, degree in degrees.items()
        for axis, size in _SIZES.items()
        if WEIGHTS_AT_REST[axis] == name and getattr(model, size) % degree
    ]


def term_rows(call: Call) -> tuple[int, ...]:
    """Rows of each term of a train call, which its mini-batches divide."""
    terms = (jax.tree.leaves(term) for term in call.terms)
    return tuple(max(x.shape[0] for x in leaves if isinstance(x, Ref) and x.has_rows) for leaves in terms)


def micro_batches_of(call: Call, strategy: Strategy) -> int:
    """Micro-batches of a call of a model. Generation splits each into as many parts as there are stages."""
    return strategy.micro_batches * (strategy.pipeline if call.kind == "generate" else 1)


def copied_rows(call: Call, strategy: Strategy) -> int:
    """The number of rows without weight that pad a call's own if these do not divide: `sharding.row_padding`."""
    counts = {ref.shape[0] for ref in call.refs if ref.has_rows}
    if call.kind not in ("generate", "infer") or not call.row_wise or len(counts) != 1:
        return 0
    return num_copies(call.num_rows, row_parts(call.kind, strategy))


def splits_rows(call: Call, strategy: Strategy) -> bool:
    """True if the inputs and outputs of a call with rows are split over its devices; else each device has all rows."""
    if call.kind == "compute":
        refs = [*call.refs, *call.output_refs]
        return not any(ref.shape[0] % strategy.num_row_shards for ref in refs if ref.has_rows)
    return copied_rows(call, strategy) == 0
