"""Text to token ids and back: raw bytes, a tokenizer.json, or a byte-pair encoding trained on a run's own texts."""

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.data.control_tokens import control_pattern
from jaxrlhf.data.token_bytes import token_bytes
from jaxrlhf.data.tokenizer_files import byte_backend, read_files, tokens_by_id, write_files
from jaxrlhf.require import require

END_TOKENS = ("<|endoftext|>", "</s>", "<|eot_id|>", "<|im_end|>", "<eos>", "<|end_of_text|>")
"""Common names of the end of text in a tokenizer.json, in the order in which they are tried."""
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]")
"""The same for padding. Without any, the end of text pads; masks tell the two apart."""
REPLACEMENT = "\ufffd"
MIN_BPE_VOCAB_SIZE = 258
_LEAST = f"must be at least {MIN_BPE_VOCAB_SIZE} (256 bytes, padding, end of text)"

TokenizerKind = Literal["auto", "bytes", "file", "train"]


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Settings of a run's tokenizer.

    >>> TokenizerConfig(kind="train", vocab_size=4096).vocab_size
    4096
    """

    kind: TokenizerKind = "auto"
    """`auto`: the tokenizer of the folder that roles start from, or bytes if none does. `bytes`: one token per byte of
    UTF-8. `file`: a tokenizer.json. `train`: learned from the training rows."""
    path: str = ""
    """Kind `file`: the tokenizer.json, or its folder. tokenizer_config.json and chat_template.jinja there are read."""
    vocab_size: int = 2048
    """Kind `train`: the number of tokens to learn, bytes and special tokens included. Few texts may give fewer."""
    end_token: str = ""
    """The end-of-text token, by its name in the vocabulary of a tokenizer.json. Empty: tokenizer_config.json's, else
    config.json's, else the first of the common names that the vocabulary has."""
    pad_token: str = ""
    """The padding token, by its name in the vocabulary of a tokenizer.json. Empty: tokenizer_config.json's, else
    config.json's, else a common name, else the end-of-text token."""

    def __post_init__(self) -> None:
        if self.kind == "file" and not self.path:
            raise ValueError("tokenizer.path: kind 'file' needs a path. Got ''. Name a tokenizer.json.")
        for field in ("path", "end_token", "pad_token"):
            if self.kind != "file" and getattr(self, field) and (self.kind != "auto" or field == "path"):
                raise ValueError(
                    f"tokenizer.{field}: only kind 'file' has one. Got {brief(getattr(self, field))} with kind "
                    f"{brief(self.kind)}. Leave it out or set tokenizer.kind to 'file'."
                )
        holds_bytes = self.kind != "train" or self.vocab_size >= MIN_BPE_VOCAB_SIZE
        require(holds_bytes, "tokenizer.vocab_size", _LEAST, self.vocab_size)


