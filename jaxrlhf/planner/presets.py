"""Ways to come to a plan, by name: fixed placements as other systems have them, and the searches.

Placements say where calls run. How they run there is then the fastest way that fits.

References:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, section 8 (heuristic).
    Sheng et al. 2024 (HybridFlow), arXiv:2409.19256, 8.3 (colocate, standalone, split, hybridflow).
"""

from collections.abc import Callable, Mapping, Sequence

from jaxrlhf.planner import search as searches
from jaxrlhf.planner.dominance import with_choices
from jaxrlhf.planner.lean_plans import require_choices
from jaxrlhf.planner.mapping import map_sets
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import CallChoices, Problem
from jaxrlhf.suggest import did_you_mean

Preset = Callable[[Problem], tuple[int, ...]]
"""Problem -> plan: for each call the index of its choice. Raises PlanError where nothing fits."""
_BOUNDS = 500_000
"""Of branch and bound, for the calls of a fixed placement."""
_OF_POLICIES = ("generate", "logprobs")
"""Methods of models that give tokens; others score or value them."""


def heuristic(problem: Problem) -> tuple[int, ...]:
    """Every call on all devices with the same degrees, as for pretraining: tensor parallelism within a node, as few
    stages across nodes as fit, rows split over what is left.

    A call that cannot have one of the degrees has the nearest: the next lower tensor, the next higher pipeline or, if
    there is none, the highest. One that cannot be on all devices is on as many as it can.
    """
    require_choices(problem)
    widest = [_widest(call) for call in problem.calls]
    tensors = [
        max(call.choices[k].strategy.tensor for k in some) for call, some in zip(problem.calls, widest, strict=True)
    ]
    widest = [
        [k for k in some if call.choices[k].strategy.tensor == min(max(tensors), tensor)]
        for call, some, tensor in zip(problem.calls, widest, tensors, strict=True)
    ]
    stages = {call.choices[k].strategy.pipeline for call, some in zip(problem.calls, widest, strict=True) for k in some}
    error = None
    for pipeline in sorted(stages):
        try:
            return _fastest(
                problem, [_nearest_stages(c, s, pipeline) for c, s in zip(problem.calls, widest, strict=True)]
            )
        except PlanError as nothing_fits:
            error = nothing_fits
    assert error is not None
    raise error


def colocate(problem: Problem) -> tuple[int, ...]:
    """Every call on all devices, or as many as it can be on."""
    require_choices(problem)
    return _fastest(problem, [_widest(call) for call in problem.calls])


def standalone(problem: Problem) -> tuple[int, ...]:
    """Every set of weights on devices of its own, as many as `mapping` finds best."""
    return map_sets(problem, [tuple((name,) for name in _sets(problem))]).plan


def split(problem: Problem) -> tuple[int, ...]:
    """Policies on one half of the devices, models that score and value on the other: the actor and its reference, and
    critic and reward.

    Where all are of one kind, those that are trained have one half, and those that never change the other; where these
    are all alike too, all have all devices. Halves are as equal as calls can have them.
    """
    require_choices(problem)
    policies = {call.weights for call in problem.calls if call.name.split(".")[-1].split("#")[0] in _OF_POLICIES}
    trained = {call.weights for call in problem.calls if call.trains}
    for first in (policies, trained):
        if first and first != set(_sets(problem)):
            return _fastest(problem, _halves(problem, first))
    return colocate(problem)


def hybridflow(problem: Problem) -> tuple[int, ...]:
    """What HybridFlow's auto-mapping finds."""
    return map_sets(problem).plan


def search(problem: Problem) -> tuple[int, ...]:
    """The best that some seconds of searching find."""
    return searches.search(problem).plan


def exhaustive(problem: Problem) -> tuple[int, ...]:
    """The best there is, however long it takes to be sure."""
    return searches.exhaustive(problem).plan


PRESETS: Mapping[str, Preset] = {
    "search": search,
    "heuristic": heuristic,
    "colocate": colocate,
    "standalone": standalone,
    "split": split,
    "hybridflow": hybridflow,
    "exhaustive": exhaustive,
}


def find(name: str) -> Preset:
    """The preset of a name.

    Raises:
        PlanError: There is none.
    """
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise PlanError(f"strategy: must be one of {known}. Got {name!r}.{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def _sets(problem: Problem) -> list[str]:
    return list(dict.fromkeys(call.weights for call in problem.calls))


def _fastest(problem: Problem, among: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The fastest plan whose calls have certain choices only."""
    kept = tuple(tuple(some) for some in among)
    found = searches.exhaustive(with_choices(problem, kept), bounds=_BOUNDS).plan
    return tuple(some[k] for some, k in zip(kept, found, strict=True))


def _widest(call: CallChoices) -> list[int]:
    """The choices on the most devices; of several such places, on the first."""
    devices = max((choice.devices for choice in call.choices), key=lambda devices: (len(devices), -devices.start))
    return [k for k, choice in enumerate(call.choices) if choice.devices == devices]


def _nearest_stages(call: CallChoices, among: Sequence[int], pipeline: int) -> list[int]:
    """The choices with so many stages, or the next more; else with the most."""
    there = {call.choices[k].strategy.pipeline for k in among}
    nearest = min((stages for stages in there if stages >= pipeline), default=max(there))
    return [k for k in among if call.choices[k].strategy.pipeline == nearest]


def _halves(problem: Problem, first: set[str]) -> list[list[int]]:
    """The choices of every call on its half: of sets in `first`, on the first one."""

    def on(call: CallChoices, middle: int) -> list[int]:
        half = range(middle) if call.weights in first else range(middle, problem.num_devices)
        return [k for k, choice in enumerate(call.choices) if choice.devices == half]

    middles = [middle for middle in range(1, problem.num_devices) if all(on(call, middle) for call in problem.calls)]
    if not middles:
        names = " | ".join(
            ", ".join(name for name in _sets(problem) if (name in first) == here) for here in (True, False)
        )
        raise PlanError(
            f"split: all calls must have a way to run on their half of the devices ({names}). Got "
            f"{problem.num_devices} devices, of which there are no such halves. Use colocate, or more devices."
        )
    middle = min(middles, key=lambda middle: abs(2 * middle - problem.num_devices))
    return [on(call, middle) for call in problem.calls]
