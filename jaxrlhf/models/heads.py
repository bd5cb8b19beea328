"""Outputs of a model for sequences: log-probabilities and entropies of response tokens, values, scores.

Letters: B sequences, P prompt columns, R response columns, T = P + R, S any number of columns, C columns of a chunk,
D hidden size, V vocabulary.

The head of response token t is the hidden state of the column before it, so only columns P - 1 to T - 2 are projected.
No array of all logits exists: log-probabilities are computed for `logits_chunk_tokens` tokens at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.experience import PolicyAndValues, PolicyOutputs, Sequences
from jaxrlhf.models.architecture import declare
from jaxrlhf.models.config import ModelConfig, at_least_float32
from jaxrlhf.models.params import Params, use
from jaxrlhf.models.transformer import Wanted, hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat

_OF_PADDING = -1e30
"""The logit of padding: so low that its probability is exactly zero, and finite, since zero times infinity is not."""
Outputs = TypeVar("Outputs", covariant=True)


@dataclasses.dataclass(frozen=True)
class InferenceOutput(Generic[Outputs]):
    """An output of inference: the columns of the sequences that it needs, and the function from their hidden states.

    Calling it runs all layers first.
    """

    columns: Callable[[Sequences], tuple[int, Wanted]]
    """Sequences -> the number of first columns that go through the layers, and the wanted ones among them."""
    outputs: Callable[[Params, Float[Array, "B S D"], Sequences, ModelConfig, Layout], Outputs]
    """(params, hidden states of the wanted columns, sequences, config, layout) -> outputs, one row per sequence.
    Of the weights it reads only those of the head."""

    def __call__(
        self, params: Params, sequences: Sequences, config: ModelConfig, layout: Layout, *, remat: Remat = "none"
    ) -> Outputs:
        length, wanted = self.columns(sequences)
        tokens_BT, mask_BT = sequences.tokens[:, :length], sequences.mask[:, :length]
        hidden_BSD = hidden_states(params, tokens_BT, mask_BT, config, layout, wanted=wanted, remat=remat)
        return self.outputs(params, hidden_BSD, sequences, config, layout)


def _before_responses(sequences: Sequences) -> tuple[int, Wanted]:
    T, R = sequences.tokens.shape[1], sequences.response.shape[1]
    return T - 1, T - R - 1


def _at_responses(sequences: Sequences) -> tuple[int, Wanted]:
    T, R = sequences.tokens.shape[1], sequences.response.shape[1]
    return T, T - R


def _at_the_end(sequences: Sequences) -> tuple[int, Wanted]:
    T, R = sequences.tokens.shape[1], sequences.response.shape[1]
    return T, T - R - 1 + sequences.response.sum(axis=1)


def _policy(
    params: Params, hidden_BRD: jax.Array, sequences: Sequences, config: ModelConfig, layout: Layout
) -> PolicyOutputs:
    P = sequences.tokens.shape[1] - sequences.response.shape[1]
    return token_logprobs(params, hidden_BRD, sequences.tokens[:, P:], sequences.response, config, layout)


def _of_responses(
    params: Params, hidden_BRD: jax.Array, sequences: Sequences, config: ModelConfig, layout: Layout
) -> jax.Array:
    return jnp.where(sequences.response, _scalars(params, hidden_BRD, config, layout), 0.0)


def _policy_and_values(
    params: Params, hidden_BRD: jax.Array, sequences: Sequences, config: ModelConfig, layout: Layout
) -> PolicyAndValues:
    policy = _policy(params, hidden_BRD, sequences, config, layout)
    values_BR = _of_responses(params, hidden_BRD, sequences, config, layout)
    return PolicyAndValues(logprobs=policy.logprobs, entropy=policy.entropy, values=values_BR)


policy_outputs = InferenceOutput(_before_responses, _policy)
"""Log-probabilities and entropies (in nats) of the response tokens, zero elsewhere."""
values = InferenceOutput(_before_responses, _of_responses)
"""The scalar head before each response token, the value of the state in which it was chosen; zero elsewhere."""
scores = InferenceOutput(
    _at_the_end, lambda params, hidden_B1D, _, config, layout: _scalars(params, hidden_B1D[:, 0], config, layout)
)
"""The scalar head at the last token of each sequence, the output of a reward model."""
token_scores = InferenceOutput(_at_responses, _of_responses)
"""The scalar head at each response token, the output of a token-level reward model; zero elsewhere."""

INFERENCE_OUTPUTS: dict[str, InferenceOutput[Any]] = {
    "policy": policy_outputs,
    "logprobs": InferenceOutput(_before_responses, lambda *args: _policy(*args).logprobs),
    "values": values,
    "scores": scores,
    "token_scores": token_scores,
    "policy_and_values": InferenceOutput(_before_responses, _policy_and_values),
}
"""Inference method -> its output. `logprobs` are those of `policy`, without entropies; `policy_and_values` are the
outputs of both heads, from one pass through the layers."""


@jax.named_scope("logits")
def logits(
    params: Params, hidden_SD: Float[Array, "*S D"], config: ModelConfig, layout: Layout
) -> Float[Array, "*S V"]:
    """Next-token logits in float32, split along the vocabulary as the head is; whole where that was padded.

    Stated here, since XLA would gather the head, and not its products, where the whole vocabulary is asked for.
    """
    head_DV = output_embedding(params, config, layout)
    logits_SV = jnp.matmul(hidden_SD, head_DV, preferred_element_type=at_least_float32(hidden_SD.dtype))
    others = ("batch", *[None] * (logits_SV.ndim - 2))
    logits_SV = layout.activation(logits_SV, (*others, "vocab"))
    if logits_SV.shape[-1] == config.vocab_size:
        return logits_SV
    return layout.activation(logits_SV, (*others, "choices"))[..., : config.vocab_size]


def output_embedding(params: Params, config: ModelConfig, layout: Layout) -> Float[Array, "D V"]:
    """The language-model head, ready for use; with columns of padding if `tensor` does not divide the vocabulary."""
    declared, dtype = declare(config), config.compute_dtype
    if config.tie_embeddings:
        return use(params["embedding"], declared["embedding"], layout, dtype).T
    return use(params["lm_head"], declared["lm_head"], layout, dtype)


@jax.named_scope("token_logprobs")
def token_logprobs(
    params: Params,
    hidden_BSD: Float[Array, "B S D"],
    target_BS: Int[Array, "B S"],
    mask_BS: Bool[Array, "B S"],
    config: ModelConfig,
    layout: Layout,
) -> PolicyOutputs:
    """log p(target) and the entropy of p for every column, in chunks of columns.

    Chunks cut the columns and leave the rows as they are split over devices. The backward pass of a single chunk has
    its logits from the forward pass; where there are more, it computes them anew.
    """
    B, S, _ = hidden_BSD.shape
    head_DV = output_embedding(params, config, layout)
    num_chunks = math.ceil(S / max(1, config.logits_chunk_tokens // (B * layout.hidden_row_shards)))
    C = math.ceil(S / num_chunks)

    if num_chunks == 1:
        whole: Any = _chunk_outputs(hidden_BSD, head_DV, target_BS, layout, config.vocab_size)
        logprobs_BS, entropy_BS = whole
    else:
        padding = C * num_chunks - S

        def to_chunks(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(padded.reshape(B, num_chunks, C, *x.shape[2:]), 1, 0)

        @jax.checkpoint
        def chunk(hidden_BCD: jax.Array, target_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _chunk_outputs(hidden_BCD, head_DV, target_BC, layout, config.vocab_size)

        chunks = jax.lax.map(lambda args: chunk(*args), (to_chunks(hidden_BSD), to_chunks(target_BS)))
        logprobs_BS, entropy_BS = (jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :S] for x in chunks)
    return PolicyOutputs(logprobs=jnp.where(mask_BS, logprobs_BS, 0.0), entropy=jnp.where(mask_BS, entropy_BS, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _chunk_outputs(
    hidden_BCD: jax.Array, head_DV: jax.Array, target_BC: jax.Array, layout: Layout, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of one chunk. Columns of the head from `vocab_size` on are padding, which has no
    mass.

    log p(x) = z_x - log sum exp(z),    H = log sum exp(z) - sum_v p_v z_v
    d log p(x) / d z_v = [v = x] - p_v,    d H / d z_v = -p_v (log p_v + H)
    """
    return _chunk_forward(hidden_BCD, head_DV, target_BC, layout, vocab_size)[0]


