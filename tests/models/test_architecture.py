import dataclasses

import pytest

from jaxrlhf.models.architecture import forward_flops
from jaxrlhf.models.config import FULL, SLIDING, ModelConfig

CONFIG = ModelConfig(
    vocab_size=11, hidden_size=6, intermediate_size=7, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2
)
D, F, H, K, h, V = 6, 7, 4, 2, 2, 11


@pytest.mark.parametrize("scored", [1, 3, 5])
@pytest.mark.parametrize("windows", [(None, None, None), (2, 2, None), (None, 2, 2)])
def test_flops_equal_a_loop_over_columns(scored, windows):
    columns, multiplications = 5, 0
    types = tuple(FULL if window is None else SLIDING for window in windows)
    config = dataclasses.replace(CONFIG, sliding_window=2, layer_types=types)
    assert config.windows == windows
    for layer in range(3):
        for column in range(columns):
            multiplications += 2 * D * K * h
            if layer < 2 or column >= columns - scored:
                multiplications += D * H * h + H * h * D + 3 * D * F
                multiplications += 2 * H * h * min(column + 1, windows[layer] or columns)
    head = scored * D * V
    assert forward_flops(config, rows=2, columns=columns, scored=scored) == 2 * 2 * (multiplications + head)
    scalar = dataclasses.replace(config, head="scalar")
    assert forward_flops(scalar, rows=2, columns=columns, scored=scored) == 4 * (multiplications + scored * D)
