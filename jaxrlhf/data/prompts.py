"""The rows of a run, training and held out, tokenized once and kept in host memory.

Letters: B rows, P prompt columns, R response columns, C columns of either.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.data.columns import settle_columns, with_columns
from jaxrlhf.data.config import TASKS, DataConfig, template_fields
from jaxrlhf.data.control_tokens import MarkedText, mark_text
from jaxrlhf.data.dialogues import Dialogue, earlier_replies, read_dialogues
from jaxrlhf.data.examples import Example, learnable_texts, prompt_texts, read_example, tokens_as_text
from jaxrlhf.data.files import Row, find_files, read_rows
from jaxrlhf.data.pairs import MalformedPair
from jaxrlhf.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from jaxrlhf.experience import Preferences, Prompts, RowKind, Sequences

RESERVED_COLUMNS = ("prompts", "completions", "finished", "num_tokens")
"""Arguments of reward functions that are not columns of the rows."""


@dataclasses.dataclass(frozen=True)
class PromptTable:
    """All rows of a run. Training rows are numbered from 0, the held-out ones follow."""

    tokenizer: Tokenizer
    num_train: int
    num_eval: int
    num_dropped: int
    """The number of rows whose prompt was too long."""
    num_malformed: int
    """The number of rows without a pair of two different replies."""
    left_out: Sequence[str]
    """These rows by file and line, each with what is wrong with it."""
    withheld: tuple[str, ...]
    """Columns that reward functions do not get, since these names mean something else to them."""
    notes: tuple[str, ...]
    """Further remarks on the rows, printed at the start."""
    config: DataConfig
    """The settings under which the rows were read, without any `auto`."""
    reads: str
    """The columns that are read from the files, in one line; empty for a built-in task."""
    prompt_length: int
    prompts: Sequence[str]
    tokens: Sequence[np.ndarray]
    completions: Sequence[np.ndarray | None]
    """Tokens of each row's completion, or of the chosen one of a pair, with its end of text; None without one."""
    rejected: Sequence[np.ndarray | None]
    """The same for the rejected completions."""
    margins: Sequence[float]
    """By how much each row's completion was preferred."""
    dialogues: Mapping[int, Dialogue]
    """Row -> the demonstration that it gives, if earlier replies than its completion are learned from too."""
    num_unlearned: int
    """The number of rows with earlier replies that are not learned from."""
    other: Mapping[str, Sequence[Any]]
    sources: Sequence[str]
    """The file and line of each row, for error messages."""
    examples: Sequence[Example]
    """What the rows were read as, for scorers that encode their prompts by a tokenizer of their own."""

    def digest(self) -> str:
        """A checksum of everything that a run reads of its rows, in their order. A resumed run needs the same one."""
        digest = hashlib.sha256(f"{self.num_train} {self.num_eval} {self.prompt_length}".encode())
        for tokens, completion in zip(self.tokens, self.completions, strict=True):
            for part in (tokens, completion):
                digest.update(b"none" if part is None else len(part).to_bytes(8, "little") + part.tobytes())
        for row, (rejected, margin) in enumerate(zip(self.rejected, self.margins, strict=True)):
            if rejected is not None:
                digest.update(repr((row, margin, rejected.tolist())).encode())
        for row, dialogue in self.dialogues.items():
            digest.update(repr([row, *(part.tolist() for part in dataclasses.astuple(dialogue))]).encode())
        for name, values in self.other.items():
            digest.update(repr((name, values)).encode(errors="backslashreplace"))
        return digest.hexdigest()

    def columns(self, rows: np.ndarray) -> dict[str, list[Any]]:
        """The columns that reward functions get, for some rows in their order; None where a row lacks one.

        A prompt column that is the prompt itself is left out; the completion column is included.
        """
        return {name: [values[row] for row in rows] for name, values in self.other.items()}

    def batch(self, rows: np.ndarray, ids: np.ndarray) -> Prompts:
        """The prompts of these rows, padded on the left, as numpy arrays."""
        tokens_BP, mask_BP = self._padded(rows, self.tokens, self.prompt_length, on_left=True)
        arrays: dict[str, Any] = {
            "tokens": tokens_BP,
            "mask": mask_BP,
            "row": rows.astype(np.int32),
            "id": ids.astype(np.uint32),
        }
        return Prompts(**arrays)

    def demonstrations(self, rows: np.ndarray, *, max_new_tokens: int) -> Sequences:
        """Prompts with their completions and an end of text, as numpy arrays with R = `max_new_tokens`.

        A dialogue that is learned from in several places begins its response at the first of them, and `response` is
        False at what stands between them. Prompts then have as many columns as the longest of these needs.
        """
        self.check("demonstrations", rows, max_new_tokens=max_new_tokens)
        prompts, responses, columns = self._demonstrations
        made = self._with_responses(rows, responses, max_new_tokens, prompts, columns)
        for index, row in enumerate(rows):
            if row in self.dialogues:
                learned = self.dialogues[row].learned
                made.response[index, : len(learned)] = learned
        return made

    def preferences(self, rows: np.ndarray, *, max_new_tokens: int) -> Preferences:
        """Prompts with their chosen and with their rejected completions, as numpy arrays."""
        self.check("preferences", rows, max_new_tokens=max_new_tokens)
        return Preferences(
            chosen=self._with_responses(rows, self.completions, max_new_tokens),
            rejected=self._with_responses(rows, self.rejected, max_new_tokens),
            margin=np.asarray(self.margins, np.float32)[rows],  # pyright: ignore[reportArgumentType]
        )

    def usable(self, kind: RowKind, max_new_tokens: int = 0, *, held_out: bool = False) -> np.ndarray:
        """The numbers of the training rows, or the held-out ones, that can be used as a kind of rows.

        Demonstrations need one completion, and preferences two, of at most `max_new_tokens` tokens, end of text
        included. Every row is a prompt.
        """
        numbers = np.arange(self.num_train, len(self.tokens)) if held_out else np.arange(self.num_train)
        for lengths in self.lengths(kind).values():
            numbers = numbers[(lengths[numbers] > 0) & (lengths[numbers] <= max_new_tokens)]
        return numbers

    def check(self, kind: RowKind, rows: np.ndarray, *, max_new_tokens: int, key: str = "data.overlong") -> None:
        """Checks that rows have the completions that a kind of rows needs, each of at most `max_new_tokens` tokens.
        Errors say that the `key` of the config can be set to 'drop'."""
        purpose = "supervised training" if kind == "demonstrations" else "training on preferences"
        for row in rows:
            for what, lengths in self.lengths(kind).items():
                if lengths[row] == 0:
                    raise ValueError(
                        f"{self.sources[row]}: {purpose} needs a {what} in every row. Got none. Set "
                        f"data.{what.partition(' ')[0]}_column to the column that holds it, or {key} to 'drop' to "
                        "leave such rows out."
                    )
                if lengths[row] > max_new_tokens:
                    raise ValueError(
                        f"{self.sources[row]}: a {what} with its end of text must fit into max_new_tokens="
                        f"{max_new_tokens}. Got {lengths[row]} tokens. Raise it, shorten the row, or set {key} to "
                        "'drop'."
                    )

    @functools.cached_property
    def _demonstrations(self) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray | None], int]:
        """The prompts and responses of all rows as demonstrations, and the number of columns of the prompts."""
        if not self.dialogues:
            return self.tokens, self.completions, self.prompt_length
        prompts, responses = list(self.tokens), list(self.completions)
        for row, dialogue in self.dialogues.items():
            prompts[row], responses[row] = dialogue.prompt, dialogue.response
        given = [prompt for prompt, response in zip(prompts, responses, strict=True) if response is not None]
        return prompts, responses, max(map(len, given))

    def lengths(self, kind: RowKind) -> dict[str, np.ndarray]:
        """Completion that a kind of rows needs, as errors call it -> its tokens in each row, 0 if there is none."""
        completions, rejected, demonstrated = self._response_lengths
        if kind == "preferences":
            return {"chosen completion": completions, "rejected completion": rejected}
        return {"completion": demonstrated} if kind == "demonstrations" else {}

    @functools.cached_property
    def _response_lengths(self) -> list[np.ndarray]:
        responses = (self.completions, self.rejected, self._demonstrations[1])
        return [np.array([0 if x is None else len(x) for x in each], np.int64) for each in responses]

    def _with_responses(
        self,
        rows: np.ndarray,
        responses: Sequence[np.ndarray | None],
        max_new_tokens: int,
        prompts: Sequence[np.ndarray] | None = None,
        prompt_columns: int = 0,
    ) -> Sequences:
        """Prompts padded on the left, with these responses padded on the right. None means the rows' own prompts."""
        given = (self.tokens, self.prompt_length) if prompts is None else (prompts, prompt_columns)
        prompts_BP, prompt_mask_BP = self._padded(rows, *given, on_left=True)
        tokens_BR, response_BR = self._padded(rows, responses, max_new_tokens, on_left=False)
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([prompts_BP, tokens_BR], axis=1),
            "mask": np.concatenate([prompt_mask_BP, response_BR], axis=1),
            "response": response_BR,
        }
        return Sequences(**arrays)

    def _padded(
        self, rows: np.ndarray, texts: Sequence[np.ndarray | None], columns: int, *, on_left: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of these rows' texts, padded on one side, and the mask that is True at them."""
        tokens_BC = np.full((len(rows), columns), self.tokenizer.pad_id, np.int32)
        mask_BC = np.zeros(tokens_BC.shape, bool)
        for index, row in enumerate(rows):
            tokens = texts[row]
            assert tokens is not None
            first = columns - len(tokens) if on_left else 0
            tokens_BC[index, first : first + len(tokens)] = tokens
            mask_BC[index, first : first + len(tokens)] = True
        return tokens_BC, mask_BC


def load_prompts(config: DataConfig, tokenizer: TokenizerConfig | Tokenizer) -> PromptTable:
    """Reads the rows and tokenizes them, by a given tokenizer or by the one that a config describes.

    A tokenizer of kind `train` learns from the training rows only: prompts, completions and all columns of text.
    Raises ValueError, which says where, if a file, a row, a template or a length is invalid.
    """
    train, held_out = _read_splits(config)
    names = list(dict.fromkeys(name for row in train + held_out for name in row.columns))
    _check_columns(config, names)
    config, reads = settle_columns(config, train + held_out)
    train, held_out = ([with_columns(row, config) for row in rows] for rows in (train, held_out))
    if config.answer_column and "answer" not in names:
        names.append("answer")
    malformed: list[str] = []
    train, held_out = _read_examples(train, config, malformed), _read_examples(held_out, config, malformed)
    if not train:
        source = _shown(config.path)
        raise ValueError(f"data.malformed: must leave rows for training. Got 'drop', which drops all of {source}.")
    examples = train + held_out
    rows = [example.row for example in examples]
    if isinstance(tokenizer, TokenizerConfig):
        tokenizer = load_tokenizer(tokenizer, learnable_texts(train))
    prompts = prompt_texts(examples, config, tokenizer)
    control = tokens_as_text(config, tokenizer)
    if config.text_column:  # the first token, which nothing comes before, is the prompt
        wholes = {i: _whole_text(example, tokenizer, control) for i, example in enumerate(examples)}
        tokens = [whole[:1] for whole in wholes.values()]
    else:
        wholes = {}
        tokens = [np.asarray(tokenizer.encode(prompt.marked, mark=prompt.mark), np.int32) for prompt in prompts]
    kept, prompt_length = _fitting(tokens, [row.source for row in rows], config)
    fits = set(kept)
    left_out = [
        f"{row.source}: its prompt of {len(ids)} tokens is over {prompt_length} (data.overlong: drop)"
        for i, (row, ids) in enumerate(zip(rows, tokens, strict=True))
        if i not in fits
    ]
    num_train = sum(index < len(train) for index in kept)
    if num_train == 0:
        raise ValueError(
            f"data.max_prompt_tokens: must leave rows for training. Got {config.max_prompt_tokens}, which "
            f"drops all {len(train)}. Raise it to at least {min(map(len, tokens[: len(train)]))}."
        )
    completions = {i: _marked_response(examples[i].completion, tokenizer, control) for i in kept}
    rejected = {i: _marked_response(examples[i].rejected, tokenizer, control) for i in kept}
    as_text = [i for i in kept if any(text and text.mark for text in (prompts[i], completions[i], rejected[i]))]
    notes = _files_read(config)
    if as_text:
        notes.append(
            f"{len(as_text)} rows have control tokens in their texts, the first at {rows[as_text[0]].source}. They are "
            "encoded as text. Where they are meant as control tokens, set data.control_tokens to 'allow'."
        )
    responses = {i: wholes[i][1:] if wholes else _response(completions[i], tokenizer) for i in kept}
    continued = {i: examples[i] for i in kept if earlier_replies(examples[i])}
    dialogues: Mapping[int, Dialogue] = {}
    if continued and config.assistant_turns == "all":
        texts = {i: prompts[i] for i in continued}
        last = {i: reply for i in continued if (reply := responses[i]) is not None}
        dialogues = read_dialogues(continued, texts, last, config, tokenizer)
    row_of = {i: row for row, i in enumerate(kept)}
    is_prompt = config.chat == "none" and not config.template
    other = [name for name in names if name != config.prompt_column or not is_prompt]
    return PromptTable(
        tokenizer=tokenizer,
        num_train=num_train,
        num_eval=len(kept) - num_train,
        num_dropped=len(rows) - len(kept),
        num_malformed=len(malformed),
        left_out=[*malformed, *left_out],
        withheld=tuple(name for name in other if name in RESERVED_COLUMNS),
        notes=tuple(notes),
        config=config,
        reads=reads if config.path else "",
        prompt_length=prompt_length,
        prompts=[prompts[i].plain for i in kept],
        tokens=[tokens[i] for i in kept],
        completions=[responses[i] for i in kept],
        rejected=[_response(rejected[i], tokenizer) for i in kept],
        margins=[examples[i].margin for i in kept],
        dialogues={row_of[i]: dialogue for i, dialogue in dialogues.items()},
        num_unlearned=len(continued) - len(dialogues),
        other={name: [rows[i].columns.get(name) for i in kept] for name in other if name not in RESERVED_COLUMNS},
        sources=[rows[i].source for i in kept],
        examples=[examples[i] for i in kept],
    )


def _read_splits(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows. The choice of held-out rows depends on the file, not on the seed of the run."""
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
    """Notes on the files that are read, if a path stands for several."""
    notes = []
    for key, paths in (("path", config.path), ("eval_path", config.eval_path)):
        files = find_files(f"data.{key}", paths) if paths else []
        others = f" ... {files[-1]}" if len(files) > 3 else ""
        if len(files) > 1:
            notes.append(f"data.{key}: {len(files)} files in this order: {', '.join(files[:3])}{others}.")
    return notes


def _shown(paths: str | Sequence[str]) -> str:
    return paths if isinstance(paths, str) else ", ".join(paths)


def _read_examples(rows: list[Row], config: DataConfig, malformed: list[str]) -> list[Example]:
    """The examples of rows, without malformed pairs if the config drops them. Those are appended to `malformed`."""
    examples = []
    for row in rows:
        try:
            examples.append(read_example(row, config))
        except MalformedPair:
            if config.malformed == "error":
                raise
            malformed.append(f"{row.source}: it holds no two different replies to one prompt (data.malformed: drop)")
    return examples


def _check_columns(config: DataConfig, names: list[str]) -> None:
    """Checks that the columns that the config names are in some row."""
    margin = config.margin_column
    wanted = [(f"data.margin_column: must name a column of the rows. Got {brief(margin)}", margin)] if margin else []
    for field in template_fields(config.template):
        got = f"{brief(field)} in {brief(config.template)}"
        wanted.append((f"data.template: must name columns of the rows. Got {got}", field))
    for message, name in wanted:
        if name not in names:
            raise ValueError(f"{message}. Known: {', '.join(names)}.{did_you_mean(name, names)}")


def _fitting(tokens: list[np.ndarray], sources: list[str], config: DataConfig) -> tuple[list[int], int]:
    """The rows whose prompts fit, and the number of columns of the prompts."""
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
    """A completion with its control tokens marked, without an end of text at its end."""
    if completion is None:
        return None
    end = tokenizer.special_tokens.get("eos_token", "")
    if control is not None and end in tokenizer.control_tokens:
        completion = completion.removesuffix(end)
    return mark_text(completion, control)


def _response(completion: MarkedText | None, tokenizer: Tokenizer) -> np.ndarray | None:
    """The tokens of a completion and one end of text."""
    if completion is None:
        return None
    tokens = tokenizer.encode(completion.marked, mark=completion.mark)
    return np.asarray(tokens if tokens[-1:] == [tokenizer.end_id] else [*tokens, tokenizer.end_id], np.int32)


def _whole_text(example: Example, tokenizer: Tokenizer, control: re.Pattern[str] | None) -> np.ndarray:
    """The tokens of a text that is learned from as a whole: the beginning of text that its tokenizer puts before one,
    the text, and one end of text. A text that begins with that beginning has it once."""
    text = _marked_response(example.completion, tokenizer, control)
    response = _response(text, tokenizer)
    assert response is not None
    beginning = tokenizer.beginning
    if response[: len(beginning)].tolist() == beginning:
        return response
    return np.asarray([*beginning, *response], np.int32)
