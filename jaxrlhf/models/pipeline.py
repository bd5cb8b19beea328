"""One stage of a model: the layers that it has, with the embedding before the first and the heads after the last.

Letters: B sequences, T columns, S the last columns of T whose outputs are wanted, D hidden size.
"""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params
from jaxrlhf.models.transformer import Kept, Wanted, embed, normalize, run_layers
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.stages import layers_of_stages


def run_stage(
    params: Params,
    given: Int[Array, "B T"] | Float[Array, "B T D"],
    mask_BT: Bool[Array, "B T"],
    stage: int,
    num_stages: int,
    config: ModelConfig,
    layout: Layout,
    *,
    wanted: Wanted = 0,
    remat: Kept = "none",
) -> Float[Array, "B S D"]:
    """What a stage hands on: hidden states, of the last stage normalized, for the columns that are wanted.

    The stages one after another give what `hidden_states` does.

    Args:
        params: Those of the stage, as `models.stages.pick` gives them.
        given: Tokens for the first stage, what the stage before gave for the others.
        layout: Of the stage's devices.
        wanted: Columns that the last stage is asked for. Others hand all columns on.
    """
    weights = [params["layers"][i] for i in layers_of_stages(config.num_layers, num_stages)[stage]]
    last = stage == num_stages - 1
    x_BTD: jax.Array = embed(params, given, config, layout) if stage == 0 else given
    x_BSD, _ = run_layers(weights, x_BTD, mask_BT, config, layout, wanted=wanted if last else 0, remat=remat)
    return normalize(params, x_BSD, config, layout) if last else x_BSD


def lend_embedding(params: Params, embedding: Any) -> Params:
    """The weights of the last stage with the embedding of the first, for a head that is tied to it."""
    return {**params, "embedding": embedding}
