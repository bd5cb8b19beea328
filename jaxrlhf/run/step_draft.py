"""The step of a run, from its config to its call graph, before it has a plan."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.algorithms.importance_weights import corrected
from jaxrlhf.call_graph import CallGraph, GraphError
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig, StalenessConfig, load_algorithm
from jaxrlhf.configured.function_roles import own_tokens, retokenizer_notes, retokenizers
from jaxrlhf.configured.length_means import LengthMeans
from jaxrlhf.configured.roles import check_roles, check_vocabulary, configured_models, make_role, precision_notes
from jaxrlhf.configured.rows import StepRows, Tables, check_rows, load_tables
from jaxrlhf.configured.sampling import check_end, resolved, samplings_of
from jaxrlhf.configured.tokenizer import tokenizer_notes
from jaxrlhf.importing import failure
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.metrics import check_results
from jaxrlhf.planner.plans.config_keys import RowCountKeys, count_keys
from jaxrlhf.planner.workload import Workload, step_workload
from jaxrlhf.programs.roles import ModelRole, Role
from jaxrlhf.run.recorded_lengths import response_lengths
from jaxrlhf.sharding import mesh
from jaxrlhf.tracing import StaleGeneration, trace

MAX_BATCH_TOKENS = 2**28
"""A bound that no run reaches, which catches mistakes before memory is allocated."""


@dataclasses.dataclass(frozen=True)
class StepDraft:
    """The step of a run, traced, with its parts."""

    config: RunConfig
    algorithm: Algorithm
    settings: Any
    """The settings of the algorithm, with every `Sampling` completed by the tokenizer."""
    tables: Tables
    rows: StepRows
    """Step -> its rows."""
    new_tokens: int
    """The length of the longest response."""
    models: Mapping[str, ModelConfig]
    """Role -> model, for roles that have one."""
    roles: Mapping[str, Role]
    first_state: Any
    graph: CallGraph
    keys: RowCountKeys
    warnings: tuple[str, ...]

    @property
    def owners(self) -> list[str]:
        """Roles with weights of their own."""
        return [name for name in self.models if not self.config.roles[name].shares]

    def workload(self) -> Workload:
        """The calls of the step with their sizes."""
        return step_workload(self.graph, self.roles)

    def workload_to_plan(self) -> Workload:
        """The same with the lengths of responses. Raises ConfigError if the run that recorded them has none."""
        return step_workload(self.graph, self.roles, response_lengths(self.config.plan.lengths, self.settings))


def draft_step(config: RunConfig, *, tables: Tables | None = None, on_cpu: bool | None = None) -> StepDraft:
    """The step that a config describes, traced. Raises ConfigError, GraphError or ValueError if it does not fit its
    data. `tables`: the rows of its data. None means that they are read here. `on_cpu`: the step is to run on CPUs. None
    means the kind of JAX's devices."""
    algorithm = load_algorithm(config.algorithm)
    tables = tables or load_tables(config)
    table = tables.main
    settings = resolved(config.settings, table.tokenizer)
    for sampling in samplings_of((settings, resolved(config.evaluation, table.tokenizer))):
        check_end(sampling, table.tokenizer)
    if config.plan.lengths is not None and not config.plan.lengths.run:
        response_lengths(config.plan.lengths, settings)
    models = configured_models(config, on_cpu=mesh.platform() == "cpu" if on_cpu is None else on_cpu)
    check_roles(config, algorithm.roles, models)
    apart = retokenizers(config, table)
    check_vocabulary(models, table, config.roles, {name: each.tokenizer for name, each in apart.items()})
    means = LengthMeans(len(table.prompts)) if config.plan.longest_first else None
    rows = StepRows(algorithm.data(settings), tables, config.batch_size, config.seed, means)
    measures = config.evaluation is not None and algorithm.evaluation is not None
    warnings = [*config.notes, *precision_notes(config, models), *tokenizer_notes(config), *retokenizer_notes(apart)]
    size = config.batch_size
    if size > table.num_train:
        warnings.append(f"batch_size={size} exceeds the {table.num_train} training rows: a step repeats rows.")
    warnings += check_rows(rows, config, held_out=measures)
    new_tokens = longest_response(settings, rows)
    _check_batches(config, rows, new_tokens)
    roles: dict[str, Role] = {name: make_role(name, config.roles, models, table) for name in config.roles}
    roles |= {name: dataclasses.replace(_model(roles[name]), own_tokens=own_tokens(apart[name])) for name in apart}
    state = on_host(first_state(algorithm, settings))
    graph = trace_step(algorithm.step, roles, state, rows(0), settings, config.staleness)
    _check_staleness(config.staleness, graph)
    check_results(getattr(algorithm.step, "__name__", "step"), graph.results[0])
    counts = count_keys(settings, {each.count for each in rows.named.values()} - {0, config.batch_size})
    keys = RowCountKeys("the step", counts=counts, settings=settings)
    roles = _count_updates(roles, graph, config.steps)
    return StepDraft(
        config, algorithm, settings, tables, rows, new_tokens, models, roles, state, graph, keys, tuple(warnings)
    )


