"""What processes tell one another, tried with two channels in one process, each in a thread of its own."""

import concurrent.futures
import multiprocessing
import threading

import pytest

from jaxrlhf.execution.process_channel import Channel


@pytest.fixture
def both():
    """Runs a function of a channel in both ends of one, as two processes would; gives what it gave in each."""
    here, there = multiprocessing.Pipe()
    channels = [Channel(0, {1: here}, count=2), Channel(1, {0: there}, count=2)]  # pyright: ignore[reportArgumentType]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:

        def run(function):
            return [done.exception() or done.result() for done in [threads.submit(function, c) for c in channels]]

        yield run
    for channel in channels:
        channel.close()


def fail():
    raise ValueError("made up")


def test_what_the_first_has_all_have(both):
    made = []

    def share(channel):
        return channel.share(lambda: made.append(channel.index) or {"from": channel.index})

    assert both(share) == [{"from": 0}] * 2
    assert made == [0], "the other one does not make it"


def test_what_is_raised_in_the_first_is_raised_in_all(both):
    def share(channel):
        try:
            channel.share(fail)
        except ValueError as error:
            try:
                raise RuntimeError("said otherwise") from error
            except RuntimeError as later:
                return str(error), channel.is_shared(later), channel.is_shared(ValueError("another"))

    assert both(share) == [("made up", True, False)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_fails_all_fail(both, failing):
    def check(channel):
        channel.together(lambda: fail() if channel.index == failing else channel.index)

    errors = both(check)
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "made up")] * 2


def test_where_none_fails_each_has_its_own(both):
    assert both(lambda channel: channel.together(lambda: channel.index)) == [0, 1]


def test_the_first_gathers_what_each_has(both):
    assert both(lambda channel: channel.gather(10 * channel.index)) == [[0, 10], [10]]


def test_what_comes_later_finds_its_place(both):
    """Two values that the first has in the other order."""
    release = threading.Event()

    def ask(channel):
        threads = concurrent.futures.ThreadPoolExecutor(2)

        def slow():
            release.wait()
            return True, "slow"

        def quick():
            release.set()
            return True, "quick"

        first, second = (channel.later(lambda work=work: threads.submit(work)) for work in (slow, quick))
        return first.result(timeout=10), second.result(timeout=10)

    assert both(ask) == [("slow", "quick")] * 2


def test_a_run_of_one_process_talks_to_itself():
    channel = Channel()
    assert channel.is_first and channel.share(lambda: 3) == 3 and channel.gather(4) == [4]
    with pytest.raises(ValueError, match="made up"):
        channel.together(fail)
    channel.abort(ValueError("goes its own way"))
