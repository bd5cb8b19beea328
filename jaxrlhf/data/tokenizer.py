"""Text to token ids and back: raw bytes, a tokenizer.json, or a byte-pair encoding trained on a run's own texts."""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrlhf.brief import brief
from jaxrlhf.data.control_tokens import control_pattern
from jaxrlhf.data.tokenizer_files import byte_backend, read_files, tokens_by_id, write_files
from jaxrlhf.suggest import did_you_mean

END_TOKENS = ("<|endoftext|>", "</s>", "<|eot_id|>", "<|im_end|>", "<eos>", "<|end_of_text|>")
"""Names by which a tokenizer.json is known to call its end of text, in the order in which they are tried."""
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]")
"""The same for padding. Where there is none, the end of text pads; masks tell the two apart."""
REPLACEMENT = "\ufffd"
MIN_BPE_VOCAB_SIZE = 258
"""256 bytes, padding, end of text."""

Kind = Literal["auto", "bytes", "file", "train"]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens, as chat templates call them: bos_token, eos_token ..."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja texts by name. An only one is called default."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def end_id(self) -> int:
        """End of text: what stops a response."""
        ...

    @property
    def control_tokens(self) -> Collection[str]:
        """Texts that are encoded as one token each, which is no text to the model: <|im_end|> ..."""
        ...

    def encode(self, text: str, *, mark: str = "") -> list[int]:
        """The ids of `text` alone: no beginning, no end of text is added.

        Args:
            mark: The character by which `mark_tokens` marked control tokens in it that are to be encoded as text.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Padding and end of text are dropped; an id outside the vocabulary becomes U+FFFD."""
        ...

    def export(self, folder: Path) -> None:
        """Write the files by which others read the tokenizer, beside those of a model."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer a run uses."""

    kind: Kind = "auto"
    """`auto`: that of the folder which roles start from; where none does, bytes. `bytes`: one token per byte of UTF-8.
    `file`: a tokenizer.json. `train`: learned from the training rows."""
    path: str = ""
    """Kind `file`: the tokenizer.json, or its folder. tokenizer_config.json and chat_template.jinja beside it count."""
    vocab_size: int = 2048
    """Kind `train`: how many tokens to learn, bytes and special tokens included. Few texts may give fewer."""
    end_token: str = ""
    """The end-of-text token, by its name in the vocabulary of a tokenizer.json. Empty: tokenizer_config.json's, else
    config.json's, else the first of the common names that the vocabulary has."""
    pad_token: str = ""
    """The padding token, by its name in the vocabulary of a tokenizer.json. Empty: tokenizer_config.json's, else
    config.json's, else a common name, else the end-of-text token."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"tokenizer.kind: must be one of {', '.join(get_args(Kind))}. Got {brief(self.kind)}."
                f"{did_you_mean(str(self.kind), get_args(Kind))}"
            )
        if self.kind == "file" and not self.path:
            raise ValueError("tokenizer.path: kind 'file' needs a path. Got ''. Name a tokenizer.json.")
        for field in ("path", "end_token", "pad_token"):
            if self.kind != "file" and getattr(self, field) and (self.kind != "auto" or field == "path"):
                raise ValueError(
                    f"tokenizer.{field}: only kind 'file' has one. Got {brief(getattr(self, field))} with kind "
                    f"{brief(self.kind)}. Leave it out or set tokenizer.kind to 'file'."
                )
        if self.kind == "train" and self.vocab_size < MIN_BPE_VOCAB_SIZE:
            raise ValueError(
                f"tokenizer.vocab_size: must be at least {MIN_BPE_VOCAB_SIZE} (256 bytes, padding, end of text). Got "
                f"{self.vocab_size}."
            )


class ByteTokenizer:
    """The bytes of UTF-8, then padding, then end of text."""

    name = "bytes"
    vocab_size = 258
    pad_id = 256
    end_id = 257
    special_tokens: Mapping[str, str] = {}
    chat_templates: Mapping[str, str] = {}
    control_tokens: Collection[str] = ()

    def encode(self, text: str, *, mark: str = "") -> list[int]:
        """The ids of `text` alone, without its marks."""
        return list((text.replace(mark, "") if mark else text).encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 and ids outside the vocabulary become U+FFFD."""
        text = bytearray()
        for token in ids:
            if 0 <= token < 256:
                text.append(int(token))
            elif token not in (self.pad_id, self.end_id):
                text.extend(REPLACEMENT.encode())
        return text.decode(errors="replace")

    def export(self, folder: Path) -> None:
        """Write a tokenizer.json that gives the same ids."""
        JSONTokenizer(byte_backend("<|pad|>", "<|endoftext|>"), name=self.name).export(folder)


