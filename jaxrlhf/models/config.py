"""The config of a model: sizes, variants, compute precision; and presets."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.require import require, require_at_least_one, require_fields, require_not_negative, require_positive

Head = Literal["lm", "scalar", "both"]
"""`lm` outputs a distribution over the vocabulary, `scalar` one number per position (a value, a reward); `both` are
two heads on one trunk."""


Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
RopeType = Literal["llama3", "linear"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)
NormPlacement = Literal["before", "after", "both"]
"""The norms of a layer: of what its two blocks (attention and MLP) read, of what they add to the residual stream, or
of both."""
LayerType = Literal["full_attention", "sliding_attention"]
"""Which tokens the queries of a layer see: all earlier ones, or those of a window."""
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)
FULL, SLIDING = LAYER_TYPES


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "max_position_embeddings",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies to longer contexts, as Llama 3 does it, or linear.

    Wavelengths beyond `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, those below
    `original_max_position_embeddings / high_freq_factor` are kept, and those between are interpolated; or, if it is
    linear, all are stretched.

    >>> ModelConfig(rope_scaling=RopeScaling(factor=4.0, type="linear")).rope_scaling.factor
    4.0
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    type: RopeType = "llama3"

    def __post_init__(self) -> None:
        require_fields(self, require_positive, *ROPE_NUMBERS)
        low, high = self.low_freq_factor, self.high_freq_factor
        require(high > low, "high_freq_factor", f"must exceed low_freq_factor={low}", high)


ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of `RopeScaling`."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    >>> ModelConfig(hidden_size=256, num_heads=8, num_kv_heads=2, dtype="bfloat16").num_layers
    2
    """

    vocab_size: int = 264
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 0
    """0 is hidden_size / num_heads."""
    max_position_embeddings: int = 2048
    """The longest sequence, prompt and response together."""
    rope_theta: float = 10000.0
    rope_local_theta: float = 0.0
    """Rotary theta of sliding layers, whose frequencies are then not scaled. 0 means that of the other layers."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0
    """The tokens that a query of a sliding layer sees: itself and the latest before it. 0 is no window."""
    layer_types: tuple[LayerType, ...] = ()
    """Which layers slide, from the first on; a list shorter than the layers is repeated. Empty means all, if there is a
    window."""
    norm_eps: float = 1e-5
    attention_bias: bool = False
    """Biases on queries, keys and values (Qwen 2)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen 3)."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Each head by itself, or all heads together (OLMo 2)."""
    norms: NormPlacement = "before"
    """Where a layer has its norms: `after` its blocks in OLMo 2, `both` before and after in Gemma 3."""
    norm_plus_one: bool = False
    """The weights of norms are added to one (Gemma 3)."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by the square root of the hidden size, as in Gemma 3."""
    query_pre_attn_scalar: float = 0.0
    """Scores are divided by its square root. 0 is the size of a head."""
    activation: Activation = "silu"
    """Of the gate of the MLP."""
    tie_embeddings: bool = False
    """The language-model head is the transposed embedding."""
    head: Head = "lm"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """dtype of matrix products. Master weights and optimizer state are float32 with `bfloat16` too. `float64` is for
    tests of numerics, with JAX_ENABLE_X64."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Over whole sequences: `xla` is matrix products over blocks of queries, `cudnn` a fused kernel. `auto` is cuDNN's
    on GPUs in bfloat16, else XLA's."""
    scan_layers: bool = False
    """Train and infer by a scan over stacked layers: compiles once for all layers, runs somewhat slower."""
    logits_chunk_tokens: int = 4096
    """Tokens whose log-probabilities are computed at a time, so that no array of all logits exists. Where a train
    call's rows have no more, their logits are saved for the backward pass."""

    def __post_init__(self) -> None:
        require_fields(self, require_at_least_one, *SIZES, "logits_chunk_tokens")
        require_fields(self, require_positive, "rope_theta", "norm_eps")
        require_fields(self, require_not_negative, "rope_local_theta", "query_pre_attn_scalar")
        rule = "must be positive, or 0 for hidden_size / num_heads"
        require(self.head_dim >= 0, "head_dim", rule, self.head_dim)
        rule = f"must divide num_heads={self.num_heads}, since each key-value head serves a group of queries"
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", rule, self.num_kv_heads)
        rule = f"must divide hidden_size={self.hidden_size} unless head_dim is given"
        require(self.head_dim > 0 or self.hidden_size % self.num_heads == 0, "num_heads", rule, self.num_heads)
        require(self.sliding_window >= 0, "sliding_window", "must be positive, or 0 for none", self.sliding_window)
        for kind in self.layer_types:
            require(kind in LAYER_TYPES, "layer_types", f"must be some of {', '.join(LAYER_TYPES)}", kind)
        slides = self.sliding_window > 0 or SLIDING not in self.layer_types
        require(slides, "sliding_window", "must be positive for layer_types that slide", self.sliding_window)
        if self.dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError("dtype: float64 needs JAX_ENABLE_X64=1 in the environment. Got it off. Use float32.")
        rule = "must be even, since rotary positions turn pairs"
        require(self.head_size % 2 == 0, "head_dim", rule, self.head_size)

    @property
    def head_size(self) -> int:
        """The size of a head, derived where the config leaves it at 0."""
        return self.head_dim or self.hidden_size // self.num_heads

    def slides(self, layer: int) -> bool:
        """True for a layer whose queries see a window."""
        kinds = self.layer_types
        return kinds[layer % len(kinds)] == SLIDING if kinds else self.sliding_window > 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens; None where no sequence outgrows it."""
        binds = 0 < self.sliding_window < self.max_position_embeddings
        return tuple(self.sliding_window if binds and self.slides(i) else None for i in range(self.num_layers))

    def shallow(self, num_layers: int) -> "ModelConfig":
        """A model with fewer layers, all of the type that most have, whose programs stand for those of this one."""
        most = 2 * sum(map(self.slides, range(self.num_layers))) >= self.num_layers
        types = (SLIDING if most else FULL,) if self.layer_types else ()
        return dataclasses.replace(self, num_layers=num_layers, layer_types=types)

    @property
    def has_tied_head(self) -> bool:
        """Its language-model head is the transposed embedding."""
        return self.tie_embeddings and self.head != "scalar"

    @property
    def compute_dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute precision."""
        return self.compute_dtype.itemsize


