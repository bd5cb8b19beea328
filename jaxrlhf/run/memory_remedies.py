"""A run that does not fit into memory: how much it lacks, and which changes of its config would help, by how much.

Changes are tried on the config itself, one after another, from the cheapest on: only those are named that the run takes
and with which it needs less by the forecast. Nothing is compiled for it.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxrlhf.cluster.cluster_text import local_cluster
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.config.reading import apply_overrides, to_tree
from jaxrlhf.config.schema import build_run
from jaxrlhf.observe.events import noted_call
from jaxrlhf.planner.memory_forecast import MemoryForecast, forecast_memory
from jaxrlhf.planner.plans.config_keys import paths_of
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.search.peak_memory import in_gb
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.step_draft import draft_step
from jaxrlhf.sharding import mesh

_WORTH = 0.99
"""A remedy leaves no more than this part of the memory that is needed."""
_MOST_MICRO_BATCHES = 64

Overrides = tuple[str, ...]
"""`--set` of each change that belongs to one remedy."""


class OutOfMemoryError(RuntimeError):
    """A run that needs more memory than there is."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change that makes a run smaller."""

    what: str
    overrides: Overrides
    forecast: MemoryForecast
    """Of the run with it."""

    def lines(self) -> list[str]:
        fits = "" if self.forecast.excess else ", which fits"
        command = " ".join(f"--set {shlex.quote(override)}" for override in self.overrides)
        return [f"  {self.what}: about {in_gb(self.forecast.needed)}{fits}", f"    {command}"]


def forecast_step(assembly: Assembly) -> MemoryForecast:
    """The memory of a run's step on this machine's devices."""
    limits = assembly.config.devices_memory
    graph, plan = in_parts(assembly.train.graph, assembly.train.plan)
    cluster = local_cluster(limits, any_kind=True)
    return forecast_memory(step_workload(graph, assembly.train.roles), cluster, plan, limit=limits.host_bytes)


def check_room(assembly: Assembly, forecast: MemoryForecast) -> list[str]:
    """Raises OutOfMemoryError with remedies if a run does not fit by its forecast. A note in place of the error if its
    config has `may_exceed`, unless what does not fit is known to the byte."""
    limits = assembly.config.devices_memory
    if not forecast.excess:
        return []
    if limits.may_exceed and not forecast.is_certain:
        return [f"{forecast.excess} It goes on, since devices_memory.may_exceed is set."]
    lines = [forecast.excess, *_remedy_lines(assembly, forecast, forecast.crowded)]
    if not forecast.is_certain:
        lines.append("The forecast may be wrong by a quarter. To go on with it: --set devices_memory.may_exceed=true")
    raise OutOfMemoryError("\n".join(lines))


def is_out_of_memory(error: BaseException) -> bool:
    """True if devices or the host had no memory left.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
    (True, False)
    """
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, MemoryError)


def out_of_memory(error: BaseException, assembly: Assembly, kept: str) -> OutOfMemoryError:
    """The error of a run that ran out of memory, with the call during which it did, the forecast and remedies. `kept`
    says what is kept of the run."""
    forecast, where = forecast_step(assembly), noted_call(error)
    names = [call.plan_name for call in assembly.train.graph.calls]
    calls = [name for name in names if f"'{name}'" in where] or forecast.crowded
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    room = "" if forecast.room is None else f", of {in_gb(forecast.room)}"
    lines = [
        f"The memory ran out in {where or 'the run, in none of its calls'}: a run must fit into that of its devices "
        f"and its host. Got {first}",
        f"Its step needs about {in_gb(forecast.needed)} by the forecast{room}; evaluations, checkpoints and other "
        "programs come on top.",
        *_remedy_lines(assembly, forecast, calls),
        kept,
    ]
    return OutOfMemoryError("\n".join(lines))


