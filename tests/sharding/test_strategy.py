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


@pytest.mark.parametrize("field", ["data", "fsdp", "tensor", "pipeline", "micro_batches"])
@pytest.mark.parametrize("value", [0, -2])
def test_degrees_are_positive(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}: must be at least 1. Got {value}.")):
        Strategy(**{field: value})


def test_remat_is_one_of_three():
    with pytest.raises(ValueError, match=re.escape("remat: must be none, dots or layer. Got 'dot'.")):
        Strategy(remat="dot")  # pyright: ignore[reportArgumentType]


def test_there_is_no_pipeline_yet():
    message = "pipeline: only 1 so far. Got 2. Split over data, fsdp or tensor instead."
    with pytest.raises(ValueError, match=re.escape(message)):
        Strategy(pipeline=2)
