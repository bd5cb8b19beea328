"""The files of a tokenizer: read, and exported unchanged but for special tokens that a config renames."""

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_BESIDE = (
    *(SETTINGS, SPECIAL, "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""The files of a tokenizer that transformers reads beside tokenizer.json."""
_TEMPLATES = "additional_chat_templates"
"""A folder beside tokenizer.json with templates by name."""


def read_files(path: Path) -> dict[str, bytes]:
    """A tokenizer.json, under any name, and the other files of the tokenizer in its folder: name -> content."""
    paths = [path.parent / name for name in _BESIDE] + sorted((path.parent / _TEMPLATES).glob("*.jinja"))
    there = {str(file.relative_to(path.parent)): file for file in paths if file.is_file()}
    return {name: file.read_bytes() for name, file in {TOKENIZER: path, **there}.items()}


def write_files(files: Mapping[str, bytes], folder: Path, *, renamed: Mapping[str, str]) -> None:
    """Writes the files of a tokenizer into a folder, naming in them the special tokens that the config replaced, as in
    {eos_token: <|im_end|>}."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if renamed and name in (SETTINGS, SPECIAL):
            content = json.dumps({**json.loads(content), **renamed}, indent=2, ensure_ascii=False).encode()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if renamed and SETTINGS not in files:
        (folder / SETTINGS).write_text(json.dumps(renamed, indent=2, ensure_ascii=False), encoding="utf-8")


def tokens_by_id(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """The eos_token, bos_token and pad_token that the config.json beside a tokenizer.json names by their ids.

    Of several ends of text, the first one counts. A config.json that cannot be read is ignored.
    """
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for name in ("eos_token", "bos_token", "pad_token"):
        number = fields.get(f"{name}_id") if isinstance(fields, dict) else None
        number = number[0] if isinstance(number, list) and number else number
        token = backend.id_to_token(number) if type(number) is int and number >= 0 else None
        if token is not None:
            found[name] = token
    return found


def read_vocabulary(path: Path) -> dict[str, int]:
    """Token -> id, from a tokenizer.json."""
    try:
        return tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: must be a readable tokenizer.json. Got: {error}. Download it again.") from error


def _letter_of_byte() -> dict[int, str]:
    """Byte -> the letter that stands for it in byte-level vocabularies: itself if it can be seen, else 256, 257 ..."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


LETTER_OF_BYTE = _letter_of_byte()


def byte_backend(*special: str) -> tokenizers.Tokenizer:
    """A backend with one token for each byte, whose id is the byte, then special tokens."""
    vocabulary = {LETTER_OF_BYTE[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
