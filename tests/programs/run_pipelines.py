"""Calls over stages in float64: run_pipelines.py [COORDINATOR NUM_PROCESSES INDEX], alone or as one of several
processes."""

import dataclasses
import sys

import jax

from jaxrlhf.sharding.strategy import Strategy

jax.config.update("jax_enable_x64", True)
coordinator, num_processes, index = sys.argv[1:] or ("", "1", "0")
jax.config.update("jax_num_cpu_devices", 8 // int(num_processes))
if coordinator:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(num_processes), int(index))

from tests.programs.pipelined_calls import (  # noqa: E402
    MODEL,
    alone,
    assert_same,
    fused,
    inferred,
    over,
    trained,
    trained_alone,
)  # fmt: skip

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ACTOR = dataclasses.replace(MODEL, dtype="float64", num_layers=4, tie_embeddings=True)
CRITIC = dataclasses.replace(MODEL, dtype="float64", num_layers=5, head="scalar")

for model, strategy, devices in (
    (ACTOR, Strategy(pipeline=2, data=2, tensor=2, micro_batches=2), ()),  # a stage in each of two processes
    (CRITIC, Strategy(pipeline=4, data=2, micro_batches=2, remat="layer"), (0, 4, 1, 5, 2, 6, 3, 7)),  # in both
):
    params, state, metrics = trained(model, over(strategy, devices))
    expected = trained_alone(model)
    assert_same((params, state), expected[:2], **EXACT)
    assert_same(metrics, expected[2], rtol=1e-6, atol=1e-6)  # which are float32 in any run
    method = "values" if model is CRITIC else "policy"
    # told apart by more than float32 can
    assert_same(inferred(model, method, over(strategy, devices)), inferred(model, method, alone()), **EXACT)

strategies = Strategy(pipeline=4, tensor=2, micro_batches=4), Strategy(pipeline=2, data=2, tensor=2, micro_batches=2)
for got, model in zip(fused((ACTOR, CRITIC), strategies), (ACTOR, CRITIC), strict=True):
    assert_same(got[:2], trained_alone(model)[:2], **EXACT)
