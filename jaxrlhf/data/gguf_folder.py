"""A GGUF file as a folder in Hugging Face's format: its tokenizer's files, beside those of its model."""

import json
from pathlib import Path
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.data.tokenizer_files import SETTINGS, TOKENIZER, write_files
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.gguf_files import Dtype, GGUFFile, gguf_config, read_gguf, save_gguf_model

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Types of tokens: one that no text contains, one that is cut out of a text whole, and one that stands for nothing."""
_SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
"""Special tokens as GGUF and as Hugging Face call them."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_AND_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {"type": "Digits", "individual_digits": True}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _in_order(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _in_order(split, _byte_level(use_regex=False))


_LLAMA3 = _split(_CONTRACTIONS + _LETTERS_AND_REST % "{1,3}")
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": _byte_level(use_regex=True)},
    "smollm": {"pre_tokenizer": _in_order(_DIGITS, _byte_level(use_regex=True))},
    "llama-bpe": {"pre_tokenizer": _LLAMA3, "ignore_merges": True},
    "qwen2": {"pre_tokenizer": _split(_CONTRACTIONS + _LETTERS_AND_REST % ""), "normalizer": {"type": "NFC"}},
}
"""`tokenizer.ggml.pre` -> how texts are cut into words before merges, as the models' tokenizer.json have it."""


def convert_gguf(source: Path, folder: Path, *, dtype: Dtype = "float32") -> ModelConfig:
    """Writes a GGUF file's model and tokenizer to a folder in Hugging Face's format.

    Everything is checked before anything is written. Returns the model's config.

    Raises:
        ValueError: The file is damaged, or its model, a tensor's type or its tokenizer is not supported.
        UnwritableError: A file of the folder cannot be written.
    """
    file = read_gguf(source)
    config = gguf_config(file)
    backend, settings = _backend(file), _settings(file, config)
    ids = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
           for theirs, name in _SPECIAL.items() if name != "unk"}  # fmt: skip
    save_gguf_model(file, config, folder, dtype=dtype, ids=ids)
    contents = {TOKENIZER: json.dumps(backend, ensure_ascii=False), SETTINGS: _indented(settings)}
    write_files({name: text.encode() for name, text in contents.items()}, folder, renamed={})
    return config


def _backend(file: GGUFFile) -> dict[str, Any]:
    """The tokenizer.json of a file: a byte-level BPE."""
    kind = file.stated("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model: only byte-level BPE ('gpt2') is supported. Got {kind!r}. Take the "
            "model and its tokenizer.json from a folder in Hugging Face's format."
        )
    cut = file.stated("tokenizer.ggml.pre", str, "gpt-2")
    if cut not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre: must be one that is supported. Got {cut!r}. Supported: "
            f"{', '.join(_PRE_TOKENIZERS)}. Take the model and its tokenizer.json from a folder in Hugging Face's "
            "format."
        )
    tokens, types = _tokens(file)
    rules = _PRE_TOKENIZERS[cut]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": kind == _CONTROL, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": rules.get("normalizer"),
        "pre_tokenizer": rules["pre_tokenizer"],
        "post_processor": None,
        "decoder": _byte_level(use_regex=True) | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": rules.get("ignore_merges", False),
            "vocab": {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED},
            "merges": [merge.split(" ") for merge in file.stated("tokenizer.ggml.merges", list)],
        },
    }


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """All tokens, and their types."""
    tokens, types = (file.stated(f"tokenizer.ggml.{name}", list) for name in ("tokens", "token_type"))
    if len(tokens) != len(types):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.token_type: must have one entry for each of {len(tokens)} tokens. Got "
            f"{len(types)}. Download it again."
        )
    return tokens, types


def _settings(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """The tokenizer_config.json of a file: special tokens by name, and the chat template."""
    tokens, _ = _tokens(file)
    special = {}
    for theirs, name in _SPECIAL.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key not in file.metadata:
            continue
        number = file.stated(key, int)
        if not 0 <= number < len(tokens):
            raise ValueError(
                f"{file.path}: {key}: must be the place of one of {len(tokens)} tokens. Got {brief(number)}. Download "
                "it again."
            )
        special[f"{name}_token"] = tokens[number]
    template = file.stated("tokenizer.chat_template", str, "")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        **special,
        **({"chat_template": template} if template else {}),
    }


def _indented(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
