import dataclasses

import pytest

from jaxrlhf.models.config import FULL, SLIDING
from jaxrlhf.sharding.strategy import Strategy
from tests.programs.pipelined_calls import MODEL, alone, assert_same, inferred, over

TIED = dataclasses.replace(MODEL, tie_embeddings=True)
CRITIC = dataclasses.replace(MODEL, num_layers=7, head="scalar")
BOTH = dataclasses.replace(MODEL, num_layers=4, head="both")
WINDOWS = dataclasses.replace(
    MODEL, num_layers=5, head="scalar", sliding_window=2, layer_types=(SLIDING, FULL), rope_local_theta=100.0
)


@pytest.mark.parametrize(
    ("model", "method", "strategy"),
    [
        (TIED, "policy", Strategy(pipeline=2, data=2, tensor=2, micro_batches=2)),
        (dataclasses.replace(MODEL, num_layers=5), "logprobs", Strategy(pipeline=4, micro_batches=2)),
        (CRITIC, "scores", Strategy(pipeline=4, fsdp=2, micro_batches=4, balance=True)),
        (CRITIC, "values", Strategy(pipeline=2)),
        (WINDOWS, "scores", Strategy(pipeline=2, chunks=2, data=2, micro_batches=4)),
        (CRITIC, "token_scores", Strategy(pipeline=2, chunks=3, micro_batches=4)),
        (BOTH, "policy_and_values", Strategy(pipeline=2, tensor=2, micro_batches=4)),
    ],
)
def test_inference_gives_what_one_device_gives(model, method, strategy):
    assert_same(inferred(model, method, over(strategy)), inferred(model, method, alone()), rtol=1e-5, atol=1e-6)


def test_outputs_are_on_the_last_stage():
    (values,) = inferred(CRITIC, "values", over(Strategy(pipeline=2)))
    assert values.sharding.device_set == set(over(Strategy(pipeline=2)).stage(1).mesh.devices.flat)