class Tokenizer:
    """A tokenizer of the `tokenizers` library, as a tokenizer.json describes it.

    The special tokens of its post-processor are not added: a template writes those that the model needs
    ("<|begin_of_text|>{question}"), as chat templates do by themselves.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        end_token: str = "",
        pad_token: str = "",
        settings: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Wraps `backend`.

        Args:
            settings: The content of its tokenizer_config.json: names of special tokens and chat templates.
            files: The contents of the files that it was read from, by name.

        Raises:
            ValueError: A token is not in the vocabulary, or none of the common names of an end of text is.
        """
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._backend = backend
        self._known = frozenset(vocabulary.values())
        self._settings = dict(settings or {})
        self._files = dict(files or {})
        named = {"eos_token": end_token, "pad_token": pad_token}
        self._renamed = {key: token for key, token in named.items() if token}
        special = _special_tokens(self._settings)
        end = _find_token(vocabulary, end_token, special.get("eos_token", ""), END_TOKENS, "end_token", name)
        if end is None:
            raise ValueError(
                f"tokenizer.end_token: {name} has no token of a common name ({', '.join(END_TOKENS)}). Got ''. Set "
                "tokenizer.end_token to the name of the token that ends a text."
            )
        pad = _find_token(vocabulary, pad_token, special.get("pad_token", ""), PAD_TOKENS, "pad_token", name)
        self.end_id = vocabulary[end]
        self.pad_id = self.end_id if pad is None else vocabulary[pad]
        self.special_tokens: Mapping[str, str] = {**special, "eos_token": end, **({"pad_token": pad} if pad else {})}
        self.chat_templates: Mapping[str, str] = _chat_templates(self._settings, name)
        added, named = backend.get_added_tokens_decoder(), set(self.special_tokens.values())
        control = {number: token.content for number, token in added.items() if token.special or token.content in named}
        self.control_tokens: Collection[str] = tuple(control.values())
        self._control, self._control_ids = control_pattern(self.control_tokens), frozenset(control)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, end_token: str = "", pad_token: str = "") -> "Tokenizer":
        """Reads a tokenizer.json and the files that belong to it, without the truncation and padding that it sets.
        Raises ValueError if a file is missing or malformed, or a token is not in the vocabulary."""
        name = os.fspath(path)
        if os.path.isdir(name):
            name = os.path.join(name, "tokenizer.json")
        if not os.path.isfile(name):
            raise ValueError(f"tokenizer.path: must be an existing file. Got {brief(name)}. Name a tokenizer.json.")
        try:
            backend = tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"tokenizer.path: {brief(name)} is not a readable tokenizer.json. Got: {error}. Write one with "
                "`tokenizers.Tokenizer.save` or `train_bpe(...).save`."
            ) from error
        backend.no_truncation()
        backend.no_padding()
        folder = Path(name).parent
        settings = {**tokens_by_id(folder, backend), **_read_settings(folder)}
        files = read_files(Path(name))
        return cls(backend, name=name, end_token=end_token, pad_token=pad_token, settings=settings, files=files)

    def encode(self, text: str, *, mark: str = "") -> list[int]:
        """The ids of `text`. No beginning or end of text is added.

        Control tokens in the text are encoded as such unless they are marked, by the character `mark` (`mark_tokens`).
        Text with marks is encoded apart from the text before and after it.
        """
        if not mark or self._control is None:
            return self._ids(text.replace(mark, "") if mark else text)
        ids, unmarked = [], ""
        for part in self._control.split(text):
            if mark not in part:
                unmarked += part
                continue
            ids += self._ids(unmarked) + self._ids_of_text(part, mark)
            unmarked = ""
        return ids + self._ids(unmarked)

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _ids_of_text(self, text: str, mark: str) -> list[int]:
        """The ids of a text with all control tokens in it encoded as text."""
        self._backend.encode_special_tokens = True
        try:
            ids = self._ids(text.replace(mark, ""))
            if not self._control_ids.isdisjoint(ids):  # the vocabulary has them as words too, but not their halves
                ids = [number for half in text.split(mark) for number in self._ids(half)]
        finally:
            self._backend.encode_special_tokens = False
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without padding and end of text. Ids outside the vocabulary become U+FFFD."""
        runs: list[list[int]] = [[]]
        for token in map(int, ids):
            if token in (self.pad_id, self.end_id):
                continue
            if token in self._known:
                runs[-1].append(token)
            else:
                runs.append([])
        return REPLACEMENT.join(self._backend.decode(run, skip_special_tokens=False) for run in runs)

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The special tokens that its post-processor puts before a text, such as <s>."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        return list(itertools.takewhile(lambda token: token in self._control_ids, encoding.ids))

    def is_control(self, token: int) -> bool:
        """True for a control token, the end of text and padding."""
        return token in self._control_ids or token in (self.pad_id, self.end_id)

    def spans(self, ids: Iterable[int]) -> list[tuple[str, bool]]:
        """The text of `ids` in order, cut at control tokens: (text, True for one control token as the vocabulary spells
        it)."""
        spans: list[tuple[str, bool]] = []
        between: list[int] = []
        for token in map(int, ids):
            if not self.is_control(token):
                between.append(token)
                continue
            spans += [(self.decode(between), False)] if between else []
            spans.append((self._backend.id_to_token(token) or "", True))
            between = []
        return spans + ([(self.decode(between), False)] if between else [])

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that `decode` writes for each id within a text. Characters may be split over tokens. Raises
        ValueError if the decoder is of a kind that is not known (`data.token_bytes`)."""
        known = token_bytes(self._backend, name=self.name) | {self.pad_id: b"", self.end_id: b""}
        return tuple(known.get(number, REPLACEMENT.encode()) for number in range(self.vocab_size))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a tokenizer.json that `from_file` reads back, and a tokenizer_config.json in the same folder."""
        self._backend.save(os.fspath(path))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings, **self.special_tokens}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (Path(path).parent / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def export(self, folder: Path) -> None:
        """Writes the files that it was read from, with the special tokens that the config named, or else `save`s."""
        if self._files:
            write_files(self._files, folder, renamed=self._renamed)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.save(folder / "tokenizer.json")


def byte_tokenizer() -> Tokenizer:
    """The bytes of UTF-8, then padding, then end of text."""
    return Tokenizer(byte_backend("<|pad|>", "<|endoftext|>"), name="bytes")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learns a byte-level byte-pair encoding. The same texts give the same tokens.

    Every text can be encoded, since all bytes are in the vocabulary. `<|pad|>` is 0 and `<|endoftext|>` is 1.

    Raises:
        ValueError: `vocab_size` does not hold the bytes and the special tokens.
    """
    require(vocab_size >= MIN_BPE_VOCAB_SIZE, "train_bpe", f"vocab_size {_LEAST}", vocab_size)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, name=f"bpe-{backend.get_vocab_size()}")


