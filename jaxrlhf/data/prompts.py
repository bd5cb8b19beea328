"""The rows of a run, training and held out, tokenized once and kept in host memory.

Letters: B rows, P prompt columns, R response columns, T = P + R columns.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.brief import brief
from jaxrlhf.data.config import TASKS, DataConfig, template_fields
from jaxrlhf.data.control_tokens import MarkedText, mark_text
from jaxrlhf.data.examples import Example, learnable_texts, prompt_texts, read_example, tokens_as_text
from jaxrlhf.data.files import Row, find_files, read_rows
from jaxrlhf.data.pairs import MalformedPair
from jaxrlhf.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from jaxrlhf.experience import Preferences, Prompts, Sequences
from jaxrlhf.suggest import did_you_mean

RESERVED_COLUMNS = ("prompts", "completions", "finished", "num_tokens")
"""What a reward function is given beside the columns of the rows."""


@dataclasses.dataclass(frozen=True)
class PromptTable:
    """All rows of a run. Training rows are numbered from 0, the held-out ones follow."""

    tokenizer: Tokenizer
    num_train: int
    num_eval: int
    num_dropped: int
    """Rows whose prompt was too long."""
    num_malformed: int
    """Rows whose pair was none."""
    withheld: tuple[str, ...]
    """Columns that no reward function is given, since it gets something else by their names."""
    notes: tuple[str, ...]
    """Further remarks on the rows, printed at the start."""
    prompt_length: int
    """P."""
    prompts: Sequence[str]
    tokens: Sequence[np.ndarray]
    completions: Sequence[np.ndarray | None]
    """The tokens of each row's completion and its end of text, where it has one. Of a pair, the chosen one."""
    rejected: Sequence[np.ndarray | None]
    """The same of the rejected ones."""
    margins: Sequence[float]
    """By how much each row's completion was preferred."""
    other: Mapping[str, Sequence[Any]]
    sources: Sequence[str]
    """Where each row was read, for error messages."""

    def digest(self) -> str:
        """A checksum of everything that a run sees of its rows, in their order: a resumed run needs the same one."""
        digest = hashlib.sha256(f"{self.num_train} {self.num_eval} {self.prompt_length}".encode())
        for tokens, completion in zip(self.tokens, self.completions, strict=True):
            for part in (tokens, completion):
                digest.update(b"none" if part is None else len(part).to_bytes(8, "little") + part.tobytes())
        for row, (rejected, margin) in enumerate(zip(self.rejected, self.margins, strict=True)):
            if rejected is not None:
                digest.update(repr((row, margin, rejected.tolist())).encode())
        for name, values in self.other.items():
            digest.update(repr((name, values)).encode(errors="backslashreplace"))
        return digest.hexdigest()

    def prompt(self, row: int) -> str:
        """The text of a row's prompt."""
        return self.prompts[row]

    def columns(self, rows: np.ndarray) -> dict[str, list[Any]]:
        """The other columns of these rows, in their order: what reward functions get. None where a row lacks one.

        The prompt column is not among them where it is the prompt itself; the completion column is.
        """
        return {name: [values[row] for row in rows] for name, values in self.other.items()}

    def batch(self, rows: np.ndarray, ids: np.ndarray) -> Prompts:
        """The prompts of these rows, padded on the left, as numpy arrays."""
        tokens_BP, mask_BP = self._padded_prompts(rows)
        arrays: dict[str, Any] = {
            "tokens": tokens_BP,
            "mask": mask_BP,
            "row": rows.astype(np.int32),
            "id": ids.astype(np.uint32),
        }
        return Prompts(**arrays)

    def demonstrations(self, rows: np.ndarray, *, max_new_tokens: int) -> Sequences:
        """Prompts with their completions and an end of text, as numpy arrays with R = `max_new_tokens`.

        Raises:
            ValueError: A row has no completion, or it does not fit.
        """
        self.check_demonstrations(rows, max_new_tokens=max_new_tokens)
        return self._with_responses(rows, self.completions, max_new_tokens)

    def preferences(self, rows: np.ndarray, *, max_new_tokens: int) -> Preferences:
        """Prompts with their chosen and with their rejected completions, as numpy arrays.

        Raises:
            ValueError: A row has no two completions, or one does not fit.
        """
        self.check_preferences(rows, max_new_tokens=max_new_tokens)
        return Preferences(
            chosen=self._with_responses(rows, self.completions, max_new_tokens),
            rejected=self._with_responses(rows, self.rejected, max_new_tokens),
            margin=np.asarray(self.margins, np.float32)[rows],  # pyright: ignore[reportArgumentType]
        )

    def demonstrable(self, max_new_tokens: int, *, held_out: bool = False) -> np.ndarray:
        """The training rows, or the held-out ones, that have a completion which fits, end of text included."""
        return self._fitting(self._completion_lengths, max_new_tokens, held_out=held_out)

    def preferable(self, max_new_tokens: int, *, held_out: bool = False) -> np.ndarray:
        """The training rows, or the held-out ones, that have two completions which fit."""
        lengths = np.where(
            np.minimum(self._completion_lengths, self._rejected_lengths) > 0,
            np.maximum(self._completion_lengths, self._rejected_lengths),
            0,
        )
        return self._fitting(lengths, max_new_tokens, held_out=held_out)

    def check_demonstrations(
        self, rows: np.ndarray | None = None, *, max_new_tokens: int, key: str = "data.overlong"
    ) -> None:
        """Asks that these rows (all training rows, if not given) have completions of at most `max_new_tokens` tokens.

        Raises:
            ValueError: One has none, or a longer one. It names `key`, which a user may set to drop such rows.
        """
        for row in range(self.num_train) if rows is None else rows:
            self._check_response(row, "completion", self._completion_lengths[row], max_new_tokens, key)

    def check_preferences(self, rows: np.ndarray | None = None, *, max_new_tokens: int) -> None:
        """The same for both completions of a pair."""
        for row in range(self.num_train) if rows is None else rows:
            self._check_response(row, "chosen completion", self._completion_lengths[row], max_new_tokens)
            self._check_response(row, "rejected completion", self._rejected_lengths[row], max_new_tokens)

    def numbers(self, *, held_out: bool = False) -> np.ndarray:
        """The numbers of all training rows, or of all held-out ones."""
        return np.arange(self.num_train, len(self.tokens)) if held_out else np.arange(self.num_train)

    def _check_response(
        self, row: int, what: str, length: int, max_new_tokens: int, key: str = "data.overlong"
    ) -> None:
        if length == 0:
            column = f"data.{what.partition(' ')[0]}_column"
            purpose = "supervised training" if what == "completion" else "training on preferences"
            raise ValueError(
                f"{self.sources[row]}: {purpose} needs a {what} in every row. Got none. Set {column} to the "
                f"column that holds it, or {key} to 'drop' to leave such rows out."
            )
        if length > max_new_tokens:
            raise ValueError(
                f"{self.sources[row]}: a {what} with its end of text must fit into max_new_tokens={max_new_tokens}. "
                f"Got {length} tokens. Raise it, shorten the row, or set {key} to 'drop'."
            )

    @functools.cached_property
    def _completion_lengths(self) -> np.ndarray:
        """Tokens of each row's completion, 0 where it has none."""
        return _lengths(self.completions)

    @functools.cached_property
    def _rejected_lengths(self) -> np.ndarray:
        return _lengths(self.rejected)

    def _fitting(self, lengths: np.ndarray, max_new_tokens: int, *, held_out: bool) -> np.ndarray:
        fits = np.flatnonzero((lengths > 0) & (lengths <= max_new_tokens))
        return fits[fits >= self.num_train] if held_out else fits[fits < self.num_train]

    def _with_responses(
        self, rows: np.ndarray, responses: Sequence[np.ndarray | None], max_new_tokens: int
    ) -> Sequences:
        """Prompts padded on the left, with these responses padded on the right."""
        prompts_BP, prompt_mask_BP = self._padded_prompts(rows)
        response_BR = np.zeros((len(rows), max_new_tokens), bool)
        tokens_BR = np.full(response_BR.shape, self.tokenizer.pad_id, np.int32)
        for index, row in enumerate(rows):
            tokens = responses[row]
            assert tokens is not None
            tokens_BR[index, : len(tokens)] = tokens
            response_BR[index, : len(tokens)] = True
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([prompts_BP, tokens_BR], axis=1),
            "mask": np.concatenate([prompt_mask_BP, response_BR], axis=1),
            "response": response_BR,
        }
        return Sequences(**arrays)

    def _padded_prompts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens_BP = np.full((len(rows), self.prompt_length), self.tokenizer.pad_id, np.int32)
        mask_BP = np.zeros(tokens_BP.shape, bool)
        for index, row in enumerate(rows):
            tokens = self.tokens[row]
            tokens_BP[index, self.prompt_length - len(tokens) :] = tokens
            mask_BP[index, self.prompt_length - len(tokens) :] = True
        return tokens_BP, mask_BP


