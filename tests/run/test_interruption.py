import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxrlhf.execution.function_threads import FunctionAbandonedError, FunctionThreads
from jaxrlhf.run import interruption
from jaxrlhf.run.interruption import StopRequest


@pytest.fixture(autouse=True)
def as_from_a_terminal() -> Iterator[None]:
    """What a shell runs in the background ignores Ctrl-C, and its tests would too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def until(true: Callable[[], object]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("It did not come true.")


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_ctrl_c_says_what_happens_next_and_the_second_ends_the_process() -> None:
    said: list[str] = []
    ended: list[int] = []
    with StopRequest(said.append, ended.append) as stop:
        ask(signal.SIGINT)
        assert stop.signal == signal.SIGINT, "what comes next knows of it"
        until(lambda: said)
        assert (
            said[0] == "Ctrl-C: the run stops after this step, and saves. Ctrl-C now ends it at once, without saving."
        )
        assert not ended
        ask(signal.SIGTERM)  # a scheduler may ask again: it has been asked
        ask(signal.SIGINT)
        until(lambda: ended)
        assert ended == [130] and said[1].startswith("Ctrl-C again: the run ends now, without saving.")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_with_nothing_to_save_ends_at_once(number: int) -> None:
    said: list[str] = []
    ended: list[int] = []
    with StopRequest(said.append, ended.append) as stop:
        stop.can_end_at_once = True
        ask(number)
        until(lambda: ended)
    assert ended == [128 + number] and "nothing is to be saved, so the run ends now. Start it again" in said[0]


@pytest.mark.parametrize("can_end_at_once", [True, False])
def test_in_a_process_of_others_ctrl_c_raises_and_the_process_goes_on(can_end_at_once: bool) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), StopRequest(said.append) as stop:
        stop.can_end_at_once = can_end_at_once
        ask(signal.SIGINT)
        until(lambda: said)
        if not can_end_at_once:
            ask(signal.SIGINT)
        time.sleep(5)
    assert len(said) == (1 if can_end_at_once else 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_once_a_run_is_to_stop_functions_that_hang_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "PATIENCE_SECONDS", 0.01)
    given_up: list[float] = []
    asked: list[int] = []
    with StopRequest() as stop:
        stop.abandon, stop.on_request = given_up.append, asked.append
        stop.make(signal.SIGTERM)
        stop.make(signal.SIGTERM)
        until(lambda: given_up)
    assert asked == [signal.SIGTERM] and given_up[0] == 0.01


def test_a_function_that_hangs_is_left_behind() -> None:
    threads = FunctionThreads()
    hangs = threads.submit("judge.scores", lambda: time.sleep(60))
    returns = threads.submit("reward.scores", lambda: 7)
    assert returns.result() == 7
    threads.abandon(30.0)
    assert not hangs.done(), "it may still return"
    threads.abandon(0.0)
    result: Any = hangs.result()
    assert result[0] is False and isinstance(result[1], FunctionAbandonedError)
    assert "'judge.scores' had not returned after 0 seconds" in str(result[1])
    started = time.monotonic()
    threads.close()
    assert time.monotonic() - started < 1


def test_a_request_that_the_run_sees_first_is_not_a_second_one() -> None:
    """Handlers run in the main thread, which may look for requests before the thread that listens has heard."""
    said: list[str] = []
    ended: list[int] = []
    with StopRequest(said.append, ended.append) as stop:
        stop.make(signal.SIGINT)
        ask(signal.SIGINT)
        until(lambda: said)
    assert said[0].startswith("Ctrl-C: the run stops after this step, and saves.") and not ended


def test_an_interrupt_that_is_lost_on_its_way_is_raised_by_the_next_look_and_in_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        stop.check_interrupt()
        stop.can_end_at_once = True
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)
            time.sleep(5)
        with pytest.raises(KeyboardInterrupt):
            stop.check_interrupt()


def test_nothing_is_raised_after_it() -> None:
    late = 0
    for _ in range(20):
        with contextlib.suppress(KeyboardInterrupt), StopRequest() as stop:
            stop.can_end_at_once = True
            ask(signal.SIGINT)
        try:
            time.sleep(0.02)
        except KeyboardInterrupt:
            late += 1
    assert not late
