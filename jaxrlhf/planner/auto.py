"""Plans for experiments that are written down as a list of calls, without code that runs them.

    @auto(nodes=16, gpu="a100-80g", batch_size=512, prompt_tokens=1024, response_tokens=1024)
    @dataclasses.dataclass
    class Experiment:
        mini_batches: int = 8

        @property
        def calls(self) -> list[FunctionCall]:
            return [
                FunctionCall("actor", "generate", model="70b", inputs=["prompts"], outputs=["sequences", "logprobs"]),
                FunctionCall("reward", "infer", model="7b", head="scalar", inputs=["sequences"], outputs=["scores"]),
                FunctionCall("reference", "infer", model="70b", inputs=["sequences"], outputs=["reference"]),
                FunctionCall("critic", "infer", model="7b", head="scalar", inputs=["sequences"], outputs=["values"]),
                FunctionCall("actor", "train", inputs=["sequences", "logprobs", "scores", "reference", "values"],
                             mini_batches=self.mini_batches),
                FunctionCall("critic", "train", inputs=["sequences", "scores", "reference", "values"],
                             mini_batches=self.mini_batches),
            ]

    planned = Experiment().plan()
    planned.seconds, planned.placements()

What needs what follows from the names of inputs and outputs, and from weights: a call of a role that is trained reads
what the iteration before has trained.

Reference:
    Mei et al. 2024, arXiv:2406.14088, appendix B and Figure 18 (ReaL).
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from jaxrlhf.models.config import PRESETS, Head, ModelConfig
from jaxrlhf.planner.cluster_text import read_cluster
from jaxrlhf.planner.planning import Planned, plan_workload
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.suggest import did_you_mean

T = TypeVar("T", bound=type[Any])
FunctionKind = Literal["generate", "infer", "train"]
BYTES_OF_A_NUMBER = 4


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A model function call of an experiment."""

    role: str
    """Calls of one role have one model. Where one of them trains it, the others read what was trained."""
    kind: FunctionKind
    model: str | ModelConfig | None = None
    """A preset or a model of one's own; once for each role."""
    head: Head | None = None
    """None: that of the model."""
    inputs: Sequence[str] = ()
    """Names of what it takes: outputs of other calls, or columns of the data."""
    outputs: Sequence[str] = ()
    """Names of what it gives: a number for each token."""
    method: str = ""
    """After the role in the call's name. Empty: its kind."""
    num_samples: int = 1
    """Of a call that generates: sequences drawn for each prompt."""
    mini_batches: int = 1
    """Of a train call: updates."""

    @property
    def name(self) -> str:
        """As a plan knows it: 'actor.generate'."""
        return f"{self.role}.{self.method or self.kind}"


def auto(
    *,
    batch_size: int,
    prompt_tokens: int,
    response_tokens: int,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    gpu: str = "",
    cluster: str = "",
    data: Sequence[str] = ("prompts",),
    **options: Any,
) -> Callable[[T], T]:
    """Gives a class with a property `calls` a property `workload` and a method `plan()`.

    Args:
        batch_size: Prompts in a step.
        nodes, devices_per_node, gpu: The devices, of a known kind: otherwise one node of 8.
        cluster: The same as a text, as `cluster_text` reads it, in their place.
        data: Names of inputs that come with the data.
        options: For `planning.plan_workload`; `plan()` may be given others.

    Raises:
        ValueError: The class has no `calls`, or one of the two names already; a number is not positive; or an option
            is not known.
    """
    sizes = {"batch_size": batch_size, "prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    for name, number in sizes.items():
        if number < 1:
            raise ValueError(f"auto: {name}: must be at least 1. Got {number}.")
    if bool(gpu) == bool(cluster):
        raise ValueError(
            f"auto: exactly one of gpu and cluster must be given. Got gpu={gpu!r} and cluster={cluster!r}. Write "
            "nodes=8, gpu='a100-80g', or cluster='2x8:h100+4x8:a100-80g'."
        )
    if cluster and (nodes, devices_per_node) != (None, None):
        raise ValueError(
            f"auto: nodes and devices_per_node go with gpu. Got them beside cluster={cluster!r}. Remove them."
        )
    known = [
        name for name, each in inspect.signature(plan_workload).parameters.items() if each.kind == each.KEYWORD_ONLY
    ]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"auto: unknown option {unknown[0]!r}. Known: {', '.join(known)}.{did_you_mean(unknown[0], known)}"
        )
    counts = 1 if nodes is None else nodes, 8 if devices_per_node is None else devices_per_node
    text = cluster or f"{counts[0]}x{counts[1]}:{gpu}"

    def workload(experiment: Any) -> Workload:
        """The calls of the experiment as a planner sees them."""
        return workload_of_calls(
            experiment.calls, batch_size=batch_size, prompt=prompt_tokens, response=response_tokens, data=data
        )

    def plan(experiment: Any, **others: Any) -> Planned:
        """Looks for the plan of the experiment. Arguments and errors are those of `planning.plan_workload`."""
        return plan_workload(workload(experiment), read_cluster(text), **{**options, **others})

    def decorate(cls: T) -> T:
        if not hasattr(cls, "calls"):
            raise ValueError(
                f"auto: {cls.__name__} must have a property `calls`, a list of FunctionCall. Got none. Write "
                "`@property def calls(self): ...`."
            )
        for name, made in {"workload": property(workload), "plan": plan}.items():
            if hasattr(cls, name):
                raise ValueError(f"auto: gives a class a `{name}`. Got {cls.__name__} with one of its own. Rename it.")
            setattr(cls, name, made)
        return cls

    return decorate


