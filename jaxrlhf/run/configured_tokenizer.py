"""The tokenizer of a run: the one in its config, or else that of the folder that its roles start from."""

import dataclasses
import json
import os
from pathlib import Path

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.data.tokenizer_files import TOKENIZER, read_vocabulary
from jaxrlhf.models.config_json import CONFIG, GENERATION


def configured_tokenizer(config: RunConfig) -> TokenizerConfig:
    """The tokenizer of a run, of a kind other than `auto`. Raises ConfigError or ValueError if neither the config nor a
    folder that a role starts from has one, or if vocabularies contradict each other.
    """
    folders = model_folders(config)
    _check_vocabularies(folders, config.tokenizer)
    if config.tokenizer.kind != "auto":
        return config.tokenizer
    for role, folder in folders.items():
        if not (folder / TOKENIZER).is_file():
            found = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise ConfigError(
                f"roles.{role}.init: the folder must have a {TOKENIZER}, since the config names no tokenizer. Got "
                f"{found} in {folder}. Add it (transformers makes one: AutoTokenizer.from_pretrained, then "
                "save_pretrained), set tokenizer to {kind: file, path: ...}, or to {kind: bytes} for a model of bytes."
            )
    if not folders:
        return dataclasses.replace(config.tokenizer, kind="bytes")
    for folder in folders.values():
        _check_ends(folder)
    first = next(iter(folders.values()))
    return dataclasses.replace(config.tokenizer, kind="file", path=str(first))


def _check_ends(folder: Path) -> None:
    """Checks that the tokens at which a folder's model ends a text are tokens of the tokenizer beside it."""
    for name in (CONFIG, GENERATION):
        if unknown := _ends(folder / name) - (known := set(read_vocabulary(folder / TOKENIZER).values())):
            raise ConfigError(
                f"{folder / name}: eos_token_id: must be tokens of the {TOKENIZER} beside it. Got {min(unknown)}, and "
                f"{len(known)} tokens up to {max(known, default=-1)}. That file is of another model: download the "
                "folder again."
            )


def _ends(path: Path) -> set[int]:
    """The `eos_token_id` of a JSON file, one or several. What cannot be read is reported elsewhere."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    ends = fields.get("eos_token_id") if isinstance(fields, dict) else None
    return {each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int}


def tokenizer_notes(config: RunConfig) -> list[str]:
    """Notes on weights that may have been trained with another tokenizer than the run's."""
    kind = config.tokenizer.kind
    own = {folder for folder in model_folders(config).values() if (folder / TOKENIZER).is_file()}
    if kind not in ("bytes", "train") or not own:
        return []
    return [
        f"tokenizer.kind is {kind}, while {', '.join(sorted(map(str, own)))} has a tokenizer of its own: unless both "
        "are the same, its weights know other tokens. Leave tokenizer out to use that one."
    ]


def model_folders(config: RunConfig) -> dict[str, Path]:
    """The model folders that roles start from, by role. Invalid folders are reported elsewhere."""
    named = {name: role.init for name, role in config.roles.items() if role.init not in ("random", *config.roles)}
    return {name: Path(init) for name, init in named.items() if os.path.isfile(os.path.join(init, "config.json"))}


def _check_vocabularies(folders: dict[str, Path], chosen: TokenizerConfig) -> None:
    """Checks that tokens have the same ids in the folders of all roles, which read one another's tokens, and in the
    config's tokenizer."""
    paths = {role: folder / TOKENIZER for role, folder in folders.items() if (folder / TOKENIZER).is_file()}
    path = Path(chosen.path) / TOKENIZER if os.path.isdir(chosen.path) else Path(chosen.path)
    if chosen.kind == "file" and path.is_file():
        paths |= {"": path}
    if len({path.read_bytes() for path in paths.values()}) < 2 or list(paths) == [""]:
        return
    (first, first_path), *others = paths.items()
    ids = read_vocabulary(first_path)
    tokens = {number: token for token, number in ids.items()}
    for role, path in others:
        for token, number in read_vocabulary(path).items():
            if ids.get(token, number) == number and tokens.get(number, token) == token:
                continue
            what, here, there = f"token {number}", brief(token), brief(tokens.get(number))
            if token in ids:
                what, here, there = brief(token), str(number), str(ids[token])
            rule = "tokenizer.path: must have the vocabulary of the model, whose weights know no other"
            remedy = "Leave tokenizer out to use that of the model."
            if role:
                rule = f"roles.{role}.init: all roles must share one vocabulary, since each reads the others' tokens"
                remedy = "Let both start from models of one family, or score by a function of the text."
            raise ConfigError(
                f"{rule}. Got {what}, which is {here} in {path.parent} and {there} in {first_path.parent}, where "
                f"{first} starts. {remedy}"
            )