def _chunk_forward(
    hidden_BCD: jax.Array, head_DV: jax.Array, target_BC: jax.Array, layout: Layout, vocab_size: int
) -> Any:
    B, C, D = hidden_BCD.shape
    wide = at_least_float32(hidden_BCD.dtype)
    with jax.named_scope("logits"):
        logits_BCV = jnp.matmul(hidden_BCD.reshape(-1, D), head_DV, preferred_element_type=wide)
    logits_BCV = layout.activation(logits_BCV.reshape(B, C, -1), ("batch", "length", "vocab"))
    if logits_BCV.shape[-1] > vocab_size:
        logits_BCV = jnp.where(_columns(logits_BCV) < vocab_size, logits_BCV, _OF_PADDING)
    highest_BC1 = logits_BCV.max(axis=-1, keepdims=True)
    exp_BCV = jnp.exp(logits_BCV - highest_BC1)
    sum_BC = exp_BCV.sum(axis=-1)
    log_sum_BC = jnp.log(sum_BC) + highest_BC1[..., 0]
    if layout.strategy.tensor == 1:
        chosen_BC = jnp.take_along_axis(logits_BCV, target_BC[..., None], axis=-1)[..., 0]
    else:  # a comparison instead of a gather: it stays local where the vocabulary is split over devices
        chosen_BC = jnp.where(_is_target(logits_BCV, target_BC), logits_BCV, 0.0).sum(axis=-1)
    entropy_BC = log_sum_BC - (exp_BCV * logits_BCV).sum(axis=-1) / sum_BC
    return (chosen_BC - log_sum_BC, entropy_BC), (hidden_BCD, head_DV, target_BC, logits_BCV, log_sum_BC, entropy_BC)


