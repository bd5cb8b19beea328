import re

import pytest

from jaxrlhf.sharding.strategy import Strategy


def test_counts():
    strategy = Strategy(data=2, fsdp=3, tensor=4, micro_batches=5)
    assert strategy.num_devices == 24
    assert strategy.num_row_shards == 6
    assert Strategy().num_devices == Strategy().num_row_shards == 1


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy(), "one device"),
        (Strategy(micro_batches=4), "one device"),
        (Strategy(fsdp=4), "fsdp 4"),
        (Strategy(data=2, fsdp=2, tensor=8), "data 2 x fsdp 2 x tensor 8"),
    ],
)
def test_in_words(strategy, words):
    assert str(strategy) == words


@pytest.mark.parametrize("field", ["data", "fsdp", "tensor", "pipeline", "chunks", "micro_batches"])
@pytest.mark.parametrize("value", [0, -2])
def test_degrees_are_positive(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}: must be at least 1. Got {value}.")):
        Strategy(**{field: value})


def test_stages():
    strategy = Strategy(pipeline=4, chunks=2, data=2)
    assert strategy.num_devices == 8
    assert strategy.num_stages == 8
    assert str(strategy) == "pipeline 4 x data 2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"chunks": 2},
            "chunks: are parts of a stage, and need a pipeline. Got 2 with pipeline 1. Set pipeline to 2, say, or",
        ),
        (
            {"pipeline": 2, "chunks": 2, "schedule": "gpipe"},
            "schedule: with chunks it must be 1f1b, interleaved. Got 'gpipe'.",
        ),
        (
            {"shared_prompts": 4},
            "shared_prompts: are for generation in slots. Got 4 without slots. Set slots, or leave",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Strategy(**settings)
