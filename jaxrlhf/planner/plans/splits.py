"""How a call is split: its model over `tensor` and `fsdp`, its rows over mini-batches, micro-batches and devices."""

import jax

from jaxrlhf.call_graph import Call, Ref
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.row_padding import num_copies, row_parts
from jaxrlhf.sharding.strategy import Strategy

SPLIT_SIZES = {
    "tensor": ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"),
    "fsdp": ("hidden_size",),
}
"""Degree -> the sizes of a model that it splits, and so must divide."""


def undivided_sizes(model: ModelConfig, **degrees: int) -> list[tuple[str, str]]:
    """Degrees, each with a size of the model that it does not divide. Empty: the model can be split so.

    >>> undivided_sizes(ModelConfig(num_heads=4, num_kv_heads=2), tensor=4, fsdp=2)
    [('tensor', 'num_kv_heads')]
    """
    return [
        (name, size) for name, degree in degrees.items() for size in SPLIT_SIZES[name] if getattr(model, size) % degree
    ]


def term_rows(call: Call) -> tuple[int, ...]:
    """Rows of each term of a train call, which its mini-batches divide."""
    terms = (jax.tree.leaves(term) for term in call.terms)
    return tuple(max(x.shape[0] for x in leaves if isinstance(x, Ref) and x.has_rows) for leaves in terms)


def micro_batches_of(call: Call, strategy: Strategy) -> int:
    """Micro-batches of a call of a model. Generation cuts each into as many again as there are stages."""
    return strategy.micro_batches * (strategy.pipeline if call.kind == "generate" else 1)


def copied_rows(call: Call, strategy: Strategy) -> int:
    """Rows of no weight that a call is given beside its own, where these do not divide: `sharding.row_padding`."""
    counts = {ref.shape[0] for ref in call.refs if ref.has_rows}
    if call.kind not in ("generate", "infer") or not call.row_wise or len(counts) != 1:
        return 0
    return num_copies(call.num_rows, row_parts(call.kind, strategy))


def splits_rows(call: Call, strategy: Strategy) -> bool:
    """Whether arrays with rows lie split over the devices of a call, its inputs and outputs: else each has all rows."""
    if call.kind == "compute":
        refs = [*call.refs, *call.output_refs]
        return not any(ref.shape[0] % strategy.num_row_shards for ref in refs if ref.has_rows)
    return copied_rows(call, strategy) == 0
