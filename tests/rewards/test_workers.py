"""Reward functions called sample by sample by workers: how many at a time, their limits, and what is left of faults."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxrlhf.rewards.functions import RewardError, call_reward, call_token_reward
from jaxrlhf.rewards.workers import MAX_ABANDONED, Workers


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Functions that hang wait for it, so that their threads end with the test."""
    released = threading.Event()
    yield released
    released.set()
    until(lambda: num_left() == 0)


def call(function: Any, completions: list[str], workers: Workers, late: list[int] | None = None, **more: Any) -> Any:
    prompts = [f"p{completion}" for completion in completions]
    columns: Any = {"answer": [completion * 2 for completion in completions]}
    return call_reward(function, prompts, completions, columns, name="mine", workers=workers, late=late, **more)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def num_left() -> int:
    return sum(thread.name == "reward" for thread in threading.enumerate())


def hanging(released: threading.Event, *which: str) -> Any:
    def function(completions: list[str]) -> list[float]:
        assert completions[0] not in which or released.wait(60)
        return [float(completions[0])]

    return function


def test_a_function_gets_lists_of_one():
    seen = []

    def reward(prompts, completions, answer, weight=1.0):
        seen.append((prompts, completions, answer))
        return [weight * float(completions[0])]

    np.testing.assert_array_equal(call(reward, ["1", "2", "3"], Workers("mine", 2)), [1, 2, 3])
    assert sorted(seen) == [(["p1"], ["1"], ["11"]), (["p2"], ["2"], ["22"]), (["p3"], ["3"], ["33"])]
    assert call(reward, [], Workers("mine", 2)).shape == (0,) and len(seen) == 3
    np.testing.assert_array_equal(call(lambda a, b: np.ones(1), ["1"], Workers("mine", 900)), [1])


def test_as_many_samples_run_at_a_time_as_there_are_workers():
    lock, running, most = threading.Lock(), 0, 0

    def slow(completions):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return [float(completions[0])]

    workers, completions = Workers("mine", 16, sample_timeout_seconds=30), [str(i) for i in range(64)]
    started = time.monotonic()
    np.testing.assert_array_equal(call(slow, completions, workers, timeout_seconds=60), np.arange(64))
    assert most == 16 and 0.2 <= time.monotonic() - started < 1.6, "half of what they take one after another"

    most, workers = 0, Workers("mine", 4)
    with ThreadPoolExecutor(3) as calls:  # of one role at the same time
        parts = list(calls.map(lambda part: call(slow, part, workers), (completions[:16], completions[16:20], [])))
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(20))
    assert most == 4
    until(lambda: num_left() == 0)  # no thread waits for further samples


@pytest.mark.parametrize("form", ["async", "awaitables"])
def test_async_functions(form):
    async def one(completion):
        await asyncio.sleep(0.01)
        return float(completion)

    async def whole(completions):
        return [await one(completion) for completion in completions]

    function = whole if form == "async" else lambda completions: [one(completion) for completion in completions]
    np.testing.assert_array_equal(call(function, ["1", "2", "3"], Workers("mine", 2)), [1, 2, 3])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: [1 / 0], r"must not raise\. Got ZeroDivisionError: .*, at .*test_workers\.py:\d+ for THIS"),
        (lambda: sys.exit(3), r"must not raise\. Got SystemExit: 3, at .* for THIS"),
        (lambda: [1.0, 2.0], r"must return one number for each of 1 completions\. Got 2 for THIS"),
        (list, r"must return one number for each of 1 completions\. Got 0 for THIS"),
        (lambda: 1.0, r"must return a list of 1 numbers\. Got 1\.0 for THIS"),
        (lambda: [float("nan")], r"must return finite numbers\. Got nan at index 2 for prompt 'p2', completion '2'"),
    ],
    ids=["raises", "exits", "too many", "too few", "no list", "nan"],
)  # fmt: skip
def test_an_error_names_the_sample(body, message):
    sample = "the sample at index 2, prompt 'p2', completion '2'"
    with pytest.raises(RewardError, match=rf"^Reward 'mine': {message.replace('THIS', sample)}\.$"):
        call(lambda completions: body() if completions == ["2"] else [0.0], list("01234"), Workers("mine", 3))


def test_after_an_error_nothing_more_starts_and_nothing_is_waited_for(released):
    seen, workers = [], Workers("mine", 3)

    def reward(completions):
        seen.append(completions[0])
        until(lambda: len(seen) >= 3)
        return [1 / 0] if completions[0] == "2" else hanging(released, "0", "1")(completions)

    started = time.monotonic()
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        call(reward, list("012345"), workers)
    assert time.monotonic() - started < 10 and sorted(seen) == ["0", "1", "2"]
    np.testing.assert_array_equal(call(hanging(released), list("345"), workers), [3, 4, 5])  # all have their place


