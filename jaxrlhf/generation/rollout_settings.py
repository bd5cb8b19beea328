"""Settings of a rollout: slots or all rows at once, when it stops, and how the cache of all rows at once grows."""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import grown_columns
from jaxrlhf.require import require, require_at_least_one, require_fields, require_not_negative
from jaxrlhf.sharding.layout import Layout

_MIN_GROWTH, _MAX_STAGES = 32, 4
"""The fewest tokens by which the cache of all rows at once grows, and its most sizes: decoding is compiled for each."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode batch of a row shard, and how prompts enter it."""

    slots: int
    """Sequences that are decoded at a time."""
    prefill_rows: int = 8
    """Prompts that are prefilled together. Part of what decides the bits."""
    prefill_tokens: int = 0
    """Columns of these prompts that go through the layers together, which bounds what that takes; 0 means all. Part of
    what decides the bits."""
    admit: int = 0
    """Prompts for which slots must be free before a group enters; 0 means `prefill_rows`. At the end of the queue, as
    many as wait."""
    steps: int = 8
    """Decoding steps between two admissions: the inner loop, whose trip count the compiler knows."""
    shared_prompts: int = 0
    """Prompts whose keys and values are kept, and read, once for all of their samples. A prompt enters where one of
    these places is free. 0 means that each sample has a copy. Part of what decides the bits."""
    at_once: bool = False
    """As many slots as there are sequences, all of which enter before the first step, whatever the other fields say.
    The cache grows with them."""

    def __post_init__(self) -> None:
        require_fields(self, require_at_least_one, "slots", "prefill_rows", "steps")
        require_fields(self, require_not_negative, "prefill_tokens", "admit", "shared_prompts")

    def require_room(self, num_samples: int, num_stages: int = 1) -> None:
        """Checks that these slots of a row shard part over stages, with room for all samples of a prompt in each part.
        Raises ValueError if they, or shared prompts, do not divide, or a prompt has more samples."""
        for name in ("slots", "shared_prompts"):
            value: int = getattr(self, name)
            rule = f"must be a multiple of the {num_stages} stages, each of which works on as many"
            require(value % num_stages == 0, name, rule, value, f"Use {math.ceil(value / num_stages) * num_stages}.")
        least, each = num_samples * num_stages, f" for each of {num_stages} stages" if num_stages > 1 else ""
        require(
            self.slots >= least, "slots",
            f"must be at least num_samples={num_samples}{each}, since the samples of a prompt enter together",
            self.slots, f"Use {least} or more.",
        )  # fmt: skip


ALL_AT_ONCE = Slots(1, at_once=True)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """Everything about a rollout that is no array."""

    sampling: Sampling
    slots: Slots
    config: ModelConfig
    layout: Layout
    together: int = 1
    """Neighboring sequences that count as finished when all of them have, for `Until.left`."""


class Until(NamedTuple):
    """The stopping condition of a row shard, checked after each round: so many rounds, or so few sequences."""

    rounds: Int[Array, ""] | int | None = None
    """It has gone on for so many rounds. None is no limit."""
    left: Int[Array, ""] | int = 0
    """At most so many of its sequences have not finished, of those that wait or are in slots, with those that count
    together with these. Of N sequences, `N - count` stops when `count` have finished."""
    none_waits: Bool[Array, ""] | bool = False
    """And none of them waits."""


def rollout_stages(settings: RolloutSettings, prompt_columns: int) -> list[tuple[int, int | None]]:
    """For each size of the cache, the tokens of a row for which it has room, and the rounds until it grows again. In
    slots it has one size."""
    if not settings.slots.at_once:
        return [(0, None)]
    return list(decoding_stages(prompt_columns, settings.sampling.max_new_tokens))


def decoding_stages(prompt: int, response: int) -> list[tuple[int, int]]:
    """Columns of the cache of all rows at once, and the decoding steps until it grows again.

    The last token that is drawn does not enter the cache. Until then a column stays free, into which stages of a
    pipeline write while they wait.

    >>> decoding_stages(64, 256)
    [(128, 64), (192, 64), (256, 64), (320, 64)]
    """
    size, done, stages = max(_MIN_GROWTH, math.ceil(response / _MAX_STAGES)), 0, []
    while done < response:
        columns = grown_columns(prompt - 1 + min(done + size, response))
        steps = (response if columns >= prompt - 1 + response else columns - prompt) - done
        stages.append((columns, steps))
        done += steps
    return stages


def columns_of_steps(prompt: int, response: int) -> np.ndarray:
    """Columns of the cache that each decoding step of all rows at once reads."""
    return np.concatenate([np.full(steps, columns) for columns, steps in decoding_stages(prompt, response)])


@functools.lru_cache(maxsize=4096)
def mean_columns(prompt: int, response: int) -> float:
    """Columns of the cache that a decoding step reads, on average over the steps of full-length responses.

    >>> round(mean_columns(1024, 1024))  # with five eighths of the response, where half of it is filled
    1664
    """
    return float(columns_of_steps(prompt, response).mean())
