"""OLMo 2 and Gemma 3: log-probabilities of the training forward, in slots and over every kind of layout."""

import numpy as np
import pytest

from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import assert_same, in_slots, model, on_one_device, on_stages, over
from tests.generation.test_windows import ON_ONE, SAMPLING, TWICE, in_slots_of, logprobs, prompts_of
from tests.model_variants import VARIANTS

MODELS = {name: model(5, **fields) for name, fields in VARIANTS.items()}
CASES = {
    "shared prompts in chunks": (TWICE, Slots(4, 2, shared_prompts=3, prefill_tokens=4), ON_ONE),
    "data, fsdp and tensor": (SAMPLING, Slots(2, 2), Strategy(data=2, fsdp=2, tensor=2)),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("case", CASES)
def test_slots(config, case):
    drawn, slots, strategy = CASES[case]
    rollout = in_slots_of(config, drawn, slots, strategy, prompts_of(7))
    np.testing.assert_allclose(rollout.logprobs, logprobs(rollout, config), atol=1e-4)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_stages(config):
    layout = over(Strategy(pipeline=2, tensor=2))
    expected = on_one_device(config, SAMPLING, 0.8)
    np.testing.assert_allclose(expected.logprobs, logprobs(expected, config), atol=1e-4)
    assert_same(on_stages(config, SAMPLING, 0.8, layout), expected)
    slots = Slots(4, prefill_rows=1, prefill_tokens=3)
    rollout = in_slots(config, SAMPLING, layout, slots)
    np.testing.assert_allclose(rollout.logprobs, logprobs(rollout, config), atol=1e-4)
