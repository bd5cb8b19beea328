"""The rows of a run, training and held out, read and tokenized once and kept in host memory.

Letters: B rows, P prompt columns, R response columns, T = P + R columns.
"""

import dataclasses
import hashlib
import json
import pathlib
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrlhf.data.arithmetic import ArithmeticConfig, arithmetic_rows
from jaxrlhf.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from jaxrlhf.experience import Prompts, Sequences
from jaxrlhf.suggest import did_you_mean

RESERVED_COLUMNS = ("prompts", "completions", "finished")
"""What a reward function is given beside the columns of the rows."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the prompts come from: a built-in task or a JSONL file, exactly one of them."""

    task: str = ""
    """The name of a built-in task."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """The options of task `arithmetic`."""
    path: str = ""
    """JSONL for training: one object per line."""
    eval_path: str = ""
    """JSONL held out. Empty: `eval_rows` rows of `path`."""
    eval_rows: int = 512
    """How many rows of `path` are held out where `eval_path` is empty: the last ones of a fixed shuffle."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    """The responses that a warm start learns from. Rows may lack it."""
    template: str = ""
    """A Python format string over the columns, "{question}\\nAnswer: ". Empty: the prompt column as it is."""
    max_prompt_tokens: int = 0
    """Columns of a prompt batch. 0: as many as the longest prompt has tokens."""
    overlong: Literal["error", "drop"] = "error"
    """What is done about a longer prompt. Dropped rows are counted."""

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.path):
            raise ValueError(
                f"data: exactly one of task and path must be set. Got task={self.task!r} and path={self.path!r}. Set "
                f"data.task to a built-in task ({', '.join(TASKS)}) or data.path to a JSONL file."
            )
        if self.task and self.task not in TASKS:
            raise ValueError(
                f"data.task: must be a built-in task. Got {self.task!r}. Known: {', '.join(TASKS)}."
                f"{did_you_mean(self.task, TASKS)}"
            )
        if self.task and self.eval_path:
            raise ValueError(
                f"data.eval_path: a built-in task holds out its own rows. Got {self.eval_path!r} with "
                f"task={self.task!r}. Leave it out."
            )
        if self.eval_rows < 0:
            raise ValueError(f"data.eval_rows: must not be negative. Got {self.eval_rows}.")
        if self.max_prompt_tokens < 0:
            raise ValueError(
                f"data.max_prompt_tokens: must be positive, or 0 for the longest prompt. Got {self.max_prompt_tokens}."
            )
        if self.overlong not in ("error", "drop"):
            raise ValueError(f"data.overlong: must be 'error' or 'drop'. Got {self.overlong!r}.")
        try:
            fields = _template_fields(self.template)
        except ValueError as error:
            raise ValueError(
                f"data.template: must be a Python format string. Got {self.template!r}: {error}. Write a brace that "
                "is meant as such twice."
            ) from error
        if not all(fields) or any(field.isdigit() for field in fields) or (self.template and not fields):
            raise ValueError(f"data.template: must name columns, as in '{{question}}'. Got {self.template!r}.")


TASKS: dict[str, Callable[[DataConfig], tuple[list[dict[str, str]], list[dict[str, str]]]]] = {
    "arithmetic": lambda config: arithmetic_rows(config.arithmetic),
}
"""The built-in tasks: name -> (training rows, held-out rows)."""


@dataclasses.dataclass(frozen=True)
class PromptTable:
    """All rows of a run. Training rows are numbered from 0, the held-out ones follow."""

    tokenizer: Tokenizer
    num_train: int
    num_eval: int
    num_dropped: int
    """Rows whose prompt was too long."""
    prompt_length: int
    """P."""
    prompts: Sequence[str]
    tokens: Sequence[np.ndarray]
    completions: Sequence[np.ndarray | None]
    """The tokens of each row's completion and its end of text, where it has one."""
    other: Mapping[str, Sequence[Any]]
    sources: Sequence[str]
    """Where each row was read, for error messages."""

    def digest(self) -> str:
        """What tells these rows, tokenized and in this order, from any others."""
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(len(tokens).to_bytes(4, "little") + tokens.astype("<i4").tobytes())
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
        prompts_BP, prompt_mask_BP = self._padded_prompts(rows)
        response_BR = np.zeros((len(rows), max_new_tokens), bool)
        completions_BR = np.full(response_BR.shape, self.tokenizer.pad_id, np.int32)
        for index, row in enumerate(rows):
            completion = self.completions[row]
            assert completion is not None
            completions_BR[index, : len(completion)] = completion
            response_BR[index, : len(completion)] = True
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([prompts_BP, completions_BR], axis=1),
            "mask": np.concatenate([prompt_mask_BP, response_BR], axis=1),
            "response": response_BR,
        }
        return Sequences(**arrays)

    def demonstrable(self, max_new_tokens: int) -> np.ndarray:
        """The training rows that have a completion which fits, end of text included."""
        lengths = (0 if tokens is None else len(tokens) for tokens in self.completions[: self.num_train])
        return np.array([row for row, length in enumerate(lengths) if 0 < length <= max_new_tokens], np.int64)

    def check_demonstrations(self, rows: np.ndarray | None = None, *, max_new_tokens: int) -> None:
        """Asks that these rows (all training rows, if not given) have completions of at most `max_new_tokens` tokens.

        Raises:
            ValueError: One has none, or a longer one.
        """
        for row in range(self.num_train) if rows is None else rows:
            completion = self.completions[row]
            if completion is None:
                raise ValueError(
                    f"{self.sources[row]}: a warm start needs a completion in every row. Got none. Set "
                    "data.completion_column to the column that holds it, or leave the warm start out."
                )
            if len(completion) > max_new_tokens:
                raise ValueError(
                    f"{self.sources[row]}: a completion with its end of text must fit into max_new_tokens="
                    f"{max_new_tokens}. Got {len(completion)} tokens. Raise it, shorten the row, or set "
                    "warm_start.overlong to 'drop'."
                )

    def _padded_prompts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens_BP = np.full((len(rows), self.prompt_length), self.tokenizer.pad_id, np.int32)
        mask_BP = np.zeros(tokens_BP.shape, bool)
        for index, row in enumerate(rows):
            tokens = self.tokens[row]
            tokens_BP[index, self.prompt_length - len(tokens) :] = tokens
            mask_BP[index, self.prompt_length - len(tokens) :] = True
        return tokens_BP, mask_BP


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row as it was read."""

    source: str
    columns: dict[str, Any]


def load_prompts(config: DataConfig, tokenizer_config: TokenizerConfig) -> PromptTable:
    """Reads the rows, makes or reads the tokenizer, and tokenizes every row.

    A tokenizer of kind `train` learns from the training rows alone: prompts, completions and all columns of text.

    Raises:
        ValueError: A file, a row, the template or a length is not as it must be; the message says where.
    """
    train, held_out = _read_rows(config)
    rows = train + held_out
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    _check_columns(config, names)
    prompts = [_prompt(row, config) for row in rows]
    completions = [_completion(row, config.completion_column) for row in rows]
    tokenizer = load_tokenizer(tokenizer_config, _texts(train, prompts))
    tokens = [np.asarray(tokenizer.encode(prompt), np.int32) for prompt in prompts]
    kept, prompt_length = _fitting(tokens, [row.source for row in rows], config)
    num_train = sum(index < len(train) for index in kept)
    if num_train == 0:
        raise ValueError(
            f"data.max_prompt_tokens: must leave rows for training. Got {config.max_prompt_tokens}, which "
            f"drops all {len(train)}. Raise it to at least {min(map(len, tokens[: len(train)]))}."
        )
    other = [name for name in names if config.template or name != config.prompt_column]
    return PromptTable(
        tokenizer=tokenizer,
        num_train=num_train,
        num_eval=len(kept) - num_train,
        num_dropped=len(rows) - len(kept),
        prompt_length=prompt_length,
        prompts=[prompts[i] for i in kept],
        tokens=[tokens[i] for i in kept],
        completions=[_response(completions[i], tokenizer) for i in kept],
        other={name: [rows[i].columns.get(name) for i in kept] for name in other},
        sources=[rows[i].source for i in kept],
    )


def _read_rows(config: DataConfig) -> tuple[list[_Row], list[_Row]]:
    """Training and held-out rows. Which rows are held out depends on the file alone, not on the run's seed."""
    if config.task:
        train, held_out = (
            [_Row(f"task {config.task!r}, row {columns['prompt']!r}", dict(columns)) for columns in rows]
            for rows in TASKS[config.task](config)
        )
        return train, held_out
    rows = _read_jsonl("data.path", config.path)
    if config.eval_path:
        return rows, _read_jsonl("data.eval_path", config.eval_path)
    if config.eval_rows >= len(rows):
        raise ValueError(
            f"data.eval_rows: must leave rows for training out of the {len(rows)} of {config.path}. Got "
            f"{config.eval_rows}. Hold out fewer, or name a file in data.eval_path."
        )
    order = np.random.default_rng(0).permutation(len(rows))
    num_train = len(rows) - config.eval_rows
    return [rows[i] for i in sorted(order[:num_train])], [rows[i] for i in order[num_train:]]