class JSONTokenizer:
    """A tokenizer of the `tokenizers` library, as a tokenizer.json holds it.

    The special tokens that its post-processor would add are not added: a template writes them out where a model wants
    them ("<|begin_of_text|>{question}"), and chat templates do so by themselves.
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
            settings: What its tokenizer_config.json holds: names of special tokens and chat templates.
            files: The files that it was read from, by name.

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
    def from_file(cls, path: str | os.PathLike[str], *, end_token: str = "", pad_token: str = "") -> "JSONTokenizer":
        """Reads a tokenizer.json and what lies beside it. Truncation and padding that it asks for are switched off.

        Raises:
            ValueError: A file is missing or not what it must be, or a token is not in the vocabulary.
        """
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
        """The ids of `text` alone. Names of control tokens in it become those tokens, unless they are marked.

        Text with marks, between control tokens without, is encoded by itself; all else as it is without marks.
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
        """The ids of a text in which all control tokens are text."""
        self._backend.encode_special_tokens = True
        try:
            ids = self._ids(text.replace(mark, ""))
            if not self._control_ids.isdisjoint(ids):  # the vocabulary has them as words too: halves are none
                ids = [number for half in text.split(mark) for number in self._ids(half)]
        finally:
            self._backend.encode_special_tokens = False
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; padding and end of text are dropped, an id outside the vocabulary becomes U+FFFD."""
        runs: list[list[int]] = [[]]
        for token in map(int, ids):
            if token in (self.pad_id, self.end_id):
                continue
            if token in self._known:
                runs[-1].append(token)
            else:
                runs.append([])
        return REPLACEMENT.join(self._backend.decode(run, skip_special_tokens=False) for run in runs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a tokenizer.json that `from_file` reads back, and tokenizer_config.json beside it."""
        self._backend.save(os.fspath(path))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings, **self.special_tokens}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (Path(path).parent / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def export(self, folder: Path) -> None:
        """Write the files that it was read from, with the special tokens that the config named; `save`, where it was
        read from none."""
        if self._files:
            write_files(self._files, folder, renamed=self._renamed)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.save(folder / "tokenizer.json")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> JSONTokenizer:
    """Learns a byte-level byte-pair encoding; the same texts give the same tokens.

    Every text can be encoded: single bytes are in the vocabulary. `<|pad|>` is 0 and `<|endoftext|>` is 1.

    Raises:
        ValueError: `vocab_size` does not hold the bytes and the special tokens.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ValueError(
            f"train_bpe: vocab_size must be at least {MIN_BPE_VOCAB_SIZE} (256 bytes, padding, end of text). Got "
            f"{vocab_size}."
        )
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
    return JSONTokenizer(backend, name=f"bpe-{backend.get_vocab_size()}")


def load_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `config` names, which for kind `auto` is bytes. `texts` is read for kind `train` alone."""
    match config.kind:
        case "auto" | "bytes":
            return ByteTokenizer()
        case "file":
            return JSONTokenizer.from_file(config.path, end_token=config.end_token, pad_token=config.pad_token)
        case "train":
            return train_bpe(texts, vocab_size=config.vocab_size)


def _find_token(
    vocabulary: Mapping[str, int], wanted: str, settled: str, common: tuple[str, ...], field: str, name: str
) -> str | None:
    """`wanted` by the config, else `settled` by tokenizer_config.json, else the first common name in the vocabulary."""
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
    """What lies beside a tokenizer.json: tokenizer_config.json over special_tokens_map.json; chat_template.jinja."""
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
    """The names of special tokens; a tokenizer_config.json gives each as text or as an object with its `content`."""
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
    """The name of an entry in a list of chat templates; None where it is no such entry."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None
