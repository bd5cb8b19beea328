import dataclasses

import jax
import pytest

from jaxrlhf.models.config import FULL, SLIDING
from jaxrlhf.sharding.strategy import Strategy
from tests.model_variants import VARIANTS
from tests.programs.pipelined_calls import (
    MODEL,
    Update,
    alone,
    assert_same,
    fused,
    loss_of,
    over,
    trained,
    trained_alone,
)

TIED = dataclasses.replace(MODEL, num_layers=4, tie_embeddings=True)
CRITIC = dataclasses.replace(MODEL, num_layers=5, head="scalar")
FIVE = dataclasses.replace(MODEL, num_layers=5, num_kv_heads=1, num_heads=2, qk_norm=True, attention_bias=True)
WINDOWS = dataclasses.replace(
    MODEL, num_layers=5, sliding_window=2, layer_types=(SLIDING, SLIDING, FULL), rope_local_theta=100.0
)
OLMO2, GEMMA3 = (dataclasses.replace(MODEL, num_layers=4, qk_norm=True, **VARIANTS[name]) for name in VARIANTS)

CASES = {
    "layers that do not divide": (MODEL, Strategy(pipeline=2, micro_batches=4)),
    "tied, over data and tensor": (TIED, Strategy(pipeline=2, data=2, tensor=2, micro_batches=2, remat="dots")),
    "four stages, computed anew, fewer micro-batches than stages": (
        CRITIC,
        Strategy(pipeline=4, tensor=2, micro_batches=2, remat="layer", balance=True),
    ),
    "interleaved": (FIVE, Strategy(pipeline=2, chunks=2, data=2, micro_batches=4)),
    "some layers slide": (WINDOWS, Strategy(pipeline=2, tensor=2, micro_batches=2)),
    "OLMo 2": (OLMO2, Strategy(pipeline=2, fsdp=2, tensor=2, micro_batches=2)),
    "Gemma 3": (GEMMA3, Strategy(pipeline=2, data=2, tensor=2, micro_batches=2, remat="layer")),
    "GPipe": (TIED, Strategy(pipeline=4, fsdp=2, micro_batches=4, schedule="gpipe")),
}


@pytest.mark.parametrize(("model", "strategy"), CASES.values(), ids=CASES)
def test_training_gives_what_one_device_gives(model, strategy):
    """Gradients (in the moments), weights and metrics of two updates, with clipping."""
    got = trained(model, over(strategy), count=1)
    assert_same(got, trained_alone(model), rtol=1e-5, atol=1e-6)
    params, state, metrics = got
    assert int(state.num_updates) == 2 and float(metrics["grad_norm"]) > 0.5, "clipped"
    last = set(over(strategy).stage(strategy.num_stages - 1).mesh.devices.flat)
    assert all(x.sharding.device_set == last for x in jax.tree.leaves(params["layers"][-1]))


def test_losses_of_several_terms():
    """On pairs and with weights that are arrays; over several epochs."""
    strategy, update = Strategy(pipeline=2, micro_batches=2), Update(mini_batches=2, epochs=2)
    for model in (MODEL, dataclasses.replace(CRITIC, num_layers=3)):
        got = trained(model, over(strategy), count=2, update=update)
        assert_same(got, trained_alone(model, 2, update), rtol=1e-5, atol=1e-6)
        assert_same(loss_of(model, over(strategy)), loss_of(model, alone()), rtol=1e-5, atol=1e-6)


FUSED = {
    "four stages beside two": (
        Strategy(pipeline=4, tensor=2, micro_batches=4),
        Strategy(pipeline=2, data=2, tensor=2, micro_batches=2),
    ),
    "stages of two devices beside stages of one": (
        Strategy(pipeline=2, data=2, tensor=2, micro_batches=2),
        Strategy(pipeline=4, data=2, micro_batches=2, remat="layer"),
    ),
}


@pytest.mark.parametrize("strategies", FUSED.values(), ids=FUSED)
def test_fused_training_gives_what_each_gives_alone(strategies):
    actor, critic = fused((TIED, CRITIC), strategies)
    assert_same(actor, trained_alone(TIED), rtol=1e-5, atol=1e-6)
    assert_same(critic, trained_alone(CRITIC), rtol=1e-5, atol=1e-6)