def _read_jsonl(field: str, path: str) -> list[_Row]:
    """The objects of a file, one per line. Blank lines are skipped."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{field}: must be an existing file. Got {path!r}.")
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            columns = json.loads(line.decode())
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise ValueError(f"{path}:{number}: must be JSON in UTF-8. Got {_start(line)}: {error}.") from error
        if not isinstance(columns, dict):
            raise ValueError(f'{path}:{number}: must be a JSON object. Got {_start(line)}. Write {{"prompt": ...}}.')
        rows.append(_Row(f"{path}:{number}", columns))
    if not rows:
        raise ValueError(f"{field}: must hold at least one row. Got the empty file {path!r}.")
    return rows


def _check_columns(config: DataConfig, names: list[str]) -> None:
    """Asks that the template names columns which some row has, and that no column bears the name of something else."""
    for field in _template_fields(config.template):
        if field not in names:
            raise ValueError(
                f"data.template: must name columns of the rows. Got {field!r} in {config.template!r}. Known: "
                f"{', '.join(names)}.{did_you_mean(field, names)}"
            )
    for name in names:
        if name in RESERVED_COLUMNS:
            raise ValueError(
                f"data: no column may be called {', '.join(RESERVED_COLUMNS)}, which reward functions get "
                f"anyway. Got a column {name!r}. Rename it."
            )


def _prompt(row: _Row, config: DataConfig) -> str:
    """The text of a row's prompt."""
    for name in _template_fields(config.template) if config.template else [config.prompt_column]:
        if row.columns.get(name) is None:
            known = ", ".join(row.columns) or "nothing"
            remedy = "" if config.template else " Set data.prompt_column or data.template."
            raise ValueError(
                f"{row.source}: must have the column {name!r}. Got "
                f"{known}.{did_you_mean(name, (key for key in row.columns if key != name))}{remedy}"
            )
    if not config.template:
        return _text(row, config.prompt_column, row.columns[config.prompt_column])
    try:
        text = config.template.format_map(row.columns)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{row.source}: the template must fit every row. Got {config.template!r}: {error}.") from error
    return _text(row, "the filled template", text)