def _remedy_lines(assembly: Assembly, forecast: MemoryForecast, calls: Sequence[str]) -> list[str]:
    single = [found for try_ in _TRIES if (found := _first_that_helps(assembly, forecast, calls, try_)) is not None]
    lines = ["What would help, each by itself, by the forecast; what costs least stands first:"] if single else []
    lines += [line for remedy in single for line in remedy.lines()]
    if forecast.excess and all(remedy.forecast.excess for remedy in single):
        together = _together(assembly, forecast) if len(single) > 1 else None
        lines += together.lines() if together is not None else []
        if together is None or together.forecast.excess:
            lines.append("None of this is enough. Use devices with more memory, or a smaller model.")
    if assembly.saved is not None:
        lines.append(
            f"The planner finds a leaner plan under a limit: --set 'devices_memory={0.8e-9 * forecast.needed:.3g} GB'"
        )
    return lines


_Try = Callable[[Assembly, Sequence[str]], Iterator[tuple[str, Overrides]]]
"""(run, calls that need much) -> remedies of one kind, the mildest first."""


def _first_that_helps(assembly: Assembly, before: MemoryForecast, calls: Sequence[str], try_: _Try) -> Remedy | None:
    """The mildest remedy of a kind with which the run fits, or the one with which it needs least."""
    best: Remedy | None = None
    for what, overrides in try_(assembly, calls):
        changed = _with(assembly, overrides)
        if changed is None:
            continue
        forecast = forecast_step(changed)
        if forecast.needed > _WORTH * (before if best is None else best.forecast).needed:
            continue
        best = Remedy(what, overrides, forecast)
        if not forecast.excess:
            break
    return best


def _together(assembly: Assembly, forecast: MemoryForecast) -> Remedy | None:
    """Remedies one over another until the run fits."""
    so_far: Overrides = ()
    for try_ in _TRIES:
        found = _first_that_helps(assembly, forecast, forecast.crowded, try_)
        changed = None if found is None else _with(assembly, found.overrides)
        if found is None or changed is None:
            continue
        assembly, forecast, so_far = changed, found.forecast, so_far + found.overrides
        if not forecast.excess:
            break
    return Remedy("together", so_far, forecast) if so_far else None


def _with(assembly: Assembly, overrides: Overrides) -> Assembly | None:
    """The run with a change; None if it does not take it."""
    try:
        tree = apply_overrides(to_tree(assembly.config), overrides)
        config = build_run(tree, where="the config")
        draft = draft_step(config, tables=assembly.tables)
        return assemble(config, mesh.num_devices(), mesh.devices_per_process(), draft=draft, saved=assembly.saved)
    except ValueError:  # of config, graph and plan: a degree that does not divide, say
        return None


