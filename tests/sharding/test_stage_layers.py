import re

import pytest

from jaxrlhf.sharding.stage_layers import device_group, layers_of_stages, stage_of_layer
from jaxrlhf.sharding.strategy import Strategy


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (5, 2), (7, 4), (8, 4), (80, 16), (11, 11)])
def test_layers_are_dealt_in_order_and_the_first_stages_have_one_more(num_layers, num_stages):
    stages = layers_of_stages(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    of = stage_of_layer(num_layers, num_stages)
    assert all(layer in stages[of[layer]] for layer in range(num_layers))


def test_more_stages_than_layers():
    message = "must be at most the number of layers, 3. Got 4 stages."
    with pytest.raises(ValueError, match=re.escape(message)):
        layers_of_stages(3, 4)


def test_virtual_stages_go_round_over_the_groups_of_devices():
    strategy = Strategy(pipeline=2, chunks=3)
    assert [device_group(stage, strategy) for stage in range(strategy.num_stages)] == [0, 1, 0, 1, 0, 1]
