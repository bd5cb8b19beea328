"""Forecasts of runs, on clusters that need not be there."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any, Unpack

from jaxrlhf.api.configs import run_config
from jaxrlhf.api.displays import PlanDisplay, as_text
from jaxrlhf.api.keys import Config, RunKeys, with_keys
from jaxrlhf.brief import brief
from jaxrlhf.cluster.cluster_text import LOCAL, read_cluster
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.observe.console import Console
from jaxrlhf.pages.forecast_html import forecast_html
from jaxrlhf.plan import PlannedStep, plan_step
from jaxrlhf.planner.compiled.compiler import CompileError
from jaxrlhf.planner.cost_sources import CostSource
from jaxrlhf.planner.placement.advisor import Advice, advise
from jaxrlhf.planner.plans.saved_plan import write_plan
from jaxrlhf.planner.report import call_rows, memory_rows, plan_json, runner_up_lines, summary_lines
from jaxrlhf.planner.search.methods import find_method
from jaxrlhf.require import errors_as
from jaxrlhf.run.checked_run import InputError
from jaxrlhf.run.find_plan import left_out
from jaxrlhf.sharding import mesh


class Forecast:
    """A plan of a run's step and its forecast: seconds, memory, and the plan itself.

    In a notebook it shows an iteration as a timeline, the seconds of each call and how full each memory is.

    >>> forecast = rl.forecast("grpo_arithmetic", cluster="1x2:a100-80g", method="colocate", quiet=True)
    >>> forecast.seconds > 0, forecast.save(folder / "plan.json").name, str(forecast.plan["actor.train"])
    (True, 'plan.json', 'data 2 on 0-1')
    """

    def __init__(self, step: PlannedStep) -> None:
        self._step = step

    @property
    def seconds(self) -> float:
        """Seconds of a step, with whole calls."""
        return self._step.planned.seconds

    @property
    def seconds_in_parts(self) -> float | None:
        """Seconds of a step with calls in parts, where these are faster; None otherwise, or if that is not known."""
        parts = self._step.in_parts
        return parts.seconds if parts is not None and parts.plan is not None else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses in a second."""
        return self._step.planned.tokens_per_second

    @property
    def gain(self) -> float | None:
        """The speed-up over the heuristic plan, every call on all devices with the same degrees. None if that does not
        fit."""
        return self._step.planned.gain

    @property
    def method(self) -> str:
        """How the plan was found."""
        return self._step.planned.method

    @property
    def cluster(self) -> str:
        """The cluster, in words."""
        return str(self._step.planned.cluster)

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self._step.draft.config

    @property
    def plan(self) -> PlanDisplay:
        """The plan, with whole calls: call -> its placement. In a notebook, a picture of the devices and a table."""
        return PlanDisplay(self._step.plan, self._step.draft.graph, self._step.draft.roles)

    @property
    def call_seconds(self) -> dict[str, float]:
        """Call of a model -> its seconds; of two that run as one pipeline, of both."""
        return {name: self._step.planned.call_seconds(name) for name in self._step.planned.choices}

    @property
    def call_bytes(self) -> dict[str, int]:
        """Call of a model -> bytes in the fullest memory of its devices while it runs."""
        return {name: self._step.planned.call_memory(name) for name in self._step.planned.choices}

    @property
    def calls(self) -> list[dict[str, Any]]:
        """A row for each call of a model: devices, strategy, seconds, memory."""
        return call_rows(self._step.planned)

    @property
    def memory(self) -> list[dict[str, Any]]:
        """A row for each device, or for neighbors that are equally full: what its memory holds when it is fullest."""
        return memory_rows(self._step.planned)

    @property
    def notes(self) -> list[str]:
        """Assumptions of the forecast, and remarks on it."""
        planned, draft = self._step.planned, self._step.draft
        return [*planned.assumed, *planned.notes, *left_out(draft), *draft.warnings]

    @property
    def search(self) -> list[str]:
        """The search's result in words: the decisive figures, and the plans that lost."""
        planned = self._step.planned
        return [planned.summary(), *summary_lines(planned), *runner_up_lines(planned)]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, in seconds and bytes, as `python -m jaxrlhf.plan --json` prints it."""
        in_parts = {} if self._step.in_parts is None else {"in_parts": self._step.in_parts.to_json()}
        return plan_json(self._step.planned, self._step.plan) | in_parts

    def save(self, path: str | os.PathLike[str], *, whole: bool = False) -> Path:
        """Writes the plan to a file, for `plan=path` of a run.

        Args:
            path: A file whose name ends in `.json`.
            whole: With whole calls, also where calls in parts are faster.

        Raises:
            InputError: The name does not end in `.json`.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise InputError(f"save: a plan is a file whose name ends in .json. Got {brief(str(path))}.")
        write_plan(path, self._step.saved(whole=whole))
        return path

    @functools.cached_property
    def _advice(self) -> Advice:
        step = self._step
        return advise(step.planned, step.draft.graph, step.draft.roles, step.in_parts, lambda line: None)

    def advice(self) -> list[str]:
        """Changes that would make a step faster, each of them simulated. Takes about as long as the search."""
        return list(self._advice.lines)

    def __repr__(self) -> str:
        planned = self._step.planned
        return "\n".join([planned.summary(), as_text("Calls", self.calls), as_text("Memory", self.memory)])

    def _repr_html_(self) -> str:
        return forecast_html(self._step.planned)


