"""Operations of programs by formulas, beside which compiled ones are counted."""

from jaxrlhf.models.architecture import pair_flops, product_flops
from jaxrlhf.models.attention import block_keys, query_blocks
from jaxrlhf.models.config import ModelConfig


def program_flops(
    config: ModelConfig, *, rows: int, columns: int, scored: int, attention: str, gradient: bool = False
) -> int:
    """Operations of a forward pass, or of a forward and a backward pass that recomputes nothing. Pairs of a query and a
    key that the mask hides are counted. The backward pass of cuDNN's attention has five products for the two of its
    forward pass, since it saves no scores."""

    def pairs(queries: int, window: int | None) -> int:
        if attention == "cudnn":
            return (queries + queries % 2) * (columns + columns % 2)
        first = columns - queries
        return sum(
            (end - start) * len(block_keys(first + start, first + end, window)) for start, end in query_blocks(queries)
        )

    products = product_flops(config, columns=columns, last_layer=scored, scored=scored)
    *others, last = config.windows
    of_pairs = (sum(pairs(columns, window) for window in others) + pairs(scored, last)) * pair_flops(config)
    if not gradient:
        return rows * (products + of_pairs)
    return rows * (3 * products + of_pairs * (7 if attention == "cudnn" else 6) // 2)
