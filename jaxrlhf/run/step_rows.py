"""The tables of a run, and which of their rows a step is given, or its evaluation.

Rows are asked for by `jaxrlhf.algorithms.algorithm.Rows`; which ones come follows from seed and step alone.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable, load_prompts
from jaxrlhf.run.configured_roles import check_origins
from jaxrlhf.run.configured_tokenizer import configured_tokenizer
from jaxrlhf.suggest import did_you_mean


@dataclasses.dataclass(frozen=True)
class Tables:
    """All tables of a run, of one tokenizer."""

    main: PromptTable
    """That of `data`."""
    more: Mapping[str, PromptTable]
    """Those of `datasets`."""

    def digest(self) -> str:
        """A checksum of everything that a run sees of its rows: a resumed run needs the same one."""
        if not self.more:
            return self.main.digest()
        parts = [self.main.digest(), *(f"{name} {self.more[name].digest()}" for name in sorted(self.more))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def of(self, rows: Rows) -> PromptTable:
        """The table that rows come from."""
        return self.more.get(rows.dataset, self.main)


def load_tables(config: RunConfig) -> Tables:
    """Reads all rows of a run.

    Raises:
        ValueError: A file, a row, a template or a length is not as it must be; the message says where.
    """
    check_origins(config)
    main = load_prompts(config.data, configured_tokenizer(config))
    more = {}
    for name, data in config.datasets.items():
        try:
            more[name] = load_prompts(data, main.tokenizer)
        except ValueError as error:
            raise ConfigError(f"datasets.{name}: {error}") from error
    return Tables(main, more)


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Step number -> what the step function is given."""

    asked: Rows | Mapping[str, Rows]
    """What the algorithm asks for. Of a mapping, a step is given a dict."""
    tables: Tables
    batch_size: int
    """Rows in a step, where the algorithm says no number."""
    seed: int

    def __call__(self, step: int) -> Any:
        def batch(rows: Rows) -> Any:
            loader, size = self._loader(rows), self.size(rows)
            if rows.kind == "prompts":
                return loader.batch(step)
            load = loader.demonstrations if rows.kind == "demonstrations" else loader.preferences
            return load(step, size, rows.max_new_tokens)

        return {name: batch(rows) for name, rows in self.named.items()} if self._is_dict else batch(self.first)

    def held_out(self, num: int, batch_size: int) -> tuple[Any, ...]:
        """The first `num` held-out rows of each kind in batches, in the form of a step's.

        Raises:
            ValueError: There are not so many, or the batch size does not divide `num`.
        """

        def batches(rows: Rows) -> list[Any]:
            loader = PromptLoader(self.tables.of(rows), batch_size, self.seed)
            if rows.kind == "prompts":
                return list(loader.eval_batches(num))
            load = loader.eval_demonstrations if rows.kind == "demonstrations" else loader.eval_preferences
            return list(load(num, rows.max_new_tokens))

        columns = {name: batches(rows) for name, rows in self.named.items()}
        together = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
        return tuple(together if self._is_dict else (each[""] for each in together))

    def epoch(self, step: int) -> float:
        """How many times the rows that a step is given were seen before this step; of several kinds, the first."""
        return step * self.size(self.first) / max(1, self.num_usable(self.first))

    def in_words(self) -> str:
        """The rows of a step, as in '16 prompts and 8 demonstrations'."""
        names = {"preferences": "pairs"}
        return " and ".join(f"{self.size(rows)} {names.get(rows.kind, rows.kind)}" for rows in self.named.values())

    def num_usable(self, rows: Rows, *, held_out: bool = False) -> int:
        """How many training rows, or held-out ones, have the completions that are asked for."""
        table = self.tables.of(rows)
        if rows.kind == "prompts":
            return len(table.numbers(held_out=held_out))
        fitting = table.demonstrable if rows.kind == "demonstrations" else table.preferable
        return len(fitting(rows.max_new_tokens, held_out=held_out))

    def size(self, rows: Rows) -> int:
        """How many rows of a kind are in a step."""
        return rows.count or self.batch_size

    @property
    def named(self) -> Mapping[str, Rows]:
        """All kinds of rows by the name that the step knows them by, empty for an only one."""
        return {"": self.asked} if isinstance(self.asked, Rows) else self.asked

    @property
    def first(self) -> Rows:
        return next(iter(self.named.values()))

    @property
    def max_new_tokens(self) -> int:
        """Columns of the longest completion that is asked for."""
        return max(rows.max_new_tokens for rows in self.named.values())

    @property
    def _is_dict(self) -> bool:
        return not isinstance(self.asked, Rows)

    def _loader(self, rows: Rows) -> PromptLoader:
        return PromptLoader(self.tables.of(rows), self.size(rows), self.seed)


