import jax.numpy as jnp
import numpy as np

from jaxrlhf.algorithms.reported import masked_summary, rollout_metrics, summary
from jaxrlhf.experience import LENGTH, STOP, Rollout


def test_summaries_by_hand() -> None:
    assert summary("a", jnp.array([1.0, -2.0, 4.0])) == {"a/mean": 1.0, "a/max": 4.0, "a/min": -2.0}
    x_BR, mask_BR = jnp.array([[-3.0, jnp.nan], [-1.0, 7.0]]), jnp.array([[True, False], [True, False]])
    assert masked_summary("a", x_BR, mask_BR) == {"a/mean": -2.0, "a/max": -1.0, "a/min": -3.0}
    assert masked_summary("a", x_BR, jnp.zeros((2, 2), bool)) == {"a/mean": 0.0, "a/max": 0.0, "a/min": 0.0}


def test_lengths_and_endings_by_hand() -> None:
    response_BR = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    prompt_BP = np.array([[0, 1], [1, 1], [0, 1], [0, 1]], bool)
    zeros_BR = jnp.zeros((4, 3))
    rollout = Rollout(
        tokens=jnp.zeros((4, 5), jnp.int32),
        mask=jnp.asarray(np.concatenate([prompt_BP, response_BR], axis=1)),
        response=jnp.asarray(response_BR),
        logprobs=zeros_BR,
        sampled_logprobs=zeros_BR,
        finish=jnp.array([STOP, LENGTH, STOP, STOP], jnp.int32),
        row=jnp.arange(4, dtype=jnp.int32),
        id=jnp.arange(4, dtype=jnp.uint32),
    )
    assert rollout_metrics(rollout) == {
        "response_length/mean": 2.0,
        "response_length/max": 3.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,  # the third row stopped with its last token, and was not cut off
        "response/aborted_ratio": 0.25,
        "prompt_length/mean": 1.25,
        "prompt_length/max": 2.0,
        "prompt_length/min": 1.0,
    }
