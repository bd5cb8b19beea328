"""How much work a model's calls are: operations of their matrix products, bytes that decoding reads.

Letters: B rows, T columns that the layers see, S the last columns of T whose outputs are wanted.

One multiplication and one addition are two operations. What is not a matrix product (norms, softmax, the optimizer) is
not counted, nor what is computed twice to save memory. Causal attention counts the half that is needed, but in
`program_flops`, which is what programs really do.
"""

from jaxrlhf.models.attention import computed_pairs
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import num_parameters


def forward_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward pass over full rows, whose last `scored` columns get an output.

    The last layer needs keys and values of all columns, and the rest of itself for the scored ones only.
    """
    seen = columns * (columns + 1) // 2  # pairs of a query and a key that it sees
    seen_by_scored = seen - (columns - scored) * (columns - scored + 1) // 2
    pairs = (config.num_layers - 1) * seen + seen_by_scored
    products = product_flops(config, columns=columns, last_layer=scored, scored=scored)
    return rows * (products + pairs * _pair_flops(config))


def train_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward and a backward pass: the backward has two products for each of the forward's."""
    return 3 * forward_flops(config, rows=rows, columns=columns, scored=scored)


def program_flops(
    config: ModelConfig, *, rows: int, columns: int, scored: int, attention: str, gradient: bool = False
) -> int:
    """Operations that a program carries out, hidden pairs of queries and keys included: of a forward pass, or of a
    forward and a backward pass that computes nothing anew.

    Layers that are scanned are all alike, so the last one works on all columns too.

    Args:
        attention: How it is computed, as `attention_implementation` says. The backward pass of cuDNN's has five
            products for the two of its forward pass, since it keeps no scores.
    """
    last_layer = columns if config.scan_layers else scored
    pairs = (config.num_layers - 1) * computed_pairs(columns, columns, implementation=attention)
    pairs += computed_pairs(last_layer, columns, implementation=attention)
    products = product_flops(config, columns=columns, last_layer=last_layer, scored=scored)
    of_pairs = pairs * _pair_flops(config)
    if not gradient:
        return rows * (products + of_pairs)
    return rows * (3 * products + of_pairs * (7 if attention == "cudnn" else 6) // 2)


def product_flops(config: ModelConfig, *, columns: int, last_layer: int, scored: int) -> int:
    """Operations of a row's products with weights in a forward pass, whose last layer works on its last `last_layer`
    columns. As many for the gradient of all these weights, and for that of what they multiply."""
    D, F, h = config.hidden_size, config.intermediate_size, config.head_size
    H, K = config.num_heads, config.num_kv_heads
    keys_values = 2 * D * 2 * K * h
    others = 2 * (D * H * h + H * h * D + 3 * D * F)
    head = scored * 2 * D * (config.vocab_size if config.head == "lm" else 1)
    layers = config.num_layers * columns * keys_values + ((config.num_layers - 1) * columns + last_layer) * others
    return layers + head


def _pair_flops(config: ModelConfig) -> int:
    """Operations of a query and a key, in all heads: the score, and the weighted value."""
    return 2 * 2 * config.num_heads * config.head_size


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
