"""The tokenizer of a GGUF file: it gives the ids of the one that the file was made from."""

import pytest
import tokenizers

from jaxrlhf.data.gguf_folder import convert_gguf
from jaxrlhf.data.tokenizer import Tokenizer, train_bpe
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import save_params
from tests.gguf_models import TEMPLATE, Parts, parts_of
from tests.random_weights import params_of

TEXTS = ["the cat sat on the mat, the cat's 1234 hats", "naïve: the 猫 at 12 o'clock!\n\n  then\tthe mat"]
SMALL = ModelConfig(vocab_size=300, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    return train_bpe(TEXTS * 4, vocab_size=290)


@pytest.fixture
def parts(original, tmp_path) -> Parts:
    save_params(params_of(SMALL), SMALL, tmp_path / "from", dtype="float32")
    return parts_of(tmp_path / "from", "llama", tokenizer=original)


def test_ids_special_tokens_and_template_are_those_of_the_file(original, parts, tmp_path):
    folder = tmp_path / "new" / "folder"
    convert_gguf(parts.write(tmp_path / "model.gguf"), folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    converted = Tokenizer.from_file(folder)
    for text in [*TEXTS, "<|endoftext|>a<|pad|>", "unseen words: wolf"]:
        ids = original.encode(text)
        assert converted.encode(text) == ids
        assert converted.decode(ids) == original.decode(ids)
    assert (converted.end_id, converted.pad_id) == (1, 0)
    assert converted.special_tokens["bos_token"] == "<|endoftext|>"
    assert converted.chat_templates == {"default": TEMPLATE}
    assert set(converted.control_tokens) == {"<|pad|>", "<|endoftext|>"}
    assert converted.vocab_size == original.vocab_size < SMALL.vocab_size  # tokens that fill it up are left out


WORDS = {
    "gpt-2": ["I", "'m", "Ġat", "Ġ12345", "Ġok", "!!"],
    "smollm": ["I", "'m", "Ġat", "Ġ", *"12345", "Ġok", "!!"],
    "llama-bpe": ["I", "'m", "Ġat", "Ġ", "123", "45", "Ġok", "!!"],
    "qwen2": ["I", "'m", "Ġat", "Ġ", *"12345", "Ġok", "!!"],
}


@pytest.mark.parametrize("cut", WORDS)
def test_texts_are_cut_into_words_as_the_file_says(parts, cut, tmp_path):
    parts.metadata["tokenizer.ggml.pre"] = cut
    convert_gguf(parts.write(tmp_path / "model.gguf"), tmp_path / "to")
    pre_tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "to" / "tokenizer.json")).pre_tokenizer
    assert pre_tokenizer is not None
    assert [word for word, _ in pre_tokenizer.pre_tokenize_str("I'm at 12345 ok!!")] == WORDS[cut]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.model": "llama"},
            r"only byte-level BPE \('gpt2'\) is supported\. Got 'llama'\. Take the mod",
        ),
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"ggml.pre: must be one that is supported\. Got 'tekken'\. Supported: gpt-2",
        ),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type: must have one entry for each of 300 tokens\. Got 2\."),
        ({"tokenizer.ggml.eos_token_id": 300}, r"eos_token_id: must be the place of one of 300 tokens\. Got 300\."),
        ({"tokenizer.ggml.merges": "a b"}, r"tokenizer.ggml.merges: must be a list\. Got 'a b'\."),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused_before_anything_is_written(parts, change, message, tmp_path):
    parts.metadata |= change
    with pytest.raises(ValueError, match=r"model.gguf: .*" + message):
        convert_gguf(parts.write(tmp_path / "model.gguf"), tmp_path / "to")
    assert not (tmp_path / "to").exists()
