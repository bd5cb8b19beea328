"""Messages between the processes of a run, apart from the devices: shared values, requests to stop, failures.

The first process is connected to every other one. Shared values are numbered, and all processes count alike, since they
run the same program. A broken connection shows at once that a process has ended.
"""

import concurrent.futures
import itertools
import os
import pickle
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
_KEY_BYTES = 32
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that disappears is noticed after 35 seconds."""

ValueOrError = tuple[bool, Any]
"""(True and the value, or False and the exception)."""


class Channel:
    """The channel of this process to the others. In a run of one process it connects to nobody.

    `open` connects all processes.
    """

    def __init__(self, index: int = 0, connections: Mapping[int, Connection] | None = None, *, count: int = 1) -> None:
        self.index, self.count = index, count
        self.on_stop: Callable[[int], None] = lambda signal_number: None
        """Called in the first process, in another thread, when another process was asked to stop."""
        self._connections = connections or {}
        self._sending = {other: threading.Lock() for other in self._connections}
        self._numbers = itertools.count()
        self._meetings: dict[Any, concurrent.futures.Future[Any]] = {}
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._closed = False
        self._shared_errors: list[BaseException] = []
        for other, connection in self._connections.items():
            threading.Thread(target=self._listen, args=(other, connection), name="channel", daemon=True).start()

    @classmethod
    def open(cls) -> "Channel":
        """Connects the processes of this run. All of them call it once, after JAX is initialized."""
        if jax.process_count() == 1:
            return cls()
        if jax.process_index() == 0:
            key = secrets.token_bytes(_KEY_BYTES)
            with Listener(("", 0), backlog=jax.process_count(), authkey=key) as listener:
                _, port = listener.address  # pyright: ignore[reportGeneralTypeIssues]
                _tell_all(f"{_own_address()}:{port}".encode(), key)
                connections = {}
                for _ in range(jax.process_count() - 1):
                    connection = listener.accept()
                    connections[connection.recv()] = _kept_alive(connection)
            return cls(0, connections, count=jax.process_count())
        address, key = _tell_all(b"", b"")
        host, _, port = address.decode().rpartition(":")
        connection = _kept_alive(Client((host, int(port)), authkey=key))
        connection.send(jax.process_index())
        return cls(jax.process_index(), {0: connection}, count=jax.process_count())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, make: Callable[[], T]) -> T:
        """Calls `make` in the first process, and returns its result, or raises its error, in all processes."""
        return self.later(lambda: _attempt(make)).result()

    def together(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`, called in each process. If it raises in one of them, all raise that error."""
        worked, value = _attempt(make)
        if self.count == 1 and worked:
            return value
        failures = self.gather(None if worked else _portable((False, value))[1])
        failure = self.share(lambda: next((error for error in failures if error is not None), None))
        if failure is None:
            return value
        if not worked and self.is_first:
            failure = value  # with its traceback
        self._shared_errors.append(failure)
        raise failure

    def later(self, start: "Callable[[], ValueOrError | concurrent.futures.Future[ValueOrError]]") -> Any:
        """A future of an outcome in the first process, where `start` returns the outcome or a future of it."""
        number = next(self._numbers)
        if not self.is_first:
            return self._meeting(("value", number))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def publish(outcome: ValueOrError) -> None:
            worked, value = outcome
            if not worked:
                self._shared_errors.append(value)
            try:
                for other in self._connections:
                    self._send(other, "value", number, _portable(outcome))
            except Exception as error:  # a value that cannot be sent
                self.abort(error)
            future.set_result(value) if worked else future.set_exception(value)

        outcome = start()
        if isinstance(outcome, concurrent.futures.Future):
            outcome.add_done_callback(
                lambda done: publish(
                    (False, concurrent.futures.CancelledError()) if done.cancelled() else done.result()
                )
            )
        else:
            publish(outcome)
        return future

    def number(self) -> int:
        """A number for `gather` in another thread, the same in all processes."""
        return next(self._numbers)

    def gather(self, value: Any, number: int | None = None) -> list[Any]:
        """The values of all processes, in their order, in the first process; only their own value in the others.
        `number`: a result of `number`. None means the next number."""
        number = self.number() if number is None else number
        if not self.is_first:
            self._send(0, "gathered", (number, self.index), value)
            return [value]
        others = [self._meeting(("gathered", (number, other))).result() for other in sorted(self._connections)]
        return [value, *others]

    def ask_to_stop(self, signal_number: int) -> None:
        """Tells the first process that this one was asked to stop."""
        if not self.is_first:
            self._send(0, "stop", None, signal_number)

    def is_shared(self, error: BaseException | None) -> bool:
        """Returns whether an error, or one that caused it, was raised in all processes."""
        while error is not None:
            if any(error is shared for shared in self._shared_errors):
                return True
            error = error.__cause__ or error.__context__
        return False

    def abort(self, error: BaseException, *, message: str | None = None, status: int = 1) -> None:
        """Ends this process at once for an error that the others do not have, and sends it to them, so that they end.

        An orderly shutdown would wait for the others, which wait for this process. In a run of one process this does
        nothing, and the caller raises the error.

        Args:
            message: Printed instead of the traceback.
        """
        if self.count == 1:
            return
        text = message or "".join(traceback.format_exception(error))
        for other in self._connections:
            self._send(other, "failed", self.index, text)
        self._end(text, status)

    def close(self) -> None:
        """Announces the regular end of this process. From now on, lost connections are no errors."""
        self._closed = True
        for other in self._connections:
            self._send(other, "bye", None, None)

    def _meeting(self, key: Any) -> "concurrent.futures.Future[Any]":
        """The future of a message. Its sender and its receiver each ask for it once."""
        with self._lock:
            if key in self._meetings:
                return self._meetings.pop(key)
            self._meetings[key] = concurrent.futures.Future()
            return self._meetings[key]

    def _send(self, other: int, kind: str, key: Any, value: Any) -> None:
        try:
            with self._sending[other]:
                self._connections[other].send((kind, key, value))
        except OSError:
            if not self._closed and other not in self._left:
                self._lost(other)

    def _listen(self, other: int, connection: Connection) -> None:
        while True:
            try:
                kind, key, value = connection.recv()
            except (OSError, EOFError):
                if not self._closed and other not in self._left:
                    self._lost(other)
                return
            except Exception as error:  # a value of a class that is missing or different here
                self._end(
                    f"what process {other} sent must be readable in process {self.index}. Got {error!r}. Give all "
                    "processes the same code and packages."
                )
            if kind == "value":
                worked, content = value
                if not worked:
                    self._shared_errors.append(content)
                future = self._meeting(("value", key))
                future.set_result(content) if worked else future.set_exception(content)
            elif kind == "gathered":
                self._meeting(("gathered", key)).set_result(value)
            elif kind == "stop":
                self.on_stop(value)
            elif kind == "bye":
                self._left.add(other)
            elif kind == "failed":
                for third in self._connections.keys() - {other}:
                    self._send(third, "failed", key, value)
                self._end(f"process {key} of {self.count} failed, so process {self.index} ends too. It said:\n{value}")

    def _lost(self, other: int) -> None:
        self._end(
            f"process {other} of {self.count} is gone: it was killed, or its machine or network failed. Process "
            f"{self.index} ends too. Start all of them again, with --resume auto to go on from the last checkpoint."
        )

    def _end(self, message: str, status: int = 1) -> None:
        """Ends this process at once: its main thread may wait for devices of a process that has ended."""
        sys.stdout.flush()
        print(f"Error: {message}", file=sys.stderr, flush=True)
        os._exit(status)


def _attempt(make: Callable[[], Any]) -> ValueOrError:
    try:
        return True, make()
    except Exception as error:
        return False, error


def _portable(outcome: ValueOrError) -> ValueOrError:
    """An outcome that can be sent. An exception that cannot be pickled is replaced by its text."""
    worked, value = outcome
    if worked:
        return outcome
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False, RuntimeError("".join(traceback.format_exception_only(value)).strip())
    return outcome


def _tell_all(address: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Broadcasts the address and the key of the first process, and returns them."""
    message = np.zeros(256, np.uint8)
    message[: len(key)] = np.frombuffer(key, np.uint8)
    message[_KEY_BYTES : _KEY_BYTES + len(address)] = np.frombuffer(address, np.uint8)
    told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(message)))
    return told[_KEY_BYTES:].rstrip(b"\0"), told[:_KEY_BYTES]


def _own_address() -> str:
    """The address of this machine, the first of the run: the coordinator's host if it is set, or its main address."""
    host = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[0]
    if host:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which address would be used
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _kept_alive(connection: Connection) -> Connection:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # some systems lack them
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
