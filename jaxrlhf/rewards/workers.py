"""Threads that call a reward function sample by sample."""

import collections
import concurrent.futures
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.require import errors_as

MAX_ABANDONED = 4
"""The most abandoned samples that may still run, as a multiple of the workers."""

SampleFuture = concurrent.futures.Future[Any]


class RewardError(RuntimeError):
    """A reward function raised, took too long, or did not return a finite number for each completion."""


def in_thread(function: Callable[[], Any]) -> SampleFuture:
    """A future of a function's result or error, in a thread that ends with the process."""
    outcome = SampleFuture()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return outcome


def share_out(work: Callable[[int], None], indexes: Iterable[int], num_threads: int) -> None:
    """Calls `work` for each index, in at most so many threads. If a call raises, no other is begun, and its error is
    raised. The threads do not hold up the end of the process."""
    waiting = collections.deque(indexes)

    def take() -> None:
        while waiting:
            try:
                index = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            work(index)

    running = [in_thread(take) for _ in range(min(num_threads, len(waiting)))]
    try:
        for each in concurrent.futures.as_completed(running):
            each.result()
    finally:
        waiting.clear()


class Workers:
    """The workers of a function role: at most `count` samples run at a time, over all concurrent calls of `run`.

    Each sample has a daemon thread, which Python cannot end. One that is abandoned goes on without counting as a
    worker, so that another sample takes its place.
    """

    def __init__(
        self, role: str, count: int, *, sample_timeout_seconds: float = 0.0, timeout_score: float | None = None
    ) -> None:
        """
        Args:
            sample_timeout_seconds: Limit of one sample, from when its worker starts it. 0 means none.
            timeout_score: The result for a sample that takes longer. None means that this is an error.
        """
        self.timeout_score = timeout_score
        self._role, self._count = role, count
        self._sample_seconds = sample_timeout_seconds or math.inf
        self._changed = threading.Condition()  # guards the two sets; also notified when a sample ends
        self._running: set[SampleFuture] = set()
        self._abandoned: set[SampleFuture] = set()

    def run(
        self,
        score: Callable[[int], Any],
        num_samples: int,
        *,
        describe: Callable[[int], str],
        timeout_seconds: float,
        late: list[int],
    ) -> list[Any]:
        """The results of `score(index)` for each sample. May be called by several threads at once.

        If it raises, its samples that wait are not started, and those that run are abandoned.

        Args:
            describe: Index of a sample -> " for the sample ...", for error messages.
            timeout_seconds: Limit of the whole call. 0 means none.
            late: Gets the indexes of the samples that took too long, whose result is `timeout_score`.

        Raises:
            RewardError: A sample or the whole call took too long, or too many abandoned samples still run.
            Exception: What `score` raised.
        """
        results: list[Any] = [self.timeout_score] * num_samples
        waiting = collections.deque(range(num_samples))
        own: dict[SampleFuture, tuple[int, float]] = {}  # index, and when it has taken too long
        until = time.monotonic() + (timeout_seconds or math.inf)
        with self._changed:
            try:
                while True:
                    for future in [future for future in own if future.done()]:
                        results[own.pop(future)[0]] = future.result()
                    now = time.monotonic()
                    for future in [future for future, (_, end) in own.items() if end <= now]:
                        late.append(own[future][0])
                        self._give_up(future, describe(own.pop(future)[0]))
                    while waiting and len(self._running) < self._count:
                        index = waiting.popleft()
                        future = self._start(functools.partial(score, index))
                        own[future] = index, time.monotonic() + self._sample_seconds
                        if future.done():  # it may have failed
                            break
                    if any(map(SampleFuture.done, own)):  # perhaps before this thread could be notified
                        continue
                    if not own and not waiting:
                        return results
                    if now >= until:
                        raise RewardError(
                            f"Reward {brief(self._role)}: must return within {timeout_seconds:g} seconds for "
                            f"{num_samples} completions. Got {num_samples - len(own) - len(waiting)} of them by then. "
                            f"Raise roles.{self._role}.workers or roles.{self._role}.timeout_seconds, or set the latter"
                            " to 0 to wait for ever."
                        )
                    end = min([until, *(end for _, end in own.values())])
                    self._changed.wait(None if end == math.inf else max(0.0, end - time.monotonic()))
            finally:
                self._abandon(own)

    def _start(self, work: Callable[[], Any]) -> SampleFuture:
        rule = f"Reward {brief(self._role)}: roles.{self._role}.workers must be as many threads as may be started. Got "
        with errors_as(RewardError, f"{rule}{self._count}. Lower it. ", RuntimeError):
            future = in_thread(work)
        self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: SampleFuture) -> None:
        with self._changed:
            self._running.discard(future)
            self._abandoned.discard(future)
            self._changed.notify_all()

    def _abandon(self, futures: Iterable[SampleFuture]) -> None:
        left = self._running.intersection(futures)
        self._running -= left
        self._abandoned |= left
        self._changed.notify_all()

    def _give_up(self, future: SampleFuture, sample: str) -> None:
        """Abandons a sample that takes too long. Raises RewardError if that is an error."""
        self._abandon([future])
        role, seconds, most = self._role, self._sample_seconds, MAX_ABANDONED * self._count
        if self.timeout_score is None:
            raise RewardError(
                f"Reward {brief(role)}: must return within {seconds:g} seconds for each completion. Got nothing by then"
                f"{sample}. Raise roles.{role}.sample_timeout_seconds, or set roles.{role}.timeout_score to give such "
                "samples that score."
            )
        if len(self._abandoned) > most:
            raise RewardError(
                f"Reward {brief(role)}: at most {most} samples may still run after they took longer than {seconds:g} "
                f"seconds, {MAX_ABANDONED} for each of roles.{role}.workers. Got {len(self._abandoned)}, the last"
                f"{sample}. Give what the function waits for a timeout of its own, or raise "
                f"roles.{role}.sample_timeout_seconds."
            )
