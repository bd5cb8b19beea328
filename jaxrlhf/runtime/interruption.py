"""Asking a run to stop: what SIGTERM and Ctrl-C mean while it trains."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class RunStopped(Exception):
    """The run was asked to stop, has saved what it had, and stopped."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number
        """As a shell reports the signal. Not 0, so that a scheduler starts the run again."""


class StopRequest:
    """Notes a signal, which the run looks for between two steps.

    As a context manager it takes over SIGTERM, sent by schedulers before they take a machine away, and SIGINT, sent by
    Ctrl-C. A second Ctrl-C interrupts at once. Outside the main thread no handler can be set, and none is.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    @property
    def made(self) -> bool:
        """Whether the run is to stop."""
        return self.signal is not None

    def make(self, signal_number: int = signal.SIGTERM) -> None:
        """Ask the run to stop."""
        self.signal = signal_number

    def stopped(self, message: str) -> RunStopped:
        """What the run raises when it has saved."""
        assert self.signal is not None
        return RunStopped(self.signal, message)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.make(number)
