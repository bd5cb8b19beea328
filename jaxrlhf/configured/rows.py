"""The tables of a run, and the rows of them that a step, or an evaluation, gets.

An algorithm asks for rows by `jaxrlhf.algorithms.algorithm.Rows`. The choice follows from seed and step alone; only the
lengths that responses are expected to have, which decide in what order they are generated, come from earlier steps.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.brief import did_you_mean
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.configured.length_means import LengthMeans
from jaxrlhf.configured.roles import check_origins
from jaxrlhf.configured.tokenizer import configured_tokenizer
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable, load_prompts
from jaxrlhf.require import errors_as


@dataclasses.dataclass(frozen=True)
class Tables:
    """All tables of a run, of one tokenizer."""

    main: PromptTable
    """The table of `data`."""
    more: Mapping[str, PromptTable]
    """The tables of `datasets`, by name."""

    def digest(self) -> str:
        """A checksum of everything that a run reads of its rows. A resumed run needs the same one."""
        if not self.more:
            return self.main.digest()
        parts = [self.main.digest(), *(f"{name} {self.more[name].digest()}" for name in sorted(self.more))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def columns_read(self) -> list[str]:
        """What is read from which columns, a line for each table of files."""
        named = {"data": self.main, **{f"datasets.{name}": table for name, table in self.more.items()}}
        return [f"{name}: {table.reads}" for name, table in named.items() if table.reads]

    def of(self, rows: Rows) -> PromptTable:
        """The table that rows come from."""
        return self.more.get(rows.dataset, self.main)


def load_tables(config: RunConfig) -> Tables:
    """Reads all rows of a run. Raises ValueError, which says where, if a file or a row is invalid."""
    check_origins(config)
    main = load_prompts(config.data, configured_tokenizer(config))
    more = {}
    for name, data in config.datasets.items():
        with errors_as(ConfigError, f"datasets.{name}: "):
            more[name] = load_prompts(data, main.tokenizer)
    return Tables(main, more)


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Step number -> the data of the step function."""

    asked: Rows | Mapping[str, Rows]
    """The rows that the algorithm asks for. For a mapping, a step gets a dict."""
    tables: Tables
    batch_size: int
    """The number of rows in a step, unless the algorithm sets one."""
    seed: int
    length_means: LengthMeans | None = None
    """The lengths of the responses so far to prompts of the main table. None means that prompts do not say how long
    their responses are expected to be."""

    def __call__(self, step: int) -> Any:
        batches = {name: self._batch(rows, step) for name, rows in self.named.items()}
        return batches.get("", batches)

    def _batch(self, rows: Rows, step: int) -> Any:
        table = self.tables.of(rows)
        loader = PromptLoader(table, self.size(rows), self.seed)
        batch = loader.batch(step, rows.kind, max_new_tokens=rows.max_new_tokens)
        if self.length_means is None or rows.kind != "prompts" or table is not self.tables.main:
            return batch
        return batch.replace(expected_tokens=self.length_means.expected(batch.row))

    def held_out(self, num: int, batch_size: int) -> tuple[Any, ...]:
        """The first `num` held-out rows of each kind in batches, in the form of a step's. Raises ValueError if there
        are fewer, or the batch size does not divide `num`.
        """
        columns = {}
        for name, rows in self.named.items():
            loader = PromptLoader(self.tables.of(rows), batch_size, self.seed)
            columns[name] = loader.eval_batches(num, rows.kind, max_new_tokens=rows.max_new_tokens)
        together = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
        return tuple(each.get("", each) for each in together)

    def epoch(self, step: int) -> float:
        """The number of times that the rows of the first kind were seen before a step."""
        first = next(iter(self.named.values()))
        return step * self.size(first) / max(1, self.num_usable(first))

    def in_words(self) -> str:
        """The rows of a step, as in '16 prompts and 8 demonstrations'."""
        names = {"preferences": "pairs"}
        return " and ".join(f"{self.size(rows)} {names.get(rows.kind, rows.kind)}" for rows in self.named.values())

    def num_usable(self, rows: Rows, *, held_out: bool = False) -> int:
        """The number of training rows, or held-out ones, with the requested completions."""
        return len(self.tables.of(rows).usable(rows.kind, rows.max_new_tokens, held_out=held_out))

    def size(self, rows: Rows) -> int:
        """The number of rows of a kind in a step."""
        return rows.count or self.batch_size

    @property
    def named(self) -> Mapping[str, Rows]:
        """All kinds of rows by their names in the step; the name is empty if there is only one."""
        return {"": self.asked} if isinstance(self.asked, Rows) else self.asked


