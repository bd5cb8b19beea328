"""One output of a notebook's cell that changes in place. It needs no widgets; a saved notebook keeps its last state.

IPython is there wherever a notebook is, and is looked for nowhere else.
"""

import html
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Publish = Callable[..., None]
"""IPython's `display_pub.publish`."""
_EVERY_SECONDS = 0.25
_numbers = itertools.count(1)


def publisher() -> Publish | None:
    """How the notebook that this process is the kernel of shows something; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell.display_pub.publish if shell is not None and hasattr(shell, "kernel") else None


class NotebookLine:
    """A few lines of text in place, with a bar above them where progress is known. Methods may be called in any thread.

    Args:
        clock: Seconds; more than four changes in one are not shown, but for the last.
    """

    def __init__(self, publish: Publish, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._publish, self._clock = publish, clock
        self._transient = {"display_id": f"jaxrlhf-{os.getpid()}-{next(_numbers)}"}
        self._shown_at: float | None = None
        self._lock = threading.Lock()

    def show(self, lines: Sequence[str], *, done: float | None = None, is_last: bool = False) -> None:
        """Shows lines in place of those before; `done` is the fraction of all work."""
        with self._lock:
            now, is_first = self._clock(), self._shown_at is None
            if not is_first and not is_last and now - (self._shown_at or 0.0) < _EVERY_SECONDS:
                return
            self._shown_at = now
            bar = f'<progress value="{done:.4f}" max="1" style="width:24em"></progress><br>' if done is not None else ""
            text = "<br>".join(html.escape(line) for line in lines if line)
            style = "font-family:monospace;white-space:pre-wrap;line-height:1.4"
            shown = f'<div style="{style}">{bar}{text}</div>' if lines else ""
            data = {"text/plain": "\n".join(line for line in lines if line), "text/html": shown}
            self._publish(data=data, metadata={}, transient=self._transient, update=not is_first)