def load_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a config; bytes for kind `auto`. `texts` is read for kind `train` only."""
    match config.kind:
        case "auto" | "bytes":
            return byte_tokenizer()
        case "file":
            return Tokenizer.from_file(config.path, end_token=config.end_token, pad_token=config.pad_token)
        case "train":
            return train_bpe(texts, vocab_size=config.vocab_size)


def _find_token(
    vocabulary: Mapping[str, int], wanted: str, settled: str, common: tuple[str, ...], field: str, name: str
) -> str | None:
    """The token `wanted` by the config, else `settled` by tokenizer_config.json, else the first common name."""
    token = wanted or settled
    if token and token not in vocabulary:
        named = "" if wanted else f" It stands in the tokenizer_config.json beside it: set tokenizer.{field}."
        raise ValueError(
            f"tokenizer.{field}: must be in the vocabulary of {name}. Got "
            f"{brief(token)}.{did_you_mean(token, vocabulary)}"
            f"{named}"
        )
    return token or next((word for word in common if word in vocabulary), None)


def _read_settings(folder: Path) -> dict[str, Any]:
    """The settings beside a tokenizer.json: tokenizer_config.json over special_tokens_map.json; chat_template.jinja."""
    settings: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        if not file.is_file():
            continue
        try:
            read = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{file}: must be JSON in UTF-8. Got {error}. Mend it or take it away.") from error
        if not isinstance(read, dict):
            raise ValueError(f"{file}: must be a JSON object. Got {type(read).__name__}. Mend it or take it away.")
        settings |= {key: value for key, value in read.items() if value is not None}
    template = folder / "chat_template.jinja"
    if template.is_file():
        try:
            text = template.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{template}: must be text in UTF-8. Got {error}. Mend it or take it away.") from error
        named = settings.get("chat_template")
        others = [entry for entry in named if _name(entry) != "default"] if isinstance(named, list) else []
        settings["chat_template"] = [{"name": "default", "template": text}, *others] if others else text
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens, each given as text or as an object with its `content`."""
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str) and text:
            tokens[key] = text
    return tokens


def _chat_templates(settings: Mapping[str, Any], name: str) -> dict[str, str]:
    """The chat templates of a tokenizer_config.json: one text, or a list of {name, template}."""
    found = settings.get("chat_template", {})
    entries = [{"name": "default", "template": found}] if isinstance(found, str) else found or []
    if not isinstance(entries, list) or not all(
        _name(entry) and isinstance(entry.get("template"), str) for entry in entries
    ):
        raise ValueError(
            f"tokenizer_config.json beside {name}: chat_template must be text or a list of {{name, template}}. Got "
            f"{repr(found)[:100]}."
        )
    return {entry["name"]: entry["template"] for entry in entries}


def _name(entry: Any) -> str | None:
    """The name of an entry in a list of chat templates; None if the entry is malformed."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None
