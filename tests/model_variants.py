"""Fields of models that differ from most: OLMo 2's and Gemma 3's, but for `qk_norm`, which both have."""

from typing import Any

from jaxrlhf.models.config import FULL, SLIDING

VARIANTS: dict[str, dict[str, Any]] = {
    "olmo2": dict(norms="after", qk_norm_over="projection"),
    "gemma3": dict(
        norms="both",
        norm_plus_one=True,
        scale_embeddings=True,
        query_pre_attn_scalar=20.0,
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        sliding_window=3,
        layer_types=(SLIDING, SLIDING, FULL),
        rope_local_theta=100.0,
    ),
}
