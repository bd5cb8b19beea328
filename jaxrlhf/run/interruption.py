"""SIGTERM and Ctrl-C while a run trains.

Signals are answered in a thread of their own: Python runs handlers in the main thread, which may be compiling for
minutes, or waiting for a Python function that hangs.
"""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

PATIENCE_SECONDS = 5.0
"""How long a Python function may go on running once the run was asked to stop."""
_LOOK_SECONDS = 0.25


class RunStopped(Exception):
    """The run was asked to stop, has saved what it had, and stopped."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number
        """As a shell reports the signal. Not 0, so that a scheduler starts the run again."""


class StopRequest:
    """Notes a signal, which the run looks for between two steps.

    As a context manager it takes over SIGTERM, sent by schedulers before they take a machine away, and SIGINT, sent by
    Ctrl-C. It says at once what happens next, and ends the process itself where nothing would be lost by that, or where
    Ctrl-C comes again. Outside the main thread no handler can be set, and none is.

    Args:
        say: Says a line to the user.
        end: Ends the process with an exit status, from any thread, without waiting for anything. None: the process goes
            on, as a notebook's does, and KeyboardInterrupt is raised in its main thread.
    """

    def __init__(
        self, say: Callable[[str], None] = lambda line: None, end: Callable[[int], None] | None = None
    ) -> None:
        self.signal: int | None = None
        self.can_end_at_once = False
        """All that was done is on the disk."""
        self.on_request: Callable[[int], None] = lambda number: None
        """Called once, when the run is asked to stop, in some thread."""
        self.abandon: Callable[[float], None] = lambda seconds: None
        """Called again and again after that: leaves Python functions to themselves that have run for so long."""
        self._say, self._end_process = say, end
        self._raises = False
        """The main thread is to leave what it is doing."""
        self._before: dict[int, object] = {}
        self._over = threading.Event()
        self._made, self._making = False, threading.Lock()
        self._heard = False

    def make(self, signal_number: int = signal.SIGTERM) -> None:
        """Ask the run to stop. Asked again, it does nothing more."""
        with self._making:
            if self._made:
                return
            self._made, self.signal = True, signal_number
        self.on_request(signal_number)
        threading.Thread(target=self._lose_patience, name="patience", daemon=True).start()

    def stopped(self, message: str) -> RunStopped:
        """What the run raises when it has saved."""
        assert self.signal is not None
        return RunStopped(self.signal, message)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._reading, self._written = socket.socketpair()
            self._written.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
            self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
            self._before.clear()
            signal.set_wakeup_fd(self._wakeup_before)
            self._written.close()  # the thread reads what is there, and ends
            self._thread.join()
            self._reading.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, when it gets to it: what it does next knows of the signal."""
        del frame
        if self._raises:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = number

    def _listen(self) -> None:
        while numbers := self._reading.recv(16):
            for number in numbers:
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._note(number)

    def _note(self, number: int) -> None:
        if self._raises:  # its own signal
            return
        self._heard, again = True, self._heard or self._made
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if again:
            if number == signal.SIGINT:
                self._say(f"{name} again: the run ends now, without saving. The last checkpoint counts.")
                self._end(128 + number)
        elif self.can_end_at_once:
            self._say(
                f"{name}: nothing is to be saved, so the run ends now. Start it again with --resume auto to go on."
            )
            self._end(128 + number)
        else:
            self._say(f"{name}: the run stops after this step, and saves. Ctrl-C now ends it at once, without saving.")
            self.make(number)

    def _end(self, status: int) -> None:
        if self._end_process is not None:
            self._end_process(status)
        else:
            self._raises = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # wakes it where it waits, too

    def _lose_patience(self) -> None:
        if not self._over.wait(PATIENCE_SECONDS):
            self.abandon(PATIENCE_SECONDS)
        while not self._over.wait(_LOOK_SECONDS):
            self.abandon(PATIENCE_SECONDS)  # what began since then