@with_keys
def forecast(
    config: Config | None = None,
    *,
    cluster: str | os.PathLike[str] = LOCAL,
    method: str | None = None,
    costs: CostSource | None = None,
    calibration: str | os.PathLike[str] | None = None,
    search_seconds: float | None = None,
    search_seed: int | None = None,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
    lengths: str | tuple[float, int] | None = None,
    quiet: bool = False,
    **keys: Unpack[RunKeys],
) -> Forecast:
    """Plans a run and forecasts its step, like `python -m jaxrlhf.plan`: seconds, memory, the plan. Nothing is run.

    Args:
        config: As of `Run`.
        keys: As of `Run`.
        cluster: `16x8:a100-80g`, `2x8:h100+4x8:a100-80g`, `cpu:8`, a .yaml file; or `local`, the devices that are here.
        method: `search`, `hybridflow`, `heuristic`, `colocate`, ...; otherwise the config's `plan.placement`, or a
            search.
        costs: `analytic`, `compiled` or `measured`; otherwise measured, if this machine was, or analytic.
        calibration: A file that `python -m jaxrlhf.calibrate --out` wrote, for measured costs.
        search_seconds: The longest that the search may take.
        search_seed: The seed of the search; otherwise that of the config.
        prompt_tokens: Plan for prompts of so many tokens. The config's data is then not read.
        response_tokens: Plan for responses of so many tokens.
        lengths: Mean and 99th percentile of the tokens of a response, or the folder of a run that recorded them;
            otherwise `plan.lengths` of the config, or each response is as long as it may be.
        quiet: Show no progress.

    Raises:
        InputError: Config, cluster and sizes do not fit together, or no plan fits.

    Example:
        >>> plan = rl.forecast("ppo_arithmetic", cluster="1x4:a100-80g", method="colocate", quiet=True)
        >>> sorted(plan.call_seconds)[:2], plan.seconds > 0
        (['actor.generate', 'actor.train'], True)
    """
    with errors_as(InputError), errors_as(InputError, caught=CompileError):
        if method is not None:
            find_method(method)
        if calibration is not None and costs not in (None, "measured"):
            raise InputError(f"calibration: goes with costs='measured'. Got costs={costs!r}. Leave one out.")
        made = run_config(config, keys)
        mesh.skip_cuda_check_without_gpu()
        is_local = os.fspath(cluster) == LOCAL
        if made.num_virtual_devices is not None and is_local:
            mesh.use_virtual_cpu_devices(made.num_virtual_devices)
        with contextlib.nullcontext() if is_local else mesh.devices_left_open(), Console(quiet=quiet).status() as say:
            where = read_cluster(os.fspath(cluster), made.devices_memory)
            return Forecast(
                plan_step(
                    made, where, method=method, seconds=search_seconds, seed=search_seed, costs=costs,
                    calibration=None if calibration is None else Path(calibration), prompt_tokens=prompt_tokens,
                    response_tokens=response_tokens, say=say,
                    lengths=",".join(map(str, lengths)) if isinstance(lengths, tuple) else lengths,
                )
            )  # fmt: skip
