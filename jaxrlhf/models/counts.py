"""How much work a model's calls are: operations of their matrix products, bytes that decoding reads.

Letters: B rows, T columns that the layers see, S the last columns of T whose outputs are wanted.

One multiplication and one addition are two operations. What is not a matrix product (norms, softmax, the optimizer) is
not counted, nor what is computed twice to save memory. Causal attention counts the half that is needed.
"""

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import num_parameters


def forward_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward pass over full rows, whose last `scored` columns get an output.

    The last layer needs keys and values of all columns, and the rest of itself for the scored ones only.
    """
    D, F, h = config.hidden_size, config.intermediate_size, config.head_size
    H, K = config.num_heads, config.num_kv_heads
    keys_values = 2 * D * 2 * K * h
    others = 2 * (D * H * h + H * h * D + 3 * D * F)
    seen = columns * (columns + 1) // 2  # pairs of a query and a key that it sees
    seen_by_scored = seen - (columns - scored) * (columns - scored + 1) // 2
    pair = 2 * 2 * H * h
    layer = columns * (keys_values + others) + seen * pair
    last_layer = columns * keys_values + scored * others + seen_by_scored * pair
    head = scored * 2 * D * (config.vocab_size if config.head == "lm" else 1)
    return rows * ((config.num_layers - 1) * layer + last_layer + head)


def train_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward and a backward pass: the backward has two products for each of the forward's."""
    return 3 * forward_flops(config, rows=rows, columns=columns, scored=scored)


def decode_step_bytes(config: ModelConfig, *, rows: int, tokens: float) -> float:
    """Bytes that one decoding step must read: all weights, and the keys and values of `tokens` tokens a row.

    Of an embedding that is not the head too, a step reads the rows of its tokens alone.
    """
    size = config.compute_dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]
    embedding = config.vocab_size * config.hidden_size
    weights = num_parameters(config) - (0 if config.tie_embeddings else embedding - rows * config.hidden_size)
    return size * (weights + cache_entries(config, rows=rows, slots=1) * tokens)


def cache_entries(config: ModelConfig, *, rows: int, slots: int) -> int:
    """Numbers that a cache of keys and values holds."""
    return config.num_layers * 2 * rows * slots * config.num_kv_heads * config.head_size
