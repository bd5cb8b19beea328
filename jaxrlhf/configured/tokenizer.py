"""The tokenizer of a run: the one in its config, or else that of the folder that its roles start from."""

import dataclasses
import json
import os
from pathlib import Path

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RoleConfig, RunConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.data.tokenizer_files import TOKENIZER, read_vocabulary
from jaxrlhf.models.config_json import CONFIG, GENERATION


def configured_tokenizer(config: RunConfig) -> TokenizerConfig:
    """The tokenizer of a run, of a kind other than `auto`. Raises ConfigError or ValueError if neither the config nor a
    folder that a role starts from has one, or if vocabularies contradict each other.
    """
    folders = shared_folders(config)
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


def shared_folders(config: RunConfig) -> dict[str, Path]:
    """The model folders of roles that read the run's own tokens, the actor's first."""
    apart = own_tokenizers(config)
    origins = {name: folder for name in config.roles if (folder := _origin(config, name)) is not None}
    from_them = {name: folder for name, folder in origins.items() if folder in apart.values()}
    folders = {name: folder for name, folder in (model_folders(config) | from_them).items() if name not in apart}
    actor = _origin(config, "actor")
    return dict(sorted(folders.items(), key=lambda item: item[1] != actor))


def own_tokenizers(config: RunConfig) -> dict[str, Path]:
    """Scorers that read rollouts by the tokenizer of their folder -> that folder: those that say so, and those whose
    folder has another vocabulary than the actor's. Raises ConfigError if a role says so that cannot."""
    chosen, actor = config.tokenizer, _origin(config, "actor")
    path = Path(chosen.path) if chosen.kind == "file" else actor
    if path is not None and path.is_dir():
        path /= TOKENIZER
    found = {}
    for name, role in config.roles.items():
        folder = _origin(config, name)
        where = f"roles.{name}.own_tokenizer"
        is_scorer = _only_scores(role)
        if role.own_tokenizer is not None and not is_scorer:
            raise ConfigError(
                f"{where}: is for a model with a scalar head that is not trained and shares no weights. Got a role of "
                "another kind. Remove it."
            )
        if role.own_tokenizer is not None and (folder is None or not (folder / TOKENIZER).is_file()):
            got = f"{folder}, without one" if folder is not None else brief(role.init)
            raise ConfigError(f"{where}: needs an `init` that is a folder with a {TOKENIZER}. Got {got}. Remove it.")
        if not is_scorer or folder is None or not (folder / TOKENIZER).is_file():
            continue
        differs = path is not None and path.is_file() and _difference(path, folder / TOKENIZER)
        if role.own_tokenizer is not None or (chosen.kind in ("auto", "file") and differs):
            found[name] = folder
    return found


def _only_scores(role: RoleConfig) -> bool:
    """Returns whether a role is a model that is not trained, has a scalar head alone, and weights of its own."""
    head = role.head or role.stated.get("head", "lm")
    return head == "scalar" and role.optimizer is None and role.lora is None and not role.shares and not role.average


def _origin(config: RunConfig, name: str) -> Path | None:
    """The folder that the weights of a role come from, by way of other roles; None if there is none."""
    passed: list[str] = []
    while name in config.roles and name not in passed:
        passed.append(name)
        role = config.roles[name]
        name = role.shares or (role.average.of if role.average is not None else role.init)
    return Path(name) if os.path.isfile(os.path.join(name, CONFIG)) else None


def tokenizer_notes(config: RunConfig) -> list[str]:
    """Notes on weights that may have been trained with another tokenizer than the run's."""
    kind = config.tokenizer.kind
    own = {folder for folder in shared_folders(config).values() if (folder / TOKENIZER).is_file()}
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
    for role, path in others:
        if difference := _difference(first_path, path):
            rule = "tokenizer.path: must have the vocabulary of the model, whose weights know no other"
            remedy = "Leave tokenizer out to use that of the model."
            if role:
                rule = f"roles.{role}.init: all roles must share one vocabulary, since each reads the others' tokens"
                remedy = (
                    "Let both start from models of one family, or score by a function of the text, or by a frozen "
                    "model with a scalar head, which may have its own tokenizer."
                )
            raise ConfigError(f"{rule}. Got {difference}, where {first} starts. {remedy}")


def _difference(first: Path, other: Path) -> str:
    """A token that has two ids in two vocabularies, or an id that has two tokens, in words; empty if there is none."""
    if first.read_bytes() == other.read_bytes():
        return ""
    ids = read_vocabulary(first)
    tokens = {number: token for token, number in ids.items()}
    for token, number in read_vocabulary(other).items():
        if ids.get(token, number) == number and tokens.get(number, token) == token:
            continue
        what, here, there = f"token {number}", brief(token), brief(tokens.get(number))
        if token in ids:
            what, here, there = brief(token), str(number), str(ids[token])
        return f"{what}, which is {here} in {other.parent} and {there} in {first.parent}"
    return ""