def _chunk_backward(layout: Layout, vocab_size: int, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> Any:
    hidden_BCD, head_DV, target_BC, logits_BCV, log_sum_BC, entropy_BC = saved
    by_logprob_BC1, by_entropy_BC1 = (g[..., None] for g in gradients)
    logprobs_BCV = logits_BCV - log_sum_BC[..., None]
    by_mass_BCV = by_logprob_BC1 + by_entropy_BC1 * (logprobs_BCV + entropy_BC[..., None])
    by_target_BCV = jnp.where(_is_target(logits_BCV, target_BC), by_logprob_BC1, 0.0)
    by_logits_BCV = (by_target_BCV - jnp.exp(logprobs_BCV) * by_mass_BCV).astype(hidden_BCD.dtype)
    by_logits_BCV = layout.activation(by_logits_BCV, ("batch", "length", "vocab"))
    by_logits_NV = by_logits_BCV.reshape(-1, by_logits_BCV.shape[-1])
    hidden_ND = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
    with jax.named_scope("logits"):
        return (by_logits_NV @ head_DV.T).reshape(hidden_BCD.shape), hidden_ND.T @ by_logits_NV, None


_chunk_outputs.defvjp(_chunk_forward, _chunk_backward)


def _is_target(logits_BCV: jax.Array, target_BC: jax.Array) -> jax.Array:
    return _columns(logits_BCV) == target_BC[..., None]


def _columns(logits_BCV: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2)


@jax.named_scope("value_head")
def _scalars(params: Params, hidden_SD: jax.Array, config: ModelConfig, layout: Layout) -> jax.Array:
    head_D1 = use(params["value_head"], declare(config)["value_head"], layout, at_least_float32(hidden_SD.dtype))
    return jnp.matmul(hidden_SD.astype(head_D1.dtype), head_D1)[..., 0]
