"""The fastest plan of a run, for a cluster that need not be there.

jaxrlhf plan --config NAME_OR_PATH [--set a.b=c ...] [--cluster 16x8:a100-80g] [--out plan.json]

Nothing is run and no accelerator is needed. `plan: plan.json` in a config takes what `--out` wrote.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrlhf.cluster.cluster_text import LOCAL, read_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.excerpts import with_excerpt
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.configured.size_overrides import with_lengths, with_response_tokens, with_synthetic_prompts
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.plan_pictures import draw_plan, draw_search
from jaxrlhf.observe.timeline_picture import check_matplotlib
from jaxrlhf.observe.timeline_view import PictureError
from jaxrlhf.pages.plan_page import measured_seconds, write_plan_page
from jaxrlhf.planner.compiled.compiler import CompileError
from jaxrlhf.planner.cost_sources import SOURCES, CostSource
from jaxrlhf.planner.fusion.parts_forecast import PlanInParts
from jaxrlhf.planner.make_plan import SEARCH, Planned
from jaxrlhf.planner.placement.advisor import Advice, advise
from jaxrlhf.planner.placement.guideline import guideline
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.plan_table import parts_in_words
from jaxrlhf.planner.plans.saved_plan import SavedPlan, write_plan
from jaxrlhf.planner.report import call_rows, memory_rows, plan_json, runner_up_lines, summary_lines
from jaxrlhf.planner.search.methods import METHODS, find_method
from jaxrlhf.run.find_plan import better_in_parts, left_out, plan_draft
from jaxrlhf.run.step_draft import StepDraft, draft_step
from jaxrlhf.sharding import mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 after an error that the user can mend."""
    options = parser().parse_args(arguments)
    console = Console(quiet=options.json)
    try:
        if options.strategy is not None:
            find_method(options.strategy)
        _check_out(options.out)
        if options.calibration and options.costs not in (None, "measured"):
            raise ConfigError(f"--calibration: goes with --costs measured. Got {options.costs}. Leave one out.")
        measured = _check_page(options)
        pictures = _pictures_folder(options)
        sizes = [] if options.batch_size is None else [f"batch_size={options.batch_size}"]
        config = load_run(options.config, [*options.set, *sizes])
        cluster = _cluster(options.cluster, config)
        with console.status() as say:
            step = plan_step(
                config, cluster, method=options.strategy, seconds=options.seconds, seed=options.seed,
                costs=options.costs, calibration=options.calibration, prompt_tokens=options.prompt_tokens,
                response_tokens=options.response_tokens, lengths=options.lengths, say=say,
            )  # fmt: skip
        draft, planned, plan, fused = step.draft, step.planned, step.plan, step.in_parts
        advice = None
        if options.advise:
            with console.status() as say:
                advice = advise(planned, draft.graph, draft.roles, fused, say)
        written = _write(step, whole=options.whole, out=options.out, pictures=pictures)
        if options.html is not None:
            write_plan_page(planned, options.html, measured=measured)
            written["page"] = options.html
    except (ValueError, OSError, CompileError) as error:
        console.error(with_excerpt(str(error), options.config, options.set))
        return 1
    if options.json:
        of_tails = {} if fused is None else {"in_parts": fused.to_json()}
        advised = {} if advice is None else {"advice": advice.to_json()}
        print(json.dumps(plan_json(planned, plan) | of_tails | advised, indent=2, allow_nan=False))
    else:
        _show(planned, draft, fused, written, console)
        _show_advice(planned, advice, console)
    return 0


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The step of a run with its plan and forecast."""

    draft: StepDraft
    planned: Planned
    plan: Plan
    """The plan with whole calls."""
    in_parts: PlanInParts | None
    """What calls in parts would bring; None if that is not known."""

    def saved(self, *, whole: bool = False) -> SavedPlan:
        """The plan as it is written to disk: the faster one of both, or the one with whole calls."""
        saved = self.planned.saved(self.plan)
        return saved if whole or self.in_parts is None else self.in_parts.adopted_by(saved)


def plan_step(
    config: RunConfig, cluster: Cluster, *, method: str | None = None, seconds: float | None = None,
    seed: int | None = None, costs: CostSource | None = None, calibration: Path | None = None,
    prompt_tokens: int | None = None, response_tokens: int | None = None, lengths: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> PlannedStep:  # fmt: skip
    """Plans the step of a run on a cluster, in the precision that it would have there. Arguments are the options of the
    command line, and those of `plan_draft`. Raises PlanError, ConfigError, ValueError or CompileError."""
    if response_tokens is not None:
        config = with_response_tokens(config, response_tokens)
    if lengths is not None:
        config = with_lengths(config, lengths)
    tables = None
    if prompt_tokens is not None:
        config, tables = with_synthetic_prompts(config, prompt_tokens)
    draft = draft_step(config, tables=tables, on_cpu=all(group.kind.target is None for group in cluster.groups))
    planned = plan_draft(
        draft, cluster, method=method, seconds=seconds, seed=seed, costs="measured" if calibration else costs,
        calibration=calibration, say=say,
    )  # fmt: skip
    plan = planned.plan_for(draft.graph)
    return PlannedStep(draft, planned, plan, better_in_parts(planned, draft, plan))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxrlhf plan",
        description="Find the fastest plan of a run, for a cluster that need not be there.",
    )
    parser.add_argument("--config", metavar="NAME_OR_PATH", required=True, help="as of jaxrlhf.train")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of it")
    parser.add_argument(
        "--cluster", metavar="CLUSTER", default=LOCAL,
        help="16x8:a100-80g, 2x8:h100+4x8:a100-80g, cpu:8, a .yaml file; otherwise the devices that are here",
    )  # fmt: skip
    parser.add_argument(
        "--strategy", metavar="NAME",
        help=f"one of {', '.join(METHODS)}; otherwise plan.placement of the config, or {SEARCH}",
    )  # fmt: skip
    parser.add_argument("--costs", choices=SOURCES, help="otherwise measured, if this machine was, or analytic")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="what jaxrlhf.calibrate --out wrote; means --costs measured"
    )
    parser.add_argument("--seconds", type=float, help="the most that the search may take")
    parser.add_argument("--seed", type=int, help="of the search; otherwise that of the config")
    parser.add_argument("--batch-size", type=int, metavar="N", help="the same as --set batch_size=N")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="plan for prompts of N tokens; the config's data is not read"
    )
    parser.add_argument("--response-tokens", type=int, metavar="N", help="plan for responses of N tokens")
    parser.add_argument(
        "--lengths", metavar="MEAN,P99|RUN",
        help="mean and 99th percentile of the tokens of a response, or the folder of a run that recorded them; "
        "otherwise plan.lengths of the config, or each response is as long as it may be",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="PLAN.JSON", help="write the plan, for `plan: PLAN.JSON` in a config"
    )
    parser.add_argument(
        "--whole", action="store_true",
        help="write the plan with whole calls, also where calls in parts are faster; see docs/planning.md",
    )  # fmt: skip
    parser.add_argument(
        "--advise", action="store_true",
        help="simulate what a guideline advises for these models and devices, and say what would change the time",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="PLAN.HTML", help="write the plan as a page for a browser")
    parser.add_argument(
        "--measured", type=Path, metavar="RUN", help="the folder of a run: --html shows its seconds of calls too"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="otherwise beside the plan, if it is written")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    return parser


def _cluster(text: str, config: RunConfig) -> Cluster:
    """The cluster to plan for. Accelerators of this machine are started only for `local`."""
    mesh.skip_cuda_check_without_gpu()
    if text != LOCAL:
        mesh.use_processor_alone()
    elif config.num_virtual_devices is not None:
        mesh.use_virtual_cpu_devices(config.num_virtual_devices)
    return read_cluster(text, config.devices_memory)


def _check_out(path: Path | None) -> None:
    """Raises ConfigError, before planning, if a plan cannot be written to a path and named in a config."""
    if path is not None and (path.suffix != ".json" or path.is_dir()):
        got = "a folder" if path.is_dir() else repr(str(path))
        raise ConfigError(f"--out: must be a file whose name ends in .json. Got {got}. Write --out plan.json, say.")


def _check_page(options: argparse.Namespace) -> dict[str, float]:
    """Measured seconds of calls for the page. Raises ConfigError or MeasuredError, before planning, if a page cannot be
    written, or shows no measurements."""
    if options.html is not None and (options.html.is_dir() or options.html.suffix not in (".html", ".htm")):
        raise ConfigError(f"--html: must be a file whose name ends in .html. Got {str(options.html)!r}.")
    if options.measured is None:
        return {}
    if options.html is None:
        raise ConfigError("--measured: goes with --html. Got no page. Add --html plan.html.")
    return measured_seconds(options.measured)


def _pictures_folder(options: argparse.Namespace) -> Path | None:
    """The folder of pictures: that of the command line, else that of the plan if they can be drawn, else None. It is
    made, so that errors come before planning."""
    if options.pictures is not None:
        check_matplotlib()
    for folder in (options.pictures, options.out and options.out.parent):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    if options.pictures is not None or options.out is None:
        return options.pictures
    with contextlib.suppress(PictureError):
        check_matplotlib()
        return options.out.parent
    return None


def _write(step: PlannedStep, *, whole: bool, out: Path | None, pictures: Path | None) -> dict[str, Path]:
    """Writes the plan, and its pictures if they are asked for. Returns their paths."""
    planned, written = step.planned, dict[str, Path]()
    if out is not None:
        write_plan(out, step.saved(whole=whole))
        written["plan"] = out
    if pictures is not None:
        stem = out.stem if out is not None else "plan"
        written["timeline"] = pictures / f"{stem}_timeline.png"
        draw_plan(planned, written["timeline"])
        if planned.result.history:
            written["search"] = pictures / f"{stem}_search.png"
            draw_search(planned, written["search"])
    return written


def _in_parts(plan: Plan) -> list[dict[str, str]]:
    """Rows of a table: the calls that are not whole."""
    return [
        {"call": name, "devices": str(placement), "in parts": parts_in_words(placement, on_host=False)}
        for name, placement in plan.placements.items()
        if not placement.is_whole
    ]


def _show(
    planned: Planned, draft: StepDraft, fused: PlanInParts | None, written: dict[str, Path], console: Console
) -> None:
    console.line(planned.summary())
    console.table("Plan", call_rows(planned))
    console.table("Memory", memory_rows(planned))
    console.header("Forecast")
    for line in summary_lines(planned):
        console.line(line)
    if fused is not None:
        console.table("Calls in parts", fused.rows)
        console.line(fused.summary())
        if fused.plan is not None:
            console.table("Plan with calls in parts", _in_parts(fused.plan))
    if planned.assumed:
        console.header("Assumed, not measured")
    for line in planned.assumed:
        console.line(line)
    if planned.result.runners_up:
        console.header("Plans that lost")
    for line in runner_up_lines(planned):
        console.line(line)
    for note in (*planned.notes, *left_out(draft), *draft.warnings):
        console.line(f"Note: {note}")
    if written:
        console.where(written)


def _show_advice(planned: Planned, advice: Advice | None, console: Console) -> None:
    """The guideline, with what a simulation says of it if that was asked for."""
    if advice is None:
        console.header("Guideline (--advise simulates it)")
        for rule in guideline(planned.workload, planned.cluster).rules:
            console.line(str(rule))
        return
    console.table("Placements", advice.rows)
    console.header("Advice")
    for line in advice.lines:
        console.line(line)


if __name__ == "__main__":
    sys.exit(main())
