"""What algorithms that learn from preferences share: their batches, and what they report of pairs.

Letters: B pairs.
"""

from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrlhf.experience import Preferences


def pair_batch(pairs: Preferences, **more: Any) -> dict[str, Any]:
    """A batch whose loss gets the model's outputs of `chosen` and of `rejected`, with the margin and `more`."""
    return {"sequences": {"chosen": pairs.chosen, "rejected": pairs.rejected}, "margin": pairs.margin, **more}


def correct_pairs(chosen_B: Float[Array, " B"], rejected_B: Float[Array, " B"]) -> Float[Array, ""]:
    """How many pairs are ordered as they should be. A tie is half a pair."""
    chex.assert_rank([chosen_B, rejected_B], 1)
    chex.assert_equal_shape([chosen_B, rejected_B])
    return jnp.sum((1.0 + jnp.sign(chosen_B - rejected_B)) / 2.0)