def _completion(row: _Row, column: str) -> str | None:
    value = row.columns.get(column)
    return None if value is None else _text(row, column, value, may_be_empty=True)


def _text(row: _Row, column: str, value: Any, *, may_be_empty: bool = False) -> str:
    """`value`, if it is text that can be tokenized."""
    if not isinstance(value, str):
        raise ValueError(f"{row.source}: {column} must be a string. Got {value!r}. Write it in quotes.")
    if not value and not may_be_empty:
        raise ValueError(f"{row.source}: {column} must not be empty. Got ''. Remove the row or fill it in.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{row.source}: {column} must be valid Unicode. Got {value[:60]!r}: {error}.") from error
    return value


def _texts(train: list[_Row], prompts: list[str]) -> Iterator[str]:
    """What a tokenizer learns from: of each training row the prompt and all columns of text, completions among them."""
    for row, prompt in zip(train, prompts, strict=False):  # `prompts` goes on with the held-out rows
        texts = (text for text in row.columns.values() if isinstance(text, str))
        yield from dict.fromkeys([prompt, *texts])


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


def _response(completion: str | None, tokenizer: Tokenizer) -> np.ndarray | None:
    return None if completion is None else np.asarray([*tokenizer.encode(completion), tokenizer.end_id], np.int32)


def _start(line: bytes) -> str:
    """The start of a line, for error messages."""
    return repr(line[:60].decode(errors="replace"))


def _template_fields(template: str) -> list[str]:
    """The columns that a format string names. ValueError where it is malformed."""
    return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