def _micro_batches(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    placements = assembly.train.plan.placements
    cut = [call for call in _of_models(assembly, calls) if not placements[call].strategy.slots]
    factor = 2
    while factor <= _MOST_MICRO_BATCHES:
        counts = {call: factor * placements[call].strategy.micro_batches for call in cut}
        changes = [_entry(assembly, call, micro_batches=count) for call, count in counts.items()]
        yield "more micro-batches", sum(changes, ())
        factor *= 2


def _chunked_logits(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    roles = list(dict.fromkeys(call.partition(".")[0] for call in _of_models(assembly, calls)))
    for chunk in (2048, 1024, 512, 256):
        keys = [
            f"roles.{name}.model.logits_chunk_tokens={chunk}"
            for name in roles
            if assembly.train.roles[name].model.logits_chunk_tokens > chunk  # pyright: ignore[reportAttributeAccessIssue]
        ]
        if keys:
            yield "logits in smaller chunks", tuple(keys)


def _remat(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    trained = [call for call in _of_models(assembly, calls) if call.partition("#")[0].endswith(".train")]
    scanned: Overrides = ()
    if mesh.platform() == "cpu":  # whose compiler undoes it in layers that are not scanned
        models = {name: role.model for name, role in assembly.train.roles.items() if isinstance(role, ModelRole)}
        scanned = tuple(f"roles.{name}.model.scan_layers=true" for name, x in models.items() if not x.scan_layers)
    for remat in ("dots", "layer"):
        changes = [_entry(assembly, call, remat=remat) for call in trained]
        yield "activations computed again in the backward pass", sum(changes, ()) + scanned


def _offload(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    config = assembly.config
    owners = [n for n, r in assembly.train.roles.items() if isinstance(r, ModelRole) and not config.roles[n].shares]
    frozen = [name for name in owners if config.roles[name].optimizer is None]
    for names in (frozen, owners):
        if wanted := [name for name in names if name not in config.plan.offload]:
            every = ", ".join((*config.plan.offload, *wanted))
            yield "weights that rest in host memory", (f"plan.offload=[{every}]",)


def _fsdp(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    of = {call: placement.strategy for call, placement in assembly.train.plan.placements.items()}
    every = [call for call in _of_models(assembly, list(of)) if of[call].data > 1]
    changes = [_entry(assembly, call, data=1, fsdp=of[call].num_row_shards) for call in every]
    yield "weights split over devices", sum(changes, ())


def _optimizer_state(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    trained = [name for name, role in assembly.config.roles.items() if role.optimizer is not None]
    yield "optimizer state in bfloat16", tuple(f"roles.{name}.optimizer.state_dtype=bfloat16" for name in trained)


def _lora(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    roles = assembly.config.roles
    whole = [n for n, role in roles.items() if role.optimizer is not None and role.lora is None and not role.shares]
    if whole:
        yield "adapters in place of all weights", tuple(f"roles.{name}.lora={{rank: 16}}" for name in whole)


def _shorter(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    settings = assembly.config.settings
    paths = paths_of(settings, lambda part: type(getattr(part, "max_new_tokens", None)) is int)
    for path in paths:
        part: Any = settings
        for name in path.split(".")[1:]:
            part = getattr(part, name)
        if part.max_new_tokens > 1:
            yield "shorter responses", (f"{path}.max_new_tokens={part.max_new_tokens // 2}",)


def _smaller_batch(assembly: Assembly, calls: Sequence[str]) -> Iterator[tuple[str, Overrides]]:
    size = assembly.config.batch_size
    while size > 1 and size % 2 == 0:
        size //= 2
        yield "a smaller batch", (f"batch_size={size}",)


_TRIES: tuple[_Try, ...] = (
    _micro_batches, _chunked_logits, _remat, _offload, _fsdp, _optimizer_state, _lora, _shorter, _smaller_batch
)  # fmt: skip
"""By what they cost: time at first, then precision, then what is learned."""


def _of_models(assembly: Assembly, calls: Sequence[str]) -> list[str]:
    """Those of some calls whose role is a model, with names as in a plan."""
    names = {call.plan_name for call in assembly.train.graph.calls if call.kind in ("generate", "infer", "train")}
    single = [name for call in calls for name in call.split(" + ")]  # of fused ones
    return [name for name in dict.fromkeys(single) if name in names]


def _entry(assembly: Assembly, call: str, **changes: Any) -> Overrides:
    """Sets degrees of a call's placement, in its entry or in a new one with those that it has."""
    config, own = assembly.config.plan, call.partition("#")[0]
    entries = config.calls
    name = next((key for key in (call, own) if key in entries), None)
    if name is not None:
        return tuple(f"plan.calls.{name}.{key}={value}" for key, value in changes.items())
    default = config.default or Placement(strategy=assembly.train.plan.placements[call].strategy)
    unset = to_tree(Placement())
    written = {key: value for key, value in (to_tree(default) | changes).items() if value != unset[key]}
    return (f"plan.calls.{own}={_flow(written)}",)


def _flow(mapping: dict[str, Any]) -> str:
    """A mapping as YAML on one line.

    >>> _flow({"data": 8, "remat": "layer", "balance": True})
    '{data: 8, remat: layer, balance: true}'
    """
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in mapping.items()}
    return "{" + ", ".join(f"{key}: {value}" for key, value in shown.items()) + "}"