def _model(role: Role) -> ModelRole:
    assert isinstance(role, ModelRole)
    return role


def longest_response(settings: Any, rows: StepRows) -> int:
    """The tokens of the longest response that a step draws or gets."""
    return max(each.max_new_tokens for each in (*samplings_of(settings), *rows.named.values())) or 128


def trace_step(
    step: Any, roles: Mapping[str, Role], state: Any, data: Any, settings: Any, staleness: StalenessConfig | None = None
) -> CallGraph:
    """The graph of a step function over the roles of a run. `staleness`: None means that generation is not stale."""
    stale = None
    if staleness is not None and staleness.steps:
        most = staleness.max_weight
        correct = functools.partial(corrected, max_weight=most) if most is not None else None
        stale = StaleGeneration(staleness.steps, correct)
    return trace(step, {name: role.methods(name) for name, role in roles.items()}, state, data, settings, stale=stale)


def _check_staleness(staleness: StalenessConfig, graph: CallGraph) -> None:
    """Checks that a step generates with weights that it trains, if that is to be stale."""
    trained = {call.weights for call in graph.calls if call.kind == "train"}
    generates = [call.name for call in graph.calls if call.kind == "generate"]
    if staleness.steps and not any(call.stale and call.weights in trained for call in graph.calls):
        raise ConfigError(
            "staleness: needs a step that trains a role with which it generates. Got a step that generates in "
            f"{', '.join(generates) or 'no call'}. Remove it."
        )


def on_host(state: Any) -> Any:
    """A state as NumPy arrays, on no device."""
    return jax.tree.map(lambda x: np.asarray(jnp.asarray(x)), state)


def first_state(algorithm: Algorithm, settings: Any) -> Any:
    """The first state of an algorithm. Raises GraphError if its `init_state` fails."""
    name = getattr(algorithm.step, "__name__", "step")
    try:
        return algorithm.init_state(settings)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(
            f"{name}: its init_state must give the first state. Got {failure(error, algorithm.init_state)}. Its only "
            f"argument is the settings, here {type(settings).__name__}: write `def init_state(config): ...`."
        ) from error


def _check_batches(config: RunConfig, train_rows: StepRows, new_tokens: int) -> None:
    """Checks that the host could hold the batches, before the first one is made."""
    rows = {"batch_size": max(map(train_rows.size, train_rows.named.values()))}
    if config.warm_start is not None:
        rows["warm_start.batch_size"] = config.warm_start.batch_size * config.warm_start.updates_per_step
    if config.evaluation is not None:
        rows["evaluation.num_prompts"] = config.evaluation.num_prompts
        new_tokens = max([new_tokens, *(sampling.max_new_tokens for sampling in samplings_of(config.evaluation))])
    tables = train_rows.tables
    prompt_length = max(table.prompt_length for table in (tables.main, *tables.more.values()))
    for where, num_rows in rows.items():
        if num_rows * (prompt_length + new_tokens) > MAX_BATCH_TOKENS:
            raise ConfigError(
                f"{where}: rows x (prompt + response) must be at most {MAX_BATCH_TOKENS:,} tokens. Got {num_rows} x "
                f"({prompt_length} + {new_tokens}). Lower it, data.max_prompt_tokens or max_new_tokens."
            )


def _count_updates(roles: Mapping[str, Role], graph: CallGraph, steps: int) -> dict[str, Role]:
    """The roles with their number of updates in the whole run."""
    counted = dict(roles)
    for call in graph.calls:
        role = counted.get(call.role or "")
        if call.kind == "train" and isinstance(role, ModelRole):
            updates = steps * call.update.mini_batches * call.update.epochs
            counted[str(call.role)] = dataclasses.replace(role, num_updates=role.num_updates + updates)
    return counted
