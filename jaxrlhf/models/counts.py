"""The work of a model's calls: operations of their matrix products, bytes that decoding reads.

Letters: B rows, T columns that the layers see, S the last columns of T whose outputs are wanted.

One multiplication and one addition are two operations. What is not a matrix product (norms, softmax, the optimizer) is
not counted, nor what is computed twice to save memory, nor the half of attention that is hidden.
"""

from jaxrlhf.models.architecture import cached_numbers, head_numbers, matrix_numbers, num_parameters, pair_flops
from jaxrlhf.models.attention import seen_pairs
from jaxrlhf.models.config import ModelConfig


def forward_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward pass over full rows, whose last `scored` columns get an output.

    The last layer needs keys and values of all columns, and the rest of itself for the scored ones only.
    """
    pairs = (config.num_layers - 1) * seen_pairs(columns, columns) + seen_pairs(scored, columns)
    products = product_flops(config, columns=columns, last_layer=scored, scored=scored)
    return rows * (products + pairs * pair_flops(config))


def train_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of a forward and a backward pass: the backward has two products for each of the forward's."""
    return 3 * forward_flops(config, rows=rows, columns=columns, scored=scored)


def product_flops(config: ModelConfig, *, columns: int, last_layer: int, scored: int) -> int:
    """Operations of a row's products with weights in a forward pass, whose last layer works on its last `last_layer`
    columns. As many for the gradient of all these weights, and for that of what they multiply."""
    everywhere = matrix_numbers(config, ("key", "value"))
    others = matrix_numbers(config) - everywhere
    layers = config.num_layers * columns * everywhere + ((config.num_layers - 1) * columns + last_layer) * others
    return 2 * (layers + scored * head_numbers(config))


def decode_step_bytes(config: ModelConfig, *, rows: int, tokens: float) -> float:
    """Bytes that one decoding step must read: all weights, and the keys and values of `tokens` tokens a row.

    Of an embedding that is not the head too, a step reads the rows of its tokens alone.
    """
    embedding = config.vocab_size * config.hidden_size
    weights = num_parameters(config) - (0 if config.tie_embeddings else embedding - rows * config.hidden_size)
    return config.itemsize * (weights + config.num_layers * rows * cached_numbers(config) * tokens)