def _lengths(responses: Sequence[np.ndarray | None]) -> np.ndarray:
    return np.array([0 if tokens is None else len(tokens) for tokens in responses], np.int64)


def load_prompts(config: DataConfig, tokenizer: TokenizerConfig | Tokenizer) -> PromptTable:
    """Reads the rows, makes or reads the tokenizer if it is not there, and tokenizes every row.

    A tokenizer of kind `train` learns from the training rows alone: prompts, completions and all columns of text.

    Raises:
        ValueError: A file, a row, a template or a length is not as it must be; the message says where.
    """
    train, held_out = _read_splits(config)
    names = list(dict.fromkeys(name for row in train + held_out for name in row.columns))
    _check_columns(config, names)
    num_read = len(train) + len(held_out)
    train, held_out = _read_examples(train, config), _read_examples(held_out, config)
    if not train:
        raise ValueError(
            f"data.malformed: must leave rows for training. Got 'drop', which drops all of {_shown(config.path)}."
        )
    examples = train + held_out
    rows = [example.row for example in examples]
    if isinstance(tokenizer, TokenizerConfig):
        tokenizer = load_tokenizer(tokenizer, learnable_texts(train))
    prompts = prompt_texts(examples, config, tokenizer)
    tokens = [np.asarray(tokenizer.encode(prompt.marked, mark=prompt.mark), np.int32) for prompt in prompts]
    kept, prompt_length = _fitting(tokens, [row.source for row in rows], config)
    num_train = sum(index < len(train) for index in kept)
    if num_train == 0:
        raise ValueError(
            f"data.max_prompt_tokens: must leave rows for training. Got {config.max_prompt_tokens}, which "
            f"drops all {len(train)}. Raise it to at least {min(map(len, tokens[: len(train)]))}."
        )
    control = tokens_as_text(config, tokenizer)
    completions = {i: _marked_response(examples[i].completion, tokenizer, control) for i in kept}
    rejected = {i: _marked_response(examples[i].rejected, tokenizer, control) for i in kept}
    as_text = [i for i in kept if any(text and text.mark for text in (prompts[i], completions[i], rejected[i]))]
    notes = _files_read(config)
    if as_text:
        notes.append(
            f"{len(as_text)} rows have control tokens in their texts, the first at {rows[as_text[0]].source}. They are "
            "encoded as text. Where they are meant as control tokens, set data.control_tokens to 'allow'."
        )
    is_prompt = config.chat == "none" and not config.template
    other = [name for name in names if name != config.prompt_column or not is_prompt]
    return PromptTable(
        tokenizer=tokenizer,
        num_train=num_train,
        num_eval=len(kept) - num_train,
        num_dropped=len(rows) - len(kept),
        num_malformed=num_read - len(rows),
        withheld=tuple(name for name in other if name in RESERVED_COLUMNS),
        notes=tuple(notes),
        prompt_length=prompt_length,
        prompts=[prompts[i].plain for i in kept],
        tokens=[tokens[i] for i in kept],
        completions=[_response(completions[i], tokenizer) for i in kept],
        rejected=[_response(rejected[i], tokenizer) for i in kept],
        margins=[examples[i].margin for i in kept],
        other={name: [rows[i].columns.get(name) for i in kept] for name in other if name not in RESERVED_COLUMNS},
        sources=[rows[i].source for i in kept],
    )


