"""Micro-batches of train calls on CPUs."""

import dataclasses

import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.costs.cpu_micro_batches import MOST_BYTES, with_micro_batches
from jaxrlhf.planner.costs.memory import call_memory
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Strategy

SMOLLM2 = ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    tie_embeddings=True, dtype="float32",
)  # fmt: skip
CALL = ModelCall(
    name="actor.train", role="actor", weights="actor", kind="train", model=SMOLLM2, rows=64, prompt=12, response=24,
    mini_batches=2, lora=LoRAConfig(),
)  # fmt: skip


def test_as_few_as_need_little_memory():
    assert with_micro_batches(CALL, Strategy()).micro_batches == 4
    for micro_batches, is_little in ((2, False), (4, True)):
        needed = call_memory(CALL, Strategy(micro_batches=micro_batches), is_trained=True).activations
        needed += 2 * 32 // micro_batches * 24 * SMOLLM2.vocab_size * 4  # logits, and their gradient
        assert (needed <= MOST_BYTES) == is_little
    scored = dataclasses.replace(CALL, model=dataclasses.replace(SMOLLM2, head="scalar"))
    assert with_micro_batches(scored, Strategy()).micro_batches == 2


def test_what_is_small_stays_in_one_piece():
    assert with_micro_batches(CALL, Strategy(data=8)) == Strategy(data=8)
    tiny = dataclasses.replace(CALL, model=ModelConfig(hidden_size=64, num_layers=2))
    assert with_micro_batches(tiny, Strategy()) == Strategy()


@pytest.mark.parametrize(("rows", "shards", "found"), [(64, 8, 8), (48, 2, 24), (6, 1, 6), (6, 4, 1)])
def test_they_divide_the_rows_of_a_mini_batch_on_a_device(rows, shards, found):
    long = dataclasses.replace(CALL, rows=rows, response=100_000, mini_batches=1)
    assert with_micro_batches(long, Strategy(data=shards)).micro_batches == found