def check_rows(rows: StepRows, config: RunConfig, *, held_out: bool = False) -> list[str]:
    """Asks that the tables have what the algorithm asks for. Returns notes on rows that are left out.

    Args:
        held_out: Whether the algorithm is given held-out rows too, which then obey the same rules.

    Raises:
        ConfigError or ValueError: A table is asked for nothing, or has rows without completions that fit.
    """
    used = {kind.dataset for kind in rows.named.values() if kind.dataset}
    for name in config.datasets:
        if name not in used:
            raise ConfigError(
                f"datasets.{name}: the algorithm {config.algorithm} asks for no rows of this name. It asks for: "
                f"{', '.join(sorted(used)) or 'none but those of data'}.{did_you_mean(name, used)}"
            )
    notes = []
    for kind in rows.named.values():
        if kind.kind != "prompts":
            notes += _left_out(rows, kind, config, held_out=False)
            notes += _left_out(rows, kind, config, held_out=True) if held_out else []
    if rows.tables.main.withheld and any(role.function for role in config.roles.values()):
        notes.append(
            f"Reward functions do not get the columns {', '.join(rows.tables.main.withheld)}: by these names they get "
            "what was sampled. To give them one, rename it."
        )
    return notes + [note for where, table in _tables(rows.tables) for note in _dropped(table, where)]


def _left_out(rows: StepRows, kind: Rows, config: RunConfig, *, held_out: bool) -> list[str]:
    """A note on training rows, or held-out ones, that are left out, where they may be."""
    table, data, where = _source(rows, kind, config)
    numbers = table.numbers(held_out=held_out)
    num_left_out = len(numbers) - rows.num_usable(kind, held_out=held_out)
    if not num_left_out:
        return []
    if data.overlong == "error" or num_left_out == len(numbers):
        check = table.check_demonstrations if kind.kind == "demonstrations" else table.check_preferences
        check(numbers, max_new_tokens=kind.max_new_tokens)
    which = "held-out rows" if held_out else "rows"
    return [
        f"{num_left_out} of {len(numbers)} {which} of {where} have no {kind.kind} that fit into "
        f"{kind.max_new_tokens} tokens and are left out."
    ]


def _source(rows: StepRows, kind: Rows, config: RunConfig) -> tuple[PromptTable, DataConfig, str]:
    name = kind.dataset if kind.dataset in config.datasets else ""
    return rows.tables.of(kind), config.datasets[name] if name else config.data, f"datasets.{name}" if name else "data"


def _tables(tables: Tables) -> list[tuple[str, PromptTable]]:
    return [("", tables.main), *((f" of datasets.{name}", table) for name, table in tables.more.items())]


def _dropped(table: PromptTable, where: str) -> list[str]:
    notes = []
    if table.num_dropped:
        notes.append(
            f"{table.num_dropped} rows{where} have a prompt over {table.prompt_length} tokens and were dropped."
        )
    if table.num_malformed:
        notes.append(f"{table.num_malformed} rows{where} hold no two different replies to one prompt and were dropped.")
    prefix = f"{where.removeprefix(' of ')}: " if where else ""
    notes += [f"{prefix}{note}" for note in table.notes]
    return notes