def _read_splits(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows. Which rows are held out depends on the file alone, not on the run's seed."""
    if config.task:
        train, held_out = (
            [Row(f"task {config.task!r}, row {columns['prompt']!r}", dict(columns)) for columns in rows]
            for rows in TASKS[config.task](config)
        )
        return train, held_out
    rows = read_rows("data.path", config.path)
    if config.eval_path:
        return rows, read_rows("data.eval_path", config.eval_path)
    if config.eval_rows >= len(rows):
        raise ValueError(
            f"data.eval_rows: must leave rows for training out of the {len(rows)} of {_shown(config.path)}. Got "
            f"{config.eval_rows}. Hold out fewer, or name a file in data.eval_path."
        )
    order = np.random.default_rng(0).permutation(len(rows))
    num_train = len(rows) - config.eval_rows
    return [rows[i] for i in sorted(order[:num_train])], [rows[i] for i in order[num_train:]]


def _files_read(config: DataConfig) -> list[str]:
    """Notes on which files rows come from, where a path stands for several."""
    notes = []
    for key, paths in (("path", config.path), ("eval_path", config.eval_path)):
        files = find_files(f"data.{key}", paths) if paths else []
        if len(files) > 1:
            notes.append(f"data.{key}: {len(files)} files in this order: {', '.join(files[:3])}{_others(files[3:])}.")
    return notes


def _others(files: list[str]) -> str:
    return f" ... {files[-1]}" if files else ""


def _shown(paths: str | Sequence[str]) -> str:
    return paths if isinstance(paths, str) else ", ".join(paths)


def _read_examples(rows: list[Row], config: DataConfig) -> list[Example]:
    """What the rows hold, without those whose pair is malformed, where they may be dropped."""
    examples = []
    for row in rows:
        try:
            examples.append(read_example(row, config))
        except MalformedPair:
            if config.malformed == "error":
                raise
    return examples


def _check_columns(config: DataConfig, names: list[str]) -> None:
    """Asks that the config names columns which some row has."""
    for field in template_fields(config.template):
        if field not in names:
            raise ValueError(
                f"data.template: must name columns of the rows. Got {brief(field)} in {brief(config.template)}. Known: "
                f"{', '.join(names)}.{did_you_mean(field, names)}"
            )
    if config.margin_column and config.margin_column not in names:
        raise ValueError(
            f"data.margin_column: must name a column of the rows. Got {brief(config.margin_column)}. Known: "
            f"{', '.join(names)}.{did_you_mean(config.margin_column, names)}"
        )


def _fitting(tokens: list[np.ndarray], sources: list[str], config: DataConfig) -> tuple[list[int], int]:
    """Which rows have prompts that fit, and the number of columns that the prompts take."""
    for ids, source in zip(tokens, sources, strict=True):
        if len(ids) == 0:
            raise ValueError(f"{source}: a prompt must have at least one token. Got none. Remove the row.")
    longest = max(range(len(tokens)), key=lambda index: len(tokens[index]))
    limit = config.max_prompt_tokens or len(tokens[longest])
    kept = [index for index, ids in enumerate(tokens) if len(ids) <= limit]
    if len(kept) < len(tokens) and config.overlong == "error":
        first = next(index for index, ids in enumerate(tokens) if len(ids) > limit)
        raise ValueError(
            f"{sources[first]}: a prompt must fit into data.max_prompt_tokens={limit}. Got "
            f"{len(tokens[first])} tokens; {len(tokens) - len(kept)} of {len(tokens)} rows are too long. "
            f"Raise it to {len(tokens[longest])}, or set data.overlong to 'drop'."
        )
    return kept, limit


def _marked_response(
    completion: str | None, tokenizer: Tokenizer, control: re.Pattern[str] | None
) -> MarkedText | None:
    """A completion with control tokens marked, but for an end of text at its end, which is one."""
    if completion is None:
        return None
    end = tokenizer.special_tokens.get("eos_token", "")
    if control is not None and end in tokenizer.control_tokens:
        completion = completion.removesuffix(end)
    return mark_text(completion, control)


def _response(completion: MarkedText | None, tokenizer: Tokenizer) -> np.ndarray | None:
    """The tokens of a completion, which end by the end of text, once."""
    if completion is None:
        return None
    tokens = tokenizer.encode(completion.marked, mark=completion.mark)
    return np.asarray(tokens if tokens[-1:] == [tokenizer.end_id] else [*tokens, tokenizer.end_id], np.int32)
