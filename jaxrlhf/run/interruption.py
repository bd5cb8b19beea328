"""SIGTERM and Ctrl-C during a run.

Signals are handled in a thread of their own: Python runs handlers in the main thread, which may be compiling for
minutes, or waiting for a Python function that hangs.
"""

import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.run.checkpoints import Checkpoints

PATIENCE_SECONDS = 5.0
"""The longest that a Python function may still run after the run was asked to stop."""
_LOOK_SECONDS = 0.25
_SAME_SECONDS = 0.5
"""Two interrupts of the main thread within this time are of one Ctrl-C."""


class RunStopped(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number
        """The status by which a shell reports the signal. It is not 0, so that a scheduler restarts the run."""


class StopRequest:
    """Takes note of a signal, for which the run looks between two steps.

    As a context manager it handles SIGTERM, which schedulers send before they take a machine away, and SIGINT, sent by
    Ctrl-C. It says at once what happens next, and ends the process itself if nothing would be lost, or if Ctrl-C is
    pressed again. Outside of the main thread Python allows no handlers, and none are set.

    Args:
        say: Shows a line to the user.
        end: Ends the process with an exit status, from any thread, without waiting. None means that the process
            continues, as in a notebook, and KeyboardInterrupt is raised in its main thread.
    """

    def __init__(
        self, say: Callable[[str], None] = lambda line: None, end: Callable[[int], None] | None = None
    ) -> None:
        self.signal: int | None = None
        self.can_end_at_once = False
        """True if all work is on the disk."""
        self.on_request: Callable[[int], None] = lambda number: None
        """Called once, in any thread, when the run is asked to stop."""
        self.abandon: Callable[[float], None] = lambda seconds: None
        """Called repeatedly after that, to abandon Python functions that have run for so many seconds."""
        self._say, self._end_process = say, end
        self._raises = False
        self._before: dict[int, object] = {}
        self._over = threading.Event()
        self._made, self._making = False, threading.Lock()
        self._heard = False
        self._raised_at = -math.inf
        self._leaving = False

    def check_interrupt(self) -> None:
        """Raises KeyboardInterrupt if the run is to end now. Python drops the one that a signal raises if it comes
        while a destructor or a callback of the garbage collector runs."""
        if self._raises:
            raise KeyboardInterrupt

    def make(self, signal_number: int) -> None:
        """Asks the run to stop. Later calls have no effect."""
        with self._making:
            if self._made:
                return
            self._made, self.signal = True, signal_number
        self.on_request(signal_number)
        threading.Thread(target=self._lose_patience, name="patience", daemon=True).start()

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._leaving = True
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            self._written.close()  # ends the thread
            self._thread.join()
            self._reading.close()
            for number, handler in self._before.items():
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
            self._before.clear()
        if kind is None:
            self.check_interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, possibly late. The next step sees the signal."""
        del frame
        if self._leaving:
            return
        if self._raises:
            now, before = time.monotonic(), self._raised_at
            if now - before > _SAME_SECONDS:  # not Ctrl-C and the signal by which it is sent on
                self._raised_at = now
                raise KeyboardInterrupt
        elif self.signal is None:
            self.signal = number

    def _listen(self) -> None:
        while numbers := self._reading.recv(16):
            for number in numbers:
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._note(number)

    def _note(self, number: int) -> None:
        if self._raises:  # sent by this object
            return
        # `_made` may be of this very signal, whose handler was faster than this thread
        self._heard, again = True, self._heard
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if again and number == signal.SIGINT:
            self._say(f"{name} again: the run ends now, without saving. The last checkpoint counts.")
            self._end(128 + number)
        elif again:
            return
        elif self.can_end_at_once:
            how = "" if self._end_process is None else " Start it again with --resume auto to go on."
            self._say(f"{name}: nothing is to be saved, so the run ends now.{how}")
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
            signal.pthread_kill(main, signal.SIGINT)  # also wakes it while it waits

    def _lose_patience(self) -> None:
        if not self._over.wait(PATIENCE_SECONDS):
            self.abandon(PATIENCE_SECONDS)
        while not self._over.wait(_LOOK_SECONDS):
            self.abandon(PATIENCE_SECONDS)  # functions that began since then


class Requests:
    """Requests by signals and by the clock, with the same answer in all processes of a run.

    The first process decides, by its clock; a signal to any process counts.
    """

    def __init__(self, stop: StopRequest, checkpoints: Checkpoints, channel: Channel) -> None:
        self._stop, self._checkpoints, self._channel = stop, checkpoints, channel
        channel.on_stop = stop.make
        stop.on_request = channel.ask_to_stop
        if stop.signal is not None:
            channel.ask_to_stop(stop.signal)

    def look(self) -> tuple[bool, bool]:
        """Returns whether to save and stop, and whether to save since the last checkpoint was long ago.

        Every process must call this equally often.
        """
        self._stop.check_interrupt()
        signal, save = self._channel.share(lambda: (self._stop.signal, self._checkpoints.minutes_are_over()))
        if signal is not None:
            self._stop.make(signal)
        return signal is not None, save

    def has_unsaved(self, unsaved: bool) -> None:
        """Records whether there is work that is not on the disk.

        In a run of several processes none of them ends by itself, which the others would take for a failure.
        """
        alone = self._channel.count == 1
        self._stop.can_end_at_once = alone and not unsaved and not self._checkpoints.are_being_written

    def stopped(self, message: str) -> RunStopped:
        """The exception for a run that was asked to stop, and has saved."""
        assert self._stop.signal is not None
        return RunStopped(self._stop.signal, message)
