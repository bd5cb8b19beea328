"""Output of a run on the terminal: tables, samples, progress, and the paths of its files.

In a pipe everything is plain lines without escape codes; in a notebook too, but for progress, which is one output that
changes in place. Texts of users and models are shown verbatim: nothing in them
is taken for markup, and control characters are escaped.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rich.box
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxrlhf.observe.metrics import best_evaluation
from jaxrlhf.observe.notebook_line import NotebookLine, publisher
from jaxrlhf.observe.plain_text import BLOCKS, cell, printable, sparkline
from jaxrlhf.observe.progress import Progress

_MAX_CELL = 34
"""Characters that a table's cell may take before its text wraps."""
_EASY_CELL = 16
"""To fit one more column, a cell is made no narrower than this and than its longest word."""
_GAP = 2
_NOTEBOOK_WIDTH = 110
"""Characters in a line of a notebook's output."""


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
        self._publish = publisher() if output is None and not quiet else None
        width = _NOTEBOOK_WIDTH if self._publish is not None and width is None else width
        plain: dict[str, Any] = {"width": width, "highlight": False, "markup": False, "emoji": False}
        plain["force_jupyter"] = False  # one output for each line, and a bar only with widgets
        self._out = RichConsole(file=output, quiet=quiet, **plain)
        self._errors = RichConsole(file=errors, stderr=errors is None, **plain)
        self._clock = clock

    def header(self, text: str) -> None:
        """A heading, set off by an empty line."""
        self._out.print()
        self._out.print(self._text(text, "bold"), soft_wrap=True)

    def line(self, text: str) -> None:
        """One line, never wrapped, so that it can be copied and searched."""
        self._out.print(self._text(text), soft_wrap=True)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of plain data with a column for each key, in order of first appearance.

        Columns that do not fit into the width follow in further tables, each of which repeats the first column.
        """
        self.header(title)
        if not rows:
            self.line("(none)")
            return
        headings = {key: key.replace("_", " ") for row in rows for key in row}
        cells = {key: [self._text(cell(row.get(key))) for row in rows] for key in headings}
        limit = max(8, min(_MAX_CELL, (self._out.width - _GAP) // 2))
        widths = {key: _column_widths(heading, cells[key], limit) for key, heading in headings.items()}
        for number, width_of in enumerate(_column_blocks(widths, self._out.width)):
            if number:
                self._out.print()
            table = _plain_table()
            for key, width in width_of.items():
                numeric = all(isinstance(row.get(key), int | float | None) for row in rows)
                justify = "right" if numeric else "left"
                table.add_column(self._text(headings[key]), justify=justify, width=width, overflow="fold")
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
                Text("\n").join(self._text(f"{name} {cell(score)}") for name, score in scores.items()),
            )
        self._out.print(table)

    def masked(self, label: str, spans: Sequence[tuple[str, bool]], style: str = "") -> None:
        """The text of tokens under one mask beside its name, control tokens set off. Line breaks are written as such
        and begin a line."""
        lines = [Text()]
        for text, is_control in spans:
            for number, piece in enumerate(text.split("\n")):
                if number:
                    lines[-1].append_text(self._text("\n", style))
                    lines.append(Text())
                lines[-1].append_text(self._text(piece, f"{style} reverse" if is_control else style))
        for number, line in enumerate(lines):
            self._out.print(Text(f"{label if not number else '':>9} | ") + line, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, total: int, *, start: int = 0, every: int = 10) -> Iterator[Progress]:
        """Shows the progress from step `start` to `total`: a live bar on a terminal, and lines that stay, one `every`
        so many steps and after ten seconds without a line. In a notebook a bar that stays, and no lines.
        """
        if self._publish is not None:
            line = NotebookLine(self._publish, clock=self._clock)

            def show(progress: Progress, is_last: bool = False) -> None:
                line.show(progress.lines(), done=progress.fraction, is_last=is_last)

            progress = Progress(lambda line: None, total, start=start, every=every, clock=self._clock, changed=show)
            show(progress)
            try:
                yield progress
            finally:
                show(progress, is_last=True)
            return
        progress = Progress(self.line, total, start=start, every=every, clock=self._clock)
        bar = Live(get_renderable=progress.picture, console=self._out, refresh_per_second=4, transient=True)
        with bar if self._is_live else contextlib.nullcontext():
            yield progress

    @contextlib.contextmanager
    def status(self, *, every: float = 5.0) -> Iterator[Callable[[str], None]]:
        """Shows what is going on: on a terminal and in a notebook in a line that changes and goes, elsewhere in lines
        that stay."""
        if self._publish is not None:
            notebook_line = NotebookLine(self._publish, clock=self._clock)
            try:
                yield lambda line: notebook_line.show([printable(line)])
            finally:
                notebook_line.show([], is_last=True)
            return
        if self._is_live:
            with self._out.status("") as shown:
                yield lambda line: shown.update(self._text(line))
            return
        printed = -math.inf

        def say(line: str) -> None:
            nonlocal printed
            if self._clock() - printed >= every:
                printed = self._clock()
                self.line(line)

        yield say

    def evaluation(self, evaluations: Sequence[tuple[int, Mapping[str, float]]], num_prompts: int) -> None:
        """One line about the last of a run's evaluations, (steps done, metrics), compared with the best so far."""
        done, metrics = evaluations[-1]
        shown = []
        of_all = {name: value for name, value in metrics.items() if name.startswith("eval/") and name.count("/") < 3}
        for name, value in of_all.items():  # without those by category, of which there may be many
            step, best = best_evaluation(evaluations, name)
            standing = " (best so far)" if step == done else f" (best {best:.3f} after {step})"
            compared = len(evaluations) > 1 and not name.endswith(("/response_length", "/timeouts", "/cut_sequences"))
            shown.append(f"{name} {value:.3f}{standing if compared else ''}")
        self.line(f"evaluation after {done} steps on {num_prompts} held-out prompts: {', '.join(shown)}")

    def curve(self, name: str, values: Sequence[float]) -> None:
        """A metric over the run, as a sparkline between its first and last value."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            self.line(f"{name}  (no values)")
            return
        ends = f"{name}  {cell(finite[0])}", cell(finite[-1])
        width = min(60, self._out.width - len(ends[0]) - len(ends[1]) - 2)
        picture = sparkline(values, width) if width >= 8 and self._can_show(BLOCKS) else "->"
        self.line(f"{ends[0]} {picture} {ends[1]}")

    def where(self, paths: Mapping[str, Path | str]) -> None:
        """Lists the paths and addresses to which a run has written, by name."""
        self.header("Written to")
        width = max(map(len, paths), default=0)
        for name, path in paths.items():
            self.line(f"  {name:<{width}}  {path}")

    def release(self) -> None:
        """Restores the terminal if the process ends during a progress bar."""
        self._out.show_cursor(True)

    def error(self, message: str) -> None:
        """Shows an error on standard error, quiet or not. Line breaks in the message stay."""
        for number, line in enumerate(message.split("\n")):
            shown = self._text(line if number else f"Error: {line}", "bold red", self._errors)
            self._errors.print(shown, soft_wrap=True)

    def _text(self, text: str, style: str = "", console: RichConsole | None = None) -> Text:
        """Text that any terminal can show, with line breaks and control characters escaped."""
        encoding = (console or self._out).encoding
        return Text(printable(text).encode(encoding, "backslashreplace").decode(encoding), style)

    def _cut(self, text: str, max_chars: int) -> Text:
        # No need to escape what will be cut away.
        shown = self._text(text[: max_chars + 1])
        if len(shown) > max_chars:
            mark = "…" if self._can_show("…") else "..."
            shown = shown[: max_chars - len(mark)] + Text(mark)
        return shown

    @property
    def _is_live(self) -> bool:
        return self._out.is_terminal and not self._out.is_dumb_terminal and not self._out.quiet

    def _can_show(self, text: str) -> bool:
        try:
            text.encode(self._out.encoding)
        except UnicodeEncodeError:
            return False
        return True


def _plain_table() -> Table:
    # The box puts one blank between columns, the padding the rest of the gap.
    return Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold"
    )


def _column_widths(heading: str, cells: Sequence[Text], limit: int) -> tuple[int, int]:
    """The least width at which a column is readable, and the width that it needs in full."""
    in_heading = max(map(cell_len, heading.split(" ")))
    wanted = min(limit, max(in_heading, *(cell.cell_len for cell in cells)))
    longest_word = max(in_heading, *(cell_len(word) for cell in cells for word in cell.plain.split(" ")))
    return min(wanted, max(longest_word, _EASY_CELL)), wanted


def _column_blocks(widths: Mapping[str, tuple[int, int]], available: int) -> list[dict[str, int]]:
    """Splits columns into blocks that fit, each of which begins with the first column: key -> width for each block."""
    first, *others = widths
    blocks = [[first]]
    for key in others:
        block = blocks[-1]
        if len(block) > 1 and sum(widths[other][0] + _GAP for other in block) + widths[key][0] > available:
            blocks.append([first])
        blocks[-1].append(key)
    fitted = [{key: widths[key][1] for key in block} for block in blocks]
    for width_of in fitted:
        while sum(width_of.values()) + _GAP * (len(width_of) - 1) > available:
            slack = [key for key in width_of if width_of[key] > widths[key][0]]
            if not slack:
                break
            width_of[max(slack, key=width_of.__getitem__)] -= 1
    return fitted
