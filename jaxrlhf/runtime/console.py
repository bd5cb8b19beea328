"""What a run shows on the terminal: tables, progress, samples, and where its files are.

In a pipe everything is plain lines without escape codes. Texts of users and models are shown as they are: nothing in
them is taken for markup, and what could move the cursor is escaped.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rich.box
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrlhf.runtime.metrics import best_evaluation

_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_CELL = 34
"""Characters that a table's cell may take before its text wraps."""
_EASY_CELL = 16
"""A cell is not made narrower than this, nor than its longest word, to fit one more column beside it."""
_GAP = 2


class Console:
    """Writes to standard output, and errors to standard error. `quiet` leaves the errors only."""

    def __init__(
        self,
        quiet: bool = False,
        *,
        output: TextIO | None = None,
        errors: TextIO | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._out = RichConsole(
            file=output, quiet=quiet, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False
        )
        self._errors = RichConsole(
            file=errors, stderr=errors is None, width=width, highlight=False, markup=False, emoji=False
        )
        self._clock = clock

    def header(self, text: str) -> None:
        """A heading, set off by an empty line."""
        self._out.print()
        self._out.print(self._text(text, "bold"), soft_wrap=True)

    def line(self, text: str) -> None:
        """One line, never wrapped, so that it can be copied and searched."""
        self._out.print(self._text(text), soft_wrap=True)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
        """A table of plain data. Without `columns`, every key is one, in order of first appearance.

        What does not fit the width goes on below in further tables, each of which repeats the first column.
        """
        self.header(title)
        if not rows:
            self.line("(none)")
            return
        keys = list(dict.fromkeys(key for row in rows for key in row)) if columns is None else list(columns)
        cells = {key: [self._text(_cell(row.get(key))) for row in rows] for key in keys}
        limit = max(8, min(_MAX_CELL, (self._out.width - _GAP) // 2))
        widths = {key: _column_widths(_heading(key), cells[key], limit) for key in keys}
        for number, width_of in enumerate(_column_blocks(widths, self._out.width)):
            if number:
                self._out.print()
            table = _plain_table()
            for key, width in width_of.items():
                numeric = all(isinstance(row.get(key), int | float | None) for row in rows)
                justify = "right" if numeric else "left"
                table.add_column(self._text(_heading(key)), justify=justify, width=width, overflow="fold")
            for row_cells in zip(*(cells[key] for key in width_of), strict=True):
                table.add_row(*row_cells)
            self._out.print(table)

    def samples(self, title: str, rows: Sequence[Mapping[str, Any]], max_chars: int = 240) -> None:
        """Completions beside their prompts: rows of `prompt`, `completion` and `scores`, a number by scorer.

        Longer texts are cut with an ellipsis; newlines and other control characters are shown escaped.
        """
        self.header(title)
        if not rows:
            self.line("(none)")
            return
        table = _plain_table()
        table.show_lines = table.expand = True
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        table.add_column("reward", overflow="fold", max_width=max(12, self._out.width // 3))
        for row in rows:
            scores: Mapping[str, float] = row["scores"]
            table.add_row(
                self._cut(row["prompt"], max_chars),
                self._cut(row["completion"], max_chars),
                Text("\n").join(self._text(f"{name} {_cell(score)}") for name, score in scores.items()),
            )
        self._out.print(table)

    @contextlib.contextmanager
    def progress(self, total: int, *, start: int = 0, every: int = 10) -> Iterator["Progress"]:
        """Shows how the steps go by: a live bar on a terminal, and lines that stay.

        Args:
            total: Steps of the whole run.
            start: Steps done before, in a run that was resumed.
            every: A line stays every so many steps, and whenever ten seconds went by without one.
        """
        live = self._out.is_terminal and not self._out.is_dumb_terminal and not self._out.quiet
        with contextlib.ExitStack() as stack:
            progress = Progress(self, total, start=start, every=every, clock=self._clock)
            if live:
                stack.enter_context(
                    Live(get_renderable=progress.picture, console=self._out, refresh_per_second=4, transient=True)
                )
            yield progress

    def evaluation(self, evaluations: Sequence[tuple[int, Mapping[str, float]]], num_prompts: int) -> None:
        """One line on the last of a run's evaluations, (steps done, metrics), and how it stands to the best so far."""
        done, metrics = evaluations[-1]
        shown = []
        for name, value in metrics.items():
            if not name.startswith("eval/"):
                continue
            standing = ""
            if len(evaluations) > 1 and name != "eval/response_length":
                step, best = best_evaluation(evaluations, name)
                standing = " (best so far)" if step == done else f" (best {best:.3f} after {step})"
            shown.append(f"{name} {value:.3f}{standing}")
        self.line(f"evaluation after {done} steps on {num_prompts} held-out prompts: {', '.join(shown)}")

    def curve(self, name: str, values: Sequence[float]) -> None:
        """How a metric went, as a sparkline between its first and last value."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            self.line(f"{name}  (no values)")
            return
        ends = f"{name}  {_cell(finite[0])}", _cell(finite[-1])
        width = min(60, self._out.width - len(ends[0]) - len(ends[1]) - 2)
        picture = sparkline(values, width) if width >= 8 and self._can_show(_BLOCKS) else "->"
        self.line(f"{ends[0]} {picture} {ends[1]}")

    def where(self, paths: Mapping[str, Path]) -> None:
        """Lists where everything was written, by what it is."""
        self.header("Written to")
        width = max(map(len, paths), default=0)
        for name, path in paths.items():
            self.line(f"  {name:<{width}}  {path}")

    def error(self, message: str) -> None:
        """Shows an error on standard error, quiet or not. Line breaks in the message stay."""
        for number, line in enumerate(message.split("\n")):
            shown = self._text(line if number else f"Error: {line}", "bold red", self._errors)
            self._errors.print(shown, soft_wrap=True)

    def _text(self, text: str, style: str = "", console: RichConsole | None = None) -> Text:
        """Text that shows as it is on any terminal, line breaks and control characters escaped."""
        encoding = (console or self._out).encoding
        return Text(_printable(text).encode(encoding, "backslashreplace").decode(encoding), style)

    def _cut(self, text: str, max_chars: int) -> Text:
        # No need to escape what will be cut away.
        shown = self._text(text[: max_chars + 1])
        if len(shown) > max_chars:
            mark = "…" if self._can_show("…") else "..."
            shown = shown[: max_chars - len(mark)] + Text(mark)
        return shown

    def _can_show(self, text: str) -> bool:
        try:
            text.encode(self._out.encoding)
        except UnicodeEncodeError:
            return False
        return True


class Progress:
    """Steps going by. `Console.progress` makes it."""

    def __init__(self, console: Console, total: int, *, start: int, every: int, clock: Callable[[], float]) -> None:
        self._console = console
        self._total = total
        self._every = every
        self._clock = clock
        self._step = start
        self._updated = self._began = clock()
        self._printed: float | None = None
        self._recent_seconds: collections.deque[float] = collections.deque(maxlen=20)
        self._compiled = False
        self._saved: int | None = None
        self._line, self._slowest = "the first step compiles", ""

    def saved(self, step: int) -> None:
        """Takes note of a checkpoint after so many steps: where the run would go on, if it were killed now."""
        self._saved = step

    def update(
        self,
        step: int,
        shown: Mapping[str, float],
        calls: Mapping[str, float] | None = None,
        *,
        tokens_per_second: float | None = None,
    ) -> None:
        """Takes note that `step` steps are done.

        Args:
            shown: What to show of the last step, as in `{"reward": 0.3, "KL": 0.01, "length": 40}`.
            calls: Seconds of each of its calls, or stages.
            tokens_per_second: Of all devices together.
        """
        now = self._clock()
        self._recent_seconds.append((now - self._updated) / max(1, step - self._step))
        if not self._compiled and len(self._recent_seconds) > 1:
            self._recent_seconds.popleft()
            self._compiled = True
        self._updated, self._step = now, step
        seconds = sum(self._recent_seconds) / len(self._recent_seconds)
        line = "  ".join(
            [
                f"step {step:>{len(str(self._total))}}/{self._total}",
                *(f"{name} {_number(value, digits=3)}" for name, value in shown.items()),
                f"{_number(seconds, digits=3)} s/step",
                *([] if tokens_per_second is None else [f"{_number(tokens_per_second, digits=3)} tokens/s"]),
                # the first step compiles: it says nothing of those to come
                *(
                    [f"ETA {_duration((self._total - step) * seconds)}"]
                    if self._compiled and step < self._total
                    else []
                ),
                *([] if self._saved is None else [f"saved {self._saved}"]),
            ]
        )
        slowest = _breakdown(calls) if calls else ""
        self._line, self._slowest = line, slowest
        if self._printed is None or step % self._every == 0 or step >= self._total or now - self._printed >= 10:
            self._printed = now
            self._console.line(f"{line}  {slowest}".rstrip())

    def picture(self) -> Group:
        """What a terminal shows of it while the run goes on."""
        bar = Table.grid(padding=(0, 1))
        elapsed = _duration(self._clock() - self._began)
        bar.add_row(ProgressBar(total=self._total, completed=self._step, width=40), elapsed)
        return Group(bar, Text(_printable(self._line)), Text(_printable(self._slowest), "dim"))


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of block characters, from the least value to the greatest.

    More values than `width` are averaged in groups; what is not finite leaves a gap.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    """
    columns = min(width, len(values))
    groups = [values[len(values) * i // columns : len(values) * (i + 1) // columns] for i in range(columns)]
    means = [_mean([value for value in group if math.isfinite(value)]) for group in groups]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * columns
    least, greatest = min(finite), max(finite)
    if least == greatest:
        return "".join(" " if mean is None else _BLOCKS[3] for mean in means)
    top = len(_BLOCKS) - 1
    return "".join(" " if m is None else _BLOCKS[round(top * (m - least) / (greatest - least))] for m in means)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plain_table() -> Table:
    # The box puts one blank between columns, the padding the rest of the gap.
    return Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold"
    )


def _column_widths(heading: str, cells: Sequence[Text], limit: int) -> tuple[int, int]:
    """The least width that a column reads well in, and what it would like."""
    in_heading = max(map(cell_len, heading.split(" ")))
    wanted = min(limit, max(in_heading, *(cell.cell_len for cell in cells)))
    longest_word = max(in_heading, *(cell_len(word) for cell in cells for word in cell.plain.split(" ")))
    return min(wanted, max(longest_word, _EASY_CELL)), wanted


def _column_blocks(widths: Mapping[str, tuple[int, int]], available: int) -> list[dict[str, int]]:
    """Splits columns into blocks that fit, each led by the first column, and says how wide each column is."""
    first, *others = widths
    blocks = [[first]]
    for key in others:
        block = blocks[-1]
        if len(block) > 1 and sum(widths[other][0] + _GAP for other in block) + widths[key][0] > available:
            blocks.append([first])
        blocks[-1].append(key)
    fitted = []
    for block in blocks:
        width_of = {key: widths[key][1] for key in block}
        while sum(width_of.values()) + _GAP * (len(block) - 1) > available:
            slack = [key for key in block if width_of[key] > widths[key][0]]
            if not slack:
                break
            width_of[max(slack, key=lambda key: width_of[key])] -= 1
        fitted.append(width_of)
    return fitted


def _heading(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value, digits=4)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_cell(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_cell(item) for item in value)
    return str(value)


def _number(value: float, *, digits: int) -> str:
    """So many digits that count, without an exponent where a plain number will do."""
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _breakdown(calls: Mapping[str, float], most: int = 3) -> str:
    """The slowest calls, and the rest in one sum."""
    ranked = sorted(calls.items(), key=lambda call: -call[1])
    shown = ranked[:most] if len(ranked) > most + 1 else ranked
    parts = [f"{name} {seconds:.2f}" for name, seconds in shown]
    rest = ranked[len(shown) :]
    if rest:
        parts.append(f"{len(rest)} others {sum(seconds for _, seconds in rest):.2f}")
    return f"({', '.join(parts)})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
