"""The work of a step, as a planner sees it: its model function calls with their sizes and dependencies.

Made from a call graph, or written out by hand for a system that has no step function yet. Calls of arrays alone
(`compute`) and on the host are left out: they take next to no time on devices, and a call that waits for them waits for
the calls that they need.

Letters: B rows, P prompt columns, R response columns, T = P + R.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrlhf.call_graph import Call, CallGraph, CallKind, Part
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig, reads_merged
from jaxrlhf.programs.ahead_of_time import DescribedCall, describe_call
from jaxrlhf.programs.roles import ModelRole, Role
from jaxrlhf.programs.weight_sets import weight_sets
from jaxrlhf.sharding.row_padding import can_split, num_copies, row_parts
from jaxrlhf.sharding.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """One model function call of a step."""

    name: str
    """`actor.generate`."""
    role: str
    kind: CallKind
    model: ModelConfig
    weights: str
    """The set of weights that it reads, and trains if it is a train call."""
    rows: int
    """Sequences of all devices together; prompts of `generate`."""
    prompt: int
    """P."""
    response: int
    """R; of `generate`, the most tokens that it draws."""
    needs: tuple[str, ...] = ()
    """Calls of the same step that must end before it begins."""
    scored: int = 0
    """Columns that get an output of the head; 0 means the whole response."""
    num_samples: int = 1
    """Sequences drawn for each prompt."""
    lengths: ResponseLengths | None = None
    """The lengths of what it draws. None means that every response has `response` tokens."""
    mini_batches: int = 1
    epochs: int = 1
    lora: LoRAConfig | None = None
    """The adapters that it trains or reads."""
    base: str = ""
    """The set of weights that its adapters adapt. Empty if it has no adapters, or if the system is described by its
    sizes alone and no other call reads that set."""
    base_model: ModelConfig | None = None
    """The model of those weights, which may have another head. None means its own."""
    row_counts: tuple[int, ...] = ()
    """Rows of each array that is split over row shards, which must divide them. Empty means `rows`."""
    output_bytes: int = 0
    """Bytes of the outputs that other calls read."""
    row_wise: bool = True
    """True if its output for a row depends on that row alone. False where it sums a loss."""
    described: DescribedCall | None = None
    """The description of its programs; None if it is known by its sizes alone."""
    part: Part | None = None
    """Of a part of a generation, or of a train call."""
    terms: int = 1
    """Losses that a train call adds."""
    stale: int = 0
    """The steps by which the weights that it reads are older than the current ones."""
    moment_bytes: int = 8
    """Of a train call, bytes of its optimizer's two moments of a weight."""
    left: "tuple[ModelCall, Strategy] | None" = None
    """Of a tail: the share that its sequences left, and how that runs."""

    def require_described(self) -> DescribedCall:
        """The description of its programs. Raises ValueError if it is known by its sizes alone."""
        if self.described is None:
            raise ValueError(f"{self.name}: must have programs. Got a call that is known by its sizes alone.")
        return self.described

    @property
    def trains(self) -> bool:
        return self.kind == "train"

    @property
    def sequences(self) -> int:
        """Sequences that pass through the model: of `generate`, those drawn."""
        return self.rows * self.num_samples

    @property
    def columns(self) -> int:
        """T."""
        return self.prompt + self.response

    @property
    def drawn(self) -> float:
        """Tokens of a response of `generate`, on average."""
        return self.response if self.lengths is None else self.lengths.mean

    @property
    def outputs(self) -> int:
        """Columns of a sequence that get an output of the head."""
        return self.scored or self.response

    @property
    def merges(self) -> bool:
        """True if it adds its adapters into a copy of the weights that they adapt, and reads that."""
        return not self.trains and reads_merged(self.model, self.lora, self.sequences * self.columns)

    @property
    def updates(self) -> int:
        """Updates of the weights in one call."""
        return self.mini_batches * self.epochs if self.trains else 0

    @property
    def divisible(self) -> tuple[int, ...]:
        """Row counts that micro-batches and row shards cut: of a train call, those of a mini-batch."""
        return tuple(n // self.mini_batches for n in self.row_counts or (self.rows,))

    def can_split(self, parts: int) -> bool:
        """True if its rows can be cut into that many equal parts, with copies of some rows where that is allowed."""
        may_copy = self.row_wise and not self.trains and len(self.divisible) == 1
        return all(can_split(rows, parts, may_copy=may_copy) for rows in self.divisible)

    def part_rows(self, strategy: Strategy) -> float:
        """Sequences, or prompts of `generate`, that each part of a call or of an update has: copies among them."""
        parts, most = row_parts(self.kind, strategy), max(self.divisible)
        if self.trains:
            return self.rows / self.mini_batches / parts
        return (most + num_copies(most, parts)) / parts * self.rows / most

    def copied_rows(self, strategy: Strategy) -> int:
        """Rows without weight that are added to its own."""
        return 0 if self.trains else num_copies(max(self.divisible), row_parts(self.kind, strategy))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The calls of a step, in its order."""

    calls: tuple[ModelCall, ...]
    on_host: tuple[str, ...] = ()
    """Calls of Python functions, which take no devices."""

    def __post_init__(self) -> None:
        names = [call.name for call in self.calls]
        for i, call in enumerate(self.calls):
            if names.count(call.name) > 1:
                raise ValueError(f"workload: every call has a name of its own. Got '{call.name}' twice. Rename one.")
            for need in call.needs:
                if need not in names[:i]:
                    raise ValueError(
                        f"workload: {call.name}: `needs` are calls that stand before it. Got '{need}'. Before it: "
                        f"{', '.join(names[:i]) or 'none'}."
                    )

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses that one step works on: of its generations, or of its largest call."""
        begun = [c for c in self.calls if c.kind == "generate" and (c.part is None or c.part.begins)]
        drawn = [round(call.sequences * (call.prompt + call.drawn)) for call in begun]
        return sum(drawn) or max((call.sequences * call.columns for call in self.calls), default=0)

    @property
    def compiled_layers(self) -> int:
        """Layers of all programs of calls; scanned ones count once."""
        return sum(1 if call.model.scan_layers else call.model.num_layers for call in self.calls)

    @property
    def trained(self) -> frozenset[str]:
        """Sets of weights that a step changes."""
        return frozenset(call.weights for call in self.calls if call.trains)

    def call(self, name: str) -> ModelCall:
        return next(call for call in self.calls if call.name == name)

    def readers(self, weights: str) -> tuple[ModelCall, ...]:
        """The calls that read a set of weights and do not train it."""
        return tuple(call for call in self.calls if call.weights == weights and not call.trains)


def step_workload(
    graph: CallGraph,
    roles: Mapping[str, Role],
    lengths: ResponseLengths | None = None,
    strategies: Mapping[str, Strategy] = MappingProxyType({}),
) -> Workload:
    """The work of a traced step of one iteration, each call with the description of its programs.

    Args:
        lengths: None means that the responses that it draws are as long as they may be.
        strategies: Of a graph in parts: part of a generation -> how it runs, on which depends what comes to a tail.
    """
    of_models = {name: role for name, role in roles.items() if isinstance(role, ModelRole)}
    sets = weight_sets(of_models)
    behind: dict[str, tuple[str, ...]] = {}  # call -> the calls of models that it waits for
    calls = []
    for call in graph.calls:
        needs = tuple(dict.fromkeys(name for need in graph.dependencies(call) for name in behind[need]))
        role = of_models.get(call.role or "") if call.kind != "host" else None
        behind[call.name] = needs if role is None else (call.plan_name,)
        if role is not None:
            made = _model_call(call, role, needs)
            if role.lora is not None:
                made = dataclasses.replace(made, base=role.base, base_model=sets[role.base].model)
            made = dataclasses.replace(made, lengths=lengths) if made.kind == "generate" else made
            if made.part is not None and made.part.migrate and strategies:
                share = next(c for c in calls if c.part and c.part.of == made.part.of and c.part.share == 0)
                made = dataclasses.replace(made, left=(share, strategies[share.name]))
            calls.append(made)
    return Workload(tuple(calls), tuple(call.name for call in graph.calls if call.kind == "host"))


def _generation_in_parts(call: Call, part: Part, common: dict[str, Any]) -> ModelCall:
    """A part of a generation, with all sequences of its share, or of the tail, which it keeps until the last part."""
    sampling = call.args[1]
    n, response = 1 if part.migrate else sampling.num_samples, sampling.max_new_tokens
    columns = call.longest_sequence
    rows = part.sequences // n
    return ModelCall(rows=rows, prompt=columns - response, response=response, num_samples=n, part=part, **common)


def _model_call(call: Call, role: ModelRole, needs: tuple[str, ...]) -> ModelCall:
    assert call.role is not None
    common: dict[str, Any] = dict(
        name=call.plan_name, role=call.role, kind=call.kind, model=role.model, needs=needs,
        weights=call.weights or call.role, lora=role.lora, row_wise=call.row_wise, stale=call.stale,
        output_bytes=sum(ref.dtype.itemsize * math.prod(ref.shape) for ref in call.output_refs if ref.has_rows),
    )  # fmt: skip
    if call.kind == "generate" and call.part is not None:
        return _generation_in_parts(call, call.part, common)
    common["described"] = describe_call(call, role)
    if call.kind == "generate":
        prompts, sampling = call.args
        assert isinstance(sampling, Sampling)
        rows, prompt = prompts.tokens.shape
        return ModelCall(
            rows=rows, prompt=prompt, response=sampling.max_new_tokens, num_samples=sampling.num_samples, **common
        )
    sequences = [x for x in call.sequences if hasattr(x, "response")]
    shapes = [(*x.tokens.shape, x.response.shape[1]) for x in sequences]
    columns, response = max((T for _, T, _ in shapes), default=0), max((R for *_, R in shapes), default=0)
    counts = {ref.shape[0] for ref in call.refs if ref.has_rows}
    passes: dict[str, Any] = {}
    if call.kind == "train":
        passes = dict(mini_batches=call.update.mini_batches, epochs=call.update.epochs)
        passes |= dict(part=call.part, terms=len(call.terms))
        if role.optimizer is not None:
            passes |= dict(moment_bytes=role.optimizer.moment_bytes)
    return ModelCall(
        rows=sum(B for B, *_ in shapes), prompt=columns - response, response=response,
        scored=1 if call.method == "scores" else 0, row_counts=tuple(sorted(counts)), **passes, **common,
    )  # fmt: skip