def test_a_sample_that_takes_too_long_is_an_error(released):
    message = (
        "Reward 'mine': must return within 0.05 seconds for each completion. Got nothing by then for the sample at "
        "index 1, prompt 'p7', completion '7'. Raise roles.mine.sample_timeout_seconds, or set "
        "roles.mine.timeout_score to give such samples that score."
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        call(hanging(released, "7"), list("678"), Workers("mine", 2, sample_timeout_seconds=0.05))


def test_or_it_gets_a_score_and_another_takes_its_place(released):
    late: list[int] = []
    workers = Workers("mine", 1, sample_timeout_seconds=0.2, timeout_score=-1.0)
    np.testing.assert_array_equal(call(hanging(released, "2", "4"), list("12345"), workers, late), [1, -1, 3, -1, 5])
    assert late == [1, 3]
    until(lambda: num_left() == 2)
    released.set()
    until(lambda: num_left() == 0)
    np.testing.assert_array_equal(call(hanging(released), list("6"), workers, late), [6])
    assert late == [1, 3]


def test_an_async_sample_that_takes_too_long():
    async def slow(completions):
        await asyncio.sleep(1.0 if completions == ["2"] else 0.0)
        return [5.0]

    workers = Workers("mine", 4, sample_timeout_seconds=0.3, timeout_score=0.0)
    np.testing.assert_array_equal(call(slow, list("123"), workers), [5, 0, 5])
    until(lambda: num_left() == 0)


def test_the_limit_of_a_sample_begins_when_it_starts():
    def slow(completions):
        time.sleep(0.15)
        return [1.0]

    assert call(slow, list("1234567"), Workers("mine", 1, sample_timeout_seconds=0.8)).sum() == 7, "1.05 s in all"


def test_the_score_of_a_sample_that_took_too_long_is_that_of_its_last_token(released):
    def halves(completions, num_tokens):
        assert completions[0] != "late" or released.wait(60)
        return [[0.5] * n for n in num_tokens]

    late: list[int] = []
    workers = Workers("mine", 2, sample_timeout_seconds=0.2, timeout_score=-2.0)
    completions, columns = ["x", "late", "late"], {"num_tokens": [2, 3, 0]}
    got = call_token_reward(halves, ["p"] * 3, completions, columns, name="mine", workers=workers, late=late)
    assert [x.tolist() for x in got] == [[0.5, 0.5], [0.0, 0.0, -2.0], []] and late == [1, 2]


def test_not_too_many_are_left_behind(released):
    workers = Workers("mine", 2, sample_timeout_seconds=0.02, timeout_score=0.0)
    completions = [str(i) for i in range(30)]
    message = (
        r"^Reward 'mine': at most 8 samples may still run after they took longer than 0\.02 seconds, 4 for each of "
        r"roles\.mine\.workers\. Got (9|10), the last for the sample at index \d+, prompt 'p\d+', completion '\d+'\. "
        r"Give what the function waits for a timeout of its own, or raise roles\.mine\.sample_timeout_seconds\.$"
    )
    with pytest.raises(RewardError, match=message):
        call(hanging(released, *completions), completions, workers)
    assert num_left() <= (MAX_ABANDONED + 1) * 2


def test_the_whole_batch_has_its_limit_too(released):
    message = (
        "Reward 'mine': must return within 0.3 seconds for 4 completions. Got 2 of them by then. Raise "
        "roles.mine.workers or roles.mine.timeout_seconds, or set the latter to 0 to wait for ever."
    )
    workers = Workers("mine", 2)
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        call(hanging(released, "3", "4"), list("1234"), workers, timeout_seconds=0.3)
    with ThreadPoolExecutor(1) as other:  # also while it waits for a worker
        occupied = other.submit(call, hanging(released, "1", "2"), list("12"), workers)
        until(lambda: num_left() == 4)
        with pytest.raises(RewardError, match=r"for 1 completions\. Got 0 of them by then"):
            call(hanging(released), ["5"], workers, timeout_seconds=0.1)
        released.set()
        assert list(occupied.result()) == [1, 2]


def test_more_threads_than_there_may_be(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    message = r"^Reward 'mine': roles\.mine\.workers must be as many .* Got 3\. Lower it\. can't start new thread$"
    with pytest.raises(RewardError, match=message):
        call(lambda completions: [1.0], list("12"), Workers("mine", 3))


ABANDONS = """
import time
from jaxrlhf.rewards.functions import call_reward
from jaxrlhf.rewards.workers import Workers

def hangs(completions):
    time.sleep(600)

workers = Workers("mine", 2, sample_timeout_seconds=0.05, timeout_score=3.0)
print(call_reward(hangs, ["p"] * 2, ["x"] * 2, {}, name="mine", workers=workers))
"""


def test_a_process_ends_with_samples_left_behind():
    done = subprocess.run([sys.executable, "-c", ABANDONS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "[3. 3.]\n", done.stderr
