"""Progress of a run: rates, metrics of the last step, the slowest calls, and the time that is left."""

import collections
from collections.abc import Callable, Mapping

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrlhf.observe.plain_text import duration, number, printable


class Progress:
    """Writes lines about the steps of a run. `Console.progress` makes it."""

    def __init__(
        self, write: Callable[[str], None], total: int, *, start: int, every: int, clock: Callable[[], float],
        changed: Callable[["Progress"], None] = lambda progress: None,
    ) -> None:  # fmt: skip
        """`changed` is called, in any thread, when there is something new to show."""
        self._write, self._clock, self._changed = write, clock, changed
        self._total, self._every, self._step = total, every, start
        self._updated = self._began = clock()
        self._printed: float | None = None
        self._recent: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=20)
        """(steps, seconds, tokens) of the latest updates, of which all rates are means."""
        self._compiled = False
        self._saved: int | None = None
        self._line, self._slowest = "the first step compiles", ""
        self._within = ""

    def saved(self, step: int) -> None:
        """Takes note of a checkpoint after `step` steps, from which the run would resume if it were killed."""
        self._saved = step

    def within_step(self, text: str) -> None:
        """Takes note, in any thread, of how far a long call of the step is; a line after ten seconds without one."""
        now = self._clock()
        self._within = text
        if now - (self._began if self._printed is None else self._printed) >= 10:
            self._printed = now
            self._write(f"step {self._step + 1}  {text}")
        self._changed(self)

    def resume(self) -> None:
        """Excludes the time since the last step, of an evaluation or a checkpoint, from that of the next step."""
        self._updated = self._clock()

    def update(
        self,
        step: int,
        shown: Mapping[str, float],
        calls: Mapping[str, float] | None = None,
        *,
        tokens: float | None = None,
        busy: float | None = None,
        overlap: float = 0.0,
    ) -> None:
        """Takes note that `step` steps are done, which worked on `tokens` tokens.

        `shown` are metrics of the last step to show, `calls` the seconds of its calls or timers. `busy` is the fraction
        of the step in which a device worked, on average; `overlap` the fraction of that time in which two or more calls
        ran.
        """
        now = self._clock()
        self._recent.append((max(1, step - self._step), now - self._updated, tokens or 0.0))
        if not self._compiled and len(self._recent) > 1:
            self._recent.popleft()
            self._compiled = True
        self._updated, self._step = now, step
        num_steps, all_seconds, all_tokens = (sum(column) for column in zip(*self._recent, strict=True))
        seconds = all_seconds / num_steps
        facts = [
            f"step {step:>{len(str(self._total))}}/{self._total}",
            *(f"{name} {number(value, digits=3)}" for name, value in shown.items()),
            f"{number(seconds, digits=3)} s/step",
            all_tokens and all_seconds and f"{number(all_tokens / all_seconds, digits=3)} tokens/s",
            busy is not None and f"busy {busy:.0%}",
            round(100 * overlap) and f"overlap {overlap:.0%}",
            # the first step compiles, so later ones are faster
            self._compiled and step < self._total and f"ETA {duration((self._total - step) * seconds)}",
            self._saved is not None and f"saved {self._saved}",
        ]
        line, slowest = "  ".join(fact for fact in facts if isinstance(fact, str)), _breakdown(calls) if calls else ""
        self._line, self._slowest, self._within = line, slowest, ""
        if self._printed is None or step % self._every == 0 or step >= self._total or now - self._printed >= 10:
            self._printed = now
            self._write(f"{line}  {slowest}".rstrip())
        self._changed(self)

    @property
    def fraction(self) -> float:
        """The fraction of all steps that are done."""
        return self._step / self._total if self._total else 1.0

    def lines(self) -> list[str]:
        """The last step, its slowest calls, and how far the present one is."""
        return [printable(text) for text in (self._line, self._slowest, self._within) if text]

    def picture(self) -> Group:
        """The live display of a terminal."""
        bar = Table.grid(padding=(0, 1))
        elapsed = duration(self._clock() - self._began)
        bar.add_row(ProgressBar(total=self._total, completed=self._step, width=40), elapsed)
        first, *below = self.lines()
        return Group(bar, Text(first), *(Text(text, "dim") for text in below))


def _breakdown(calls: Mapping[str, float]) -> str:
    """The three slowest calls, and the sum of the others if there are several."""
    ranked = sorted(calls.items(), key=lambda call: -call[1])
    shown = ranked[:3] if len(ranked) > 4 else ranked
    parts = [f"{name} {seconds:.2f}" for name, seconds in shown]
    if rest := ranked[len(shown) :]:
        parts.append(f"{len(rest)} others {sum(seconds for _, seconds in rest):.2f}")
    return f"({', '.join(parts)})"