def check_rows(rows: StepRows, config: RunConfig, *, held_out: bool = False) -> list[str]:
    """Checks that the tables have the rows that the algorithm asks for, with completions that fit. `held_out`: held-out
    ones too. Returns notes on rows that are left out.
    """
    used = {wanted.dataset for wanted in rows.named.values() if wanted.dataset}
    for name in config.datasets:
        if name not in used:
            raise ConfigError(
                f"datasets.{name}: the algorithm {config.algorithm} asks for no rows of this name. It asks for: "
                f"{', '.join(sorted(used)) or 'none but those of data'}.{did_you_mean(name, used)}"
            )
    _check_texts(rows, config)
    notes = []
    for wanted in (wanted for wanted in rows.named.values() if wanted.kind != "prompts"):
        for of_held_out in (False, True)[: 1 + held_out]:
            notes += _left_out(rows, wanted, config, held_out=of_held_out)
    if rows.tables.main.withheld and any(role.function for role in config.roles.values()):
        notes.append(
            f"Reward functions do not get the columns {', '.join(rows.tables.main.withheld)}: by these names they get "
            "what was sampled. To give them one, rename it."
        )
    notes += _unlearned(rows, config)
    notes += _dropped(rows.tables.main, "")
    return notes + [note for name, table in rows.tables.more.items() for note in _dropped(table, f"datasets.{name}")]


def _check_texts(rows: StepRows, config: RunConfig) -> None:
    """Checks that rows of text alone are asked for as demonstrations only."""
    asked = [(wanted, f"the algorithm {config.algorithm}") for wanted in rows.named.values()]
    if config.evaluation is not None and config.evaluation.scorers:
        asked.append((Rows("prompts"), f"an evaluation with the scorers {', '.join(config.evaluation.scorers)}"))
    for wanted, by in asked:
        table = rows.tables.of(wanted)
        if table.config.text_column and wanted.kind != "demonstrations":
            where = f"datasets.{wanted.dataset}" if wanted.dataset in config.datasets else "data"
            needs = {"prompts": "prompts", "preferences": "pairs of completions"}[wanted.kind]
            column = table.config.text_column
            raise ConfigError(
                f"{where}.text_column: {by} needs {needs}. Got rows of text alone, in the column {column!r}, which "
                f"supervised training learns from. Set {where}.prompt_column to {column!r} where these are prompts, or "
                "name other rows."
            )


def _left_out(rows: StepRows, wanted: Rows, config: RunConfig, *, held_out: bool) -> list[str]:
    """A note on training rows, or held-out ones, that are left out, if the config allows that."""
    table, data, where = rows.tables.of(wanted), config.data, "data"
    if wanted.dataset in config.datasets:
        data, where = config.datasets[wanted.dataset], f"datasets.{wanted.dataset}"
    numbers = table.usable("prompts", held_out=held_out)
    num_left_out = len(numbers) - rows.num_usable(wanted, held_out=held_out)
    if not num_left_out:
        return []
    if data.overlong == "error" or num_left_out == len(numbers):
        table.check(wanted.kind, numbers, max_new_tokens=wanted.max_new_tokens)
    which = "held-out rows" if held_out else "rows"
    return [
        f"{num_left_out} of {len(numbers)} {which} of {where} have no {wanted.kind} that fit into "
        f"{wanted.max_new_tokens} tokens and are left out."
    ]


def _unlearned(rows: StepRows, config: RunConfig) -> list[str]:
    """Notes on the tables whose demonstrations have earlier replies that are not learned from."""
    asked = {wanted.dataset for wanted in rows.named.values() if wanted.kind == "demonstrations"}
    main = bool(asked - rows.tables.more.keys()) or config.warm_start is not None
    tables = {"data": rows.tables.main} if main else {}
    tables |= {f"datasets.{name}": rows.tables.more[name] for name in sorted(asked & rows.tables.more.keys())}
    return [
        f"{table.num_unlearned} rows of {where} have several of the assistant's messages, of which the last one alone "
        f"is learned from. To learn from all, set {where}.assistant_turns to 'all'."
        for where, table in tables.items()
        if table.num_unlearned
    ]


def _dropped(table: PromptTable, where: str) -> list[str]:
    """Notes on the rows of a table that were dropped, and its own. `where`: its key, empty for that of `data`."""
    rows, prefix = (f"rows of {where}", f"{where}: ") if where else ("rows", "")
    notes = []
    if table.num_dropped:
        notes.append(f"{table.num_dropped} {rows} have a prompt over {table.prompt_length} tokens and were dropped.")
    if table.num_malformed:
        notes.append(f"{table.num_malformed} {rows} hold no two different replies to one prompt and were dropped.")
    return notes + [f"{prefix}{note}" for note in table.notes]
