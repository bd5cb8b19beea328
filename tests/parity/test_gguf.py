"""Models from GGUF files compute here what they compute in transformers, and what llama.cpp computes from the files.

Letters: B sequences, T positions, V vocabulary.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.models import heads
from jaxrlhf.models.config import RopeScaling
from jaxrlhf.models.gguf_files import ARCHITECTURES
from jaxrlhf.models.huggingface import load_params, save_params
from jaxrlhf.models.transformer import hidden_states
from tests.gguf_models import llama_logits, parts_of
from tests.parity.test_huggingface import CONFIGS, DATA, LLAMA, NAMES, TOLERANCE, forward, goldens, one_device
from tests.random_weights import params_of


@pytest.mark.parametrize("name", [name for name in NAMES if name in ARCHITECTURES])
def test_a_folder_that_was_a_gguf_file_gives_the_logits_of_transformers(name, tmp_path):
    config = convert_gguf(parts_of(DATA / name, name).write(tmp_path / "model.gguf"), tmp_path / "to")
    golden = goldens(name)
    assert config == CONFIGS[name]
    logits_BTV = forward(load_params(tmp_path / "to", config), config, one_device(), golden)
    np.testing.assert_allclose(logits_BTV[golden.mask_BT], golden.logits_BTV[golden.mask_BT], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=32.0, original_max_position_embeddings=128)], ids=str)
def test_its_logits_are_those_of_the_file(scaling, tmp_path):
    """Against numpy on the file's own tensors, whose rotary positions turn neighbors."""
    config = dataclasses.replace(LLAMA, rope_scaling=scaling, norm_eps=1e-5)
    save_params(params_of(config), config, tmp_path / "from", dtype="float32")
    path = parts_of(tmp_path / "from", "llama").write(tmp_path / "model.gguf")
    assert convert_gguf(path, tmp_path / "to") == config
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (1, 40))
    params, layout = load_params(tmp_path / "to", config), one_device()
    hidden = hidden_states(params, jnp.asarray(tokens_BT), jnp.ones(tokens_BT.shape, bool), config, layout)
    logits_BTV = np.asarray(heads.logits(params, hidden, config, layout))
    np.testing.assert_allclose(logits_BTV[0], llama_logits(path, tokens_BT[0].tolist()), rtol=0, atol=TOLERANCE)