def workload_of_calls(
    calls: Sequence[FunctionCall], *, batch_size: int, prompt: int, response: int, data: Sequence[str] = ("prompts",)
) -> Workload:
    """The work of a step that is a list of calls, in any order.

    Args:
        prompt, response: Columns.

    Raises:
        ValueError: Calls wait for what nobody gives, or for each other; or a role has no model or several.
    """
    if not calls:
        raise ValueError("calls: must be at least one FunctionCall. Got none.")
    models, made_by = _models(calls), _makers(calls, data)
    needs = {call.name: _needs(call, calls, made_by) for call in calls}
    rows = dict.fromkeys(data, batch_size)
    found = []
    for call in _in_order(calls, needs):
        taken = max((rows[name] for name in call.inputs), default=batch_size)
        sequences = taken * call.num_samples
        rows |= dict.fromkeys(call.outputs, sequences)
        if call.mini_batches < 1 or taken % call.mini_batches:
            raise ValueError(
                f"{call.name}: mini_batches must divide its {taken} rows. Got {call.mini_batches}. Use another number."
            )
        described = ModelCall(
            call.name, call.role, call.kind, models[call.role], call.role, taken, prompt, response, needs[call.name],
            row_wise=False,  # nobody says that the code that runs it fills up rows that do not divide
        )  # fmt: skip
        sizes = dict(num_samples=call.num_samples, mini_batches=call.mini_batches)
        if call.method == "scores":  # of the last token alone
            sizes["scored"] = 1
        output_bytes = len(call.outputs) * sequences * (prompt + response) * BYTES_OF_A_NUMBER
        found.append(dataclasses.replace(described, output_bytes=output_bytes, **sizes))
    return Workload(tuple(found))


def _models(calls: Sequence[FunctionCall]) -> dict[str, ModelConfig]:
    """Role -> its model."""
    models: dict[str, ModelConfig] = {}
    for call in calls:
        if call.kind not in get_args(FunctionKind):
            raise ValueError(f"{call.name}: must generate, infer or train. Got {call.kind!r}.")
        if isinstance(call.model, str) and call.model not in PRESETS:
            raise ValueError(
                f"{call.name}: model must be a ModelConfig or one of {', '.join(PRESETS)}. Got {call.model!r}."
                f"{did_you_mean(call.model, PRESETS)}"
            )
        if call.model is None:
            continue
        model = ModelConfig(**PRESETS[call.model]) if isinstance(call.model, str) else call.model
        model = model if call.head is None else dataclasses.replace(model, head=call.head)
        if models.setdefault(call.role, model) != model:
            raise ValueError(
                f"{call.name}: calls of one role have one model. Got {model} here, {models[call.role]} before. Say it "
                "once."
            )
    if without := [call for call in calls if call.role not in models]:
        raise ValueError(
            f"{without[0].name}: one of the calls of a role must have a model. Got none. Write model='7b'."
        )
    return models


def _makers(calls: Sequence[FunctionCall], data: Sequence[str]) -> dict[str, FunctionCall | None]:
    """Name -> the call that gives it; None for what comes with the data."""
    made_by: dict[str, FunctionCall | None] = dict.fromkeys(data)
    for call in calls:
        for name in call.outputs:
            if name in made_by:
                other = made_by[name]
                raise ValueError(
                    f"{call.name}: outputs must have names of their own. Got {name!r}, which "
                    f"{'comes with the data' if other is None else f'is an output of {other.name}'}. Rename it."
                )
            made_by[name] = call
    for call in calls:
        for name in call.inputs:
            if name not in made_by:
                raise ValueError(
                    f"{call.name}: inputs must be outputs of other calls, or come with the data. Got {name!r}. Known: "
                    f"{', '.join(made_by)}.{did_you_mean(name, made_by)}"
                )
    return made_by


def _needs(
    call: FunctionCall, calls: Sequence[FunctionCall], made_by: Mapping[str, FunctionCall | None]
) -> tuple[str, ...]:
    """The calls that one waits for: whose outputs it takes; and those that read, or train, the weights before it trains
    them: all that do not take what it gives, and train calls that stand before it."""
    makers = [maker.name for name in call.inputs if (maker := made_by[name]) is not None]
    if call.kind != "train":
        return tuple(dict.fromkeys(makers))
    after = _taking(call, calls)
    same = [each for each in calls if each.role == call.role and each is not call and each.name not in after]
    before = [each.name for each in same if each.kind != "train" or calls.index(each) < calls.index(call)]
    return tuple(dict.fromkeys(makers + before))


def _taking(call: FunctionCall, calls: Sequence[FunctionCall]) -> set[str]:
    """The calls that take what a call gives, by way of others too."""
    names, reached = set(call.outputs), set[str]()
    while more := [c for c in calls if c.name not in reached and not names.isdisjoint(c.inputs)]:
        reached |= {c.name for c in more}
        names |= {name for c in more for name in c.outputs}
    return reached


def _in_order(calls: Sequence[FunctionCall], needs: Mapping[str, tuple[str, ...]]) -> list[FunctionCall]:
    """The calls, each after all that it waits for, else as they stand."""
    done: list[FunctionCall] = []
    left = list(calls)
    while left:
        names = {call.name for call in done}
        ready = next((call for call in left if names.issuperset(needs[call.name])), None)
        if ready is None:
            raise ValueError(
                f"calls: must not wait for each other in a circle. Got {', '.join(call.name for call in left)}."
            )
        left.remove(ready)
        done.append(ready)
    return done
