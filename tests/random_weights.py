"""Random weights for tests of models: no bias is zero and no norm one, so that each of them shows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params


@functools.cache
@jax.ensure_compile_time_eval()
def params_of(config: ModelConfig) -> Any:
    """Weights of a model, the same in every test, also when the first test to ask for them is tracing."""
    rng = np.random.default_rng(0)

    def random(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) > 1:
            return jnp.asarray(rng.normal(0, x.shape[0] ** -0.5, x.shape), x.dtype)
        return jnp.asarray(rng.normal(0 if "bias" in path[-1].key else 1, 0.3, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(random, abstract_params(config))
