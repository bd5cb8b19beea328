"""Rows as the model will see them: `python -m jaxrlhf.train --config X --preview 3`.

It reads the data and makes the arrays of the first rows of a run, as NumPy arrays. No device and no model is needed.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.brief import brief
from jaxrlhf.config.schema import RunConfig, load_algorithm
from jaxrlhf.configured.rows import StepRows, check_rows, load_tables
from jaxrlhf.configured.sampling import resolved, samplings_of
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Preferences, Prompts, Sequences
from jaxrlhf.observe.console import Console
from jaxrlhf.require import require
from jaxrlhf.run.step_draft import longest_response

STYLES = {"prompt": "cyan", "learned": "green", "read": "yellow", "chosen": "green", "rejected": "red"}
"""Mask of tokens -> its colour on a terminal."""
MOST_LEFT_OUT = 20
"""The most rows that are left out to be named one by one."""


@dataclasses.dataclass(frozen=True)
class _Section:
    """Rows of one kind in a run."""

    title: str
    rows: Rows
    table: PromptTable
    key: str
    """The key of the config that says what happens to rows without completions that fit."""


def preview(config: RunConfig, count: int, console: Console) -> None:
    """Prints the first `count` rows of each kind that a run trains on: their tokens by mask, and the rows left out.
    Raises ConfigError or ValueError, as a run does, if the data does not fit the config."""
    require(count >= 1, "--preview", "must be at least 1", count)
    algorithm = load_algorithm(config.algorithm)
    tables = load_tables(config)
    settings = resolved(config.settings, tables.main.tokenizer)
    step_rows = StepRows(algorithm.data(settings), tables, config.batch_size, config.seed)
    measures = config.evaluation is not None and algorithm.evaluation is not None
    notes = check_rows(step_rows, config, held_out=measures)
    for line in tables.columns_read():
        console.line(line)
    for section in _sections(config, step_rows, longest_response(settings, step_rows)):
        drawn = max([sampling.max_new_tokens for sampling in samplings_of(settings)], default=0)
        _show(section, count, config.seed, drawn, console)
    for note in notes:
        console.line(f"Note: {note}")


def _sections(config: RunConfig, rows: StepRows, new_tokens: int) -> Iterator[_Section]:
    """The kinds of rows of a run, in the order in which it trains on them."""
    warm = config.warm_start
    if warm is not None:
        wanted, table = Rows("demonstrations", new_tokens), rows.tables.main
        if warm.overlong == "error" or not len(table.usable(wanted.kind, new_tokens)):
            usable = table.usable("prompts")
            table.check(wanted.kind, usable, max_new_tokens=new_tokens, key="warm_start.overlong")
        yield _Section("warm start", wanted, table, "warm_start.overlong")
    for name, wanted in rows.named.items():
        where = f"datasets.{wanted.dataset}" if wanted.dataset in config.datasets else "data"
        yield _Section(f"step, {name}" if name else "step", wanted, rows.tables.of(wanted), f"{where}.overlong")


def _show(section: _Section, count: int, seed: int, drawn: int, console: Console) -> None:
    """Prints the first rows of a kind. `drawn`: the most tokens that are generated for a prompt."""
    table, wanted = section.table, section.rows
    usable = table.usable(wanted.kind, wanted.max_new_tokens)
    loader = PromptLoader(table, min(count, len(usable)), seed)
    numbers = loader.row_numbers(0, wanted.kind, max_new_tokens=wanted.max_new_tokens)
    batch = loader.batch(0, wanted.kind, max_new_tokens=wanted.max_new_tokens)
    console.header(f"{section.title}: {wanted.kind}, the first {len(numbers)} of {len(usable)} training rows")
    for index, row in enumerate(numbers):
        console.line("")
        console.line(f"row {index + 1}, {table.sources[row]}")
        if isinstance(batch, Prompts):
            _show_prompt(batch, index, table, drawn, console)
        elif isinstance(batch, Preferences):
            _show_pair(batch, index, table, console)
        else:
            _show_demonstration(batch, index, table, console)
    left_out = [*table.left_out, *_without_fitting_completions(section, usable)]
    if left_out:
        console.line("")
        console.line(f"{len(left_out)} rows are left out:")
        for line in left_out[:MOST_LEFT_OUT]:
            console.line(f"  {line}")
        if len(left_out) > MOST_LEFT_OUT:
            console.line(f"  and {len(left_out) - MOST_LEFT_OUT} more")


def _show_prompt(batch: Prompts, index: int, table: PromptTable, drawn: int, console: Console) -> None:
    ids = _real(batch.tokens, batch.mask, index)
    _masked("prompt", ids, table, console)
    columns = {name: values[0] for name, values in table.columns(np.asarray([batch.row[index]])).items()}
    if columns:
        console.line(f"{'columns':>9} | {', '.join(f'{name}={brief(value)}' for name, value in columns.items())}")
    padding = batch.tokens.shape[1] - len(ids)
    then = f"; up to {drawn} tokens are generated" if drawn else ""
    _counts(f"{len(ids)} prompt tokens of at most {batch.tokens.shape[1]}, {padding} of padding{then}", console)


def _show_demonstration(batch: Sequences, index: int, table: PromptTable, console: Console) -> None:
    prompt, response, learned = _parts(batch, index)
    _masked("prompt", prompt, table, console)
    places = np.arange(len(response))
    for is_learned, run in itertools.groupby(places, key=lambda place: bool(learned[place])):
        _masked("learned" if is_learned else "read", response[list(run)], table, console)
    told = f"{len(response)} completion tokens, {int(learned.sum())} of them with a loss"
    _counts(_lengths(batch, len(prompt), len(response), told), console)


def _show_pair(batch: Preferences, index: int, table: PromptTable, console: Console) -> None:
    _masked("prompt", _parts(batch.chosen, index)[0], table, console)
    for name, sequences in (("chosen", batch.chosen), ("rejected", batch.rejected)):
        prompt, response, _ = _parts(sequences, index)
        _masked(name, response, table, console)
        _counts(_lengths(sequences, len(prompt), len(response), f"{len(response)} {name} tokens"), console)
    if margin := float(batch.margin[index]):
        _counts(f"margin {margin:g}", console)


def _lengths(batch: Sequences, num_prompt: int, num_response: int, told: str) -> str:
    T, R = batch.tokens.shape[1], batch.response.shape[1]
    total = num_prompt + num_response
    return f"{num_prompt} prompt tokens + {told} = {total} of at most {T - R} + {R}, {T - total} of padding"


def _counts(text: str, console: Console) -> None:
    console.line(f"{'':>9} | {text}")


def _masked(label: str, ids: np.ndarray, table: PromptTable, console: Console) -> None:
    console.masked(label, table.tokenizer.spans(ids.tolist()), STYLES[label])


def _parts(batch: Sequences, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a row's prompt, those after it, and a flag for each of these that has a loss."""
    P = batch.tokens.shape[1] - batch.response.shape[1]
    tokens, mask = np.asarray(batch.tokens[index]), np.asarray(batch.mask[index])
    real = mask[P:]
    return tokens[:P][mask[:P]], tokens[P:][real], np.asarray(batch.response[index])[real]


def _real(tokens: Any, mask: Any, index: int) -> np.ndarray:
    return np.asarray(tokens[index])[np.asarray(mask[index])]


def _without_fitting_completions(section: _Section, usable: np.ndarray) -> list[str]:
    """The training rows of a table that cannot be used, each with the reason."""
    table, wanted = section.table, section.rows
    left_out = []
    for row in sorted(set(table.usable("prompts").tolist()) - set(usable.tolist())):
        lengths = {what: int(of_rows[row]) for what, of_rows in table.lengths(wanted.kind).items()}
        what = next(what for what, length in lengths.items() if not 0 < length <= wanted.max_new_tokens)
        why = f"its {what} of {lengths[what]} tokens is over {wanted.max_new_tokens}" if lengths[what] else f"no {what}"
        left_out.append(f"{table.sources[row]}: {why} ({section.key}: drop)")
    return left_out