CHOSEN = ("head", "dtype", "attention", "scan_layers", "logits_chunk_tokens")
"""Fields that are free to choose for weights that are there: which head is read, and how to compute. All others say
what the weights are."""


def at_least_float32(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The dtype of sums and exponentials where matrix products compute in `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def _sized(*sizes: int, **others: Any) -> dict[str, Any]:
    """Fields of `ModelConfig` by name: those of `SIZES`, in their order, and others."""
    return {**dict(zip(SIZES, sizes, strict=True)), **others}


_LLAMA3 = dict(rope_theta=500000.0, dtype="bfloat16", scan_layers=True)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _sized(264, 128, 256, 2, 4, 2, 1024),
    "small": _sized(2048, 256, 688, 4, 8, 4, 2048),
    "7b": _sized(128256, 4096, 14336, 32, 32, 8, 8192, **_LLAMA3),
    "13b": _sized(128256, 5120, 13824, 40, 40, 40, 8192, **_LLAMA3),
    "34b": _sized(128256, 8192, 22016, 48, 64, 8, 8192, **_LLAMA3),
    "70b": _sized(128256, 8192, 28672, 80, 64, 8, 8192, **_LLAMA3),
    "gemma3-270m": _sized(
        262144, 640, 2048, 18, 4, 1, 32768,
        head_dim=256, rope_theta=1e6, rope_local_theta=1e4, sliding_window=512, layer_types=(*[SLIDING] * 5, FULL),
        norm_eps=1e-6, qk_norm=True, norms="both", norm_plus_one=True, scale_embeddings=True,
        activation="gelu_pytorch_tanh", tie_embeddings=True, dtype="bfloat16",
    ),
}  # fmt: skip
"""Fields of `ModelConfig` by name. `7b` to `70b` are the LLaMA-3-like models of ReaL (arXiv:2406.14088), Table 1 of its
appendix; `gemma3-270m` is Gemma 3's."""
