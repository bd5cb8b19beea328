"""Checks that plans are as fast as they are said to be, on workloads by name and by chance.

    python -m scripts.check_planner                       # all named cases and 30 by chance: an hour or two
    python -m scripts.check_planner --quick               # fewer, without long searches
    python -m scripts.check_planner --workloads 0 --only "7b and 7b"
    python -m scripts.check_planner --times               # how long planning takes for 128 and for 512 devices

All seconds are those of formulas and of the simulation. What is checked:

- `search` is not slower than any other strategy by more than 2 %, and fits where any of them does. `hybridflow` is
  never slower than colocate, standalone and split, all of which are mappings. `colocate` is not slower than
  `heuristic` on as many devices, whose calls are colocated too.
- A plan costs what it costs written by hand, and fits the memory that it is planned for.
- With another seed and 100 times as many plans, up to `--seconds` a case, `search` finds nothing that is faster
  by more than 2 %.
- With more memory (0.7, 0.8, 0.9 and all of it), faster links and more nodes (twice as many, half as many more), the
  plans of `search` are not slower by more than 1 %. The same holds of `colocate` and `hybridflow` with more memory and
  faster links. With more nodes it need not: these use all devices that they can, and a step of small models may take
  longer on more; but `colocate` is not slower where rows divide over no more devices than before.
- On 2 to 4 devices, `search` finds what brute force finds (`planner_brute_force`) among all plans of placements that
  it looks at, and what that finds among all that may be written, to 2 %.
- Planning takes at most 14 CPU-seconds for 128 devices, and a minute for 64 nodes of 8 (`--times`).

Every failure is a line with both figures, and the commands that give them. The exit status is 1 where there is one.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.search.choices import Among, make_problem
from jaxrlhf.planner.search.methods import AMONG, find_method
from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.search import default_steps, search, warm_up
from jaxrlhf.planner.search.search_result import SearchResult
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import Workload
from jaxrlhf.sharding import mesh
from scripts.planner_brute_force import brute_force
from scripts.planner_cases import NAMED, Case, Machines, random_cases, small_cases

SEARCH, MAPPINGS, OTHERS = "search", ("colocate", "standalone", "split"), ("heuristic",)
STRATEGIES = (SEARCH, "hybridflow", *MAPPINGS, *OTHERS)
WITHIN = 0.02
"""Fraction by which `search` may be slower than another plan: it does not look at all plans of large problems."""
MONOTONE = 0.01
"""Fraction by which a plan may be slower with more of a resource. Not zero: Algorithm 1 takes calls as they get ready,
and a shorter transfer may let another call ahead."""
SAME = 1e-6
"""Rounding of seconds that are computed twice."""
MEMORY = (0.7, 0.8, 0.9, 1.0)
MORE_NODES = (1.5, 2.0)
FASTER_LINKS = 2.0
LONGER = 100
MOST_DEVICES = 128
SECONDS_OF_128, SECONDS_OF_512 = 14.0, 60.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The plan of a strategy for a case."""

    strategy: str
    seconds: float
    """Seconds of an iteration; infinite if no plan fits."""
    cpu_seconds: float
    """CPU seconds of the search for the plan, including the choices."""
    why_not: str = ""
    problem: Problem | None = None
    result: SearchResult | None = None

    @property
    def devices(self) -> set[range]:
        """The devices of its calls."""
        if self.problem is None or self.result is None:
            return set()
        return {call.choices[k].devices for call, k in zip(self.problem.calls, self.result.plan, strict=True)}


def outcomes(workload: Workload, cluster: Cluster, strategies: Sequence[str], *, seed: int = 0) -> dict[str, Outcome]:
    """Strategy -> what it makes of a workload. What they choose from is made once."""
    costs, problems, found = CostModel(cluster), dict[Among, tuple[Problem | PlanError, float]](), {}
    for strategy in strategies:
        among = AMONG.get(strategy, "fast")
        begun = time.process_time()
        if among not in problems:
            try:
                problem = make_problem(workload, cluster, costs, among=among)
            except PlanError as error:
                problem = error
            problems[among] = problem, time.process_time() - begun
        (problem, made), begun = problems[among], time.process_time()
        try:
            if isinstance(problem, PlanError):
                raise problem
            result = find_method(strategy)(problem, seed=seed)
        except PlanError as error:
            found[strategy] = Outcome(strategy, math.inf, made + time.process_time() - begun, str(error))
        else:
            seconds = made + time.process_time() - begun
            found[strategy] = Outcome(strategy, result.seconds, seconds, "", problem, result)
    return found


# -- checks: each gives what fails, in a line ------------------------------------------------------------------------


def strategies_agree(found: Mapping[str, Outcome]) -> Iterator[tuple[str, tuple[str, str]]]:
    """No strategy is slower than one whose plans it looks at too. Failures, each with the two strategies."""
    pairs = [(SEARCH, other, WITHIN) for other in found if other != SEARCH]
    pairs += [("hybridflow", other, SAME) for other in MAPPINGS]
    colocated = [found[name].devices for name in ("colocate", "heuristic") if name in found]
    if len(set(map(frozenset, filter(None, colocated)))) < 2:
        pairs.append(("colocate", "heuristic", SAME))
    for one, other, tolerance in pairs:
        if one not in found or other not in found or found[other].seconds == math.inf:
            continue
        mine, theirs = found[one].seconds, found[other].seconds
        if mine == math.inf:
            yield f"{one} has no plan, {other} has one of {theirs:.4g} s: {found[one].why_not[:200]}", (one, other)
        elif mine > theirs * (1 + tolerance):
            yield f"{one} {mine:.4g} s, {other} {theirs:.4g} s: {mine / theirs - 1:.1%} slower", (one, other)


def costs_as_written(workload: Workload, cluster: Cluster, outcome: Outcome) -> Iterator[str]:
    """A plan fits, and costs what it costs where every call is placed by hand."""
    problem, result = outcome.problem, outcome.result
    if problem is None or result is None:
        return
    chosen = {call.name: call.choices[k] for call, k in zip(problem.calls, result.plan, strict=True)}
    placed = {name: Placement(tuple(choice.devices), choice.strategy) for name, choice in chosen.items()}
    offload = {call.role for call in problem.calls if chosen[call.name].offloaded}
    by_hand = make_problem(workload, cluster, CostModel(cluster), fixed=placed, offload=offload)
    plan = [0] * len(by_hand.calls)
    seconds, memory = steady_state(by_hand, plan).seconds, peak_memory(by_hand, plan)
    if not math.isclose(seconds, outcome.seconds, rel_tol=SAME):
        yield f"{outcome.strategy} {outcome.seconds:.6g} s, the same plan written by hand {seconds:.6g} s"
    for device, (taken, room) in enumerate(zip(memory, by_hand.capacity, strict=True)):
        if taken > room:
            yield f"{outcome.strategy}: device {device} has {room:,} bytes, its plan takes {taken:,}"
            break


def longer_search(outcome: Outcome, seed: int, seconds: float) -> Iterator[str]:
    """A search with another seed and 100 times as many plans, up to some seconds, finds nothing faster."""
    if outcome.problem is None:
        return
    limit = min(seconds, LONGER * outcome.cpu_seconds)
    longer = search(outcome.problem, seed=seed + 1, steps=LONGER * default_steps(outcome.problem), seconds=limit)
    if outcome.seconds > longer.seconds * (1 + WITHIN):
        gap = outcome.seconds / longer.seconds - 1
        yield f"search {outcome.seconds:.4g} s, {longer.seconds:.4g} s with another seed in {limit:.0f} s: {gap:.1%}"


def never_slower(less: Outcome, more: Outcome, *, what: str, tolerance: float = MONOTONE) -> Iterator[str]:
    """With more of something a plan is not slower."""
    if less.seconds == math.inf:
        return
    if more.seconds > less.seconds * (1 + tolerance):
        yield f"{less.strategy} {less.seconds:.4g} s, with {what} {more.seconds:.4g} s {more.why_not[:200]}".rstrip()


# -- a case ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """Findings on the cases, printed as they are made."""

    folder: Path
    """Descriptions of machines are written to it."""
    seed: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def fail(self, what: str, *commands: tuple[Case, str]) -> None:
        name = commands[0][0].name if commands else ""
        line = f"FAILED {name} on {commands[0][0].machines}: {what}" if commands else f"FAILED {what}"
        self.failures.append(line)
        print(
            "\n".join([line, *(f"    {case.command(self.folder, strategy)}" for case, strategy in commands)]),
            flush=True,
        )


HEADER = f"{'workload':52} {'devices':28}" + "".join(f"{name:>11}" for name in STRATEGIES) + f"{'worst':>7}{'CPU s':>7}"


def check_case(case: Case, report: Report, *, quick: bool = False, seconds: float = 60.0) -> None:
    """All checks of a case but brute force and times.

    Args:
        quick: Less memory once, more nodes once, no longer search. Of cases by name, all but the longer search.
        seconds: The most that a longer search may take.
    """
    workload = case.draft().workload()
    cluster = case.machines.cluster(report.folder)
    found = outcomes(workload, cluster, STRATEGIES, seed=report.seed)
    best = min(each.seconds for each in found.values())
    worst = found[SEARCH].seconds / best if best < math.inf else math.nan
    print(
        f"{case.name:52} {case.machines!s:28}" + "".join(f"{each.seconds:11.4g}" for each in found.values())
        + f"{worst:7.2f}{found[SEARCH].cpu_seconds:7.1f}",
        flush=True,
    )  # fmt: skip
    for line, strategies in strategies_agree(found):
        report.fail(line, *((case, strategy) for strategy in strategies))
    for outcome in found.values():
        for line in costs_as_written(workload, cluster, outcome):
            report.fail(line, (case, outcome.strategy))
    if not quick:
        for line in longer_search(found[SEARCH], report.seed, seconds):
            report.fail(line, (case, SEARCH))
    check_monotone(case, workload, found, report, quick=quick and case not in NAMED)


def check_monotone(
    case: Case, workload: Workload, found: Mapping[str, Outcome], report: Report, *, quick: bool = False
) -> None:
    """More memory, faster links and more nodes never make plans slower."""
    chosen = (SEARCH, "colocate", "hybridflow")

    def on(other: Case, strategies: Sequence[str]) -> dict[str, Outcome]:
        return outcomes(workload, other.machines.cluster(report.folder), strategies, seed=report.seed)

    def compare(less: Case, before: Mapping[str, Outcome], more: Case, after: Mapping[str, Outcome]) -> None:
        for name in chosen:
            if name in before and name in after:
                for line in never_slower(before[name], after[name], what=str(more.machines)):
                    report.fail(line, (less, name), (more, name))

    before = None
    for part in MEMORY[1:] if quick else MEMORY:
        if quick and part not in (0.8, 1.0):
            continue
        memory = round(case.machines.memory * part, 6)
        smaller = case.on(memory=memory) if part < 1 else case
        after = on(smaller, chosen) if part < 1 else found
        if before is not None:
            compare(*before, smaller, after)
        before = smaller, after
    faster = case.on(links=FASTER_LINKS)
    compare(case, found, faster, on(faster, chosen))
    before = case, found
    for times in MORE_NODES[1:] if quick else MORE_NODES:
        nodes = case.machines.nodes * times
        if nodes == int(nodes) and nodes * case.machines.devices_per_node <= MOST_DEVICES:
            larger = case.on(nodes=int(nodes))
            after = on(larger, (SEARCH, "colocate"))
            if after["colocate"].devices != before[1]["colocate"].devices:
                compare(*before, larger, {SEARCH: after[SEARCH]})
            else:
                compare(*before, larger, after)
            before = larger, after


# -- small cases and times ---------------------------------------------------------------------------------------------


def check_small(case: Case, report: Report) -> None:
    """`search` finds what brute force finds: exactly, of the placements that it looks at; to 2 %, of all that may be
    written."""
    draft, cluster = case.draft(), case.machines.cluster(report.folder)
    looked_at, every = (brute_force(draft, cluster, as_searched=each) for each in (True, False))
    found = outcomes(draft.workload(), cluster, (SEARCH,), seed=report.seed)[SEARCH]
    print(
        f"{case.name:52} {case.machines!s:28} brute force {looked_at.seconds:.5g} s of {looked_at.plans:,} plans, "
        f"{every.seconds:.5g} s of {every.plans:,}; search {found.seconds:.5g} s",
        flush=True,
    )
    for least, tolerance in ((looked_at, SAME), (every, WITHIN)):
        if found.seconds > least.seconds * (1 + tolerance):
            gap = found.seconds / least.seconds - 1
            line = f"search {found.seconds:.5g} s, brute force {least.seconds:.5g} s, {gap:.1%}: {least}"
            report.fail(line, (case, SEARCH))
    if found.seconds < every.seconds * (1 - SAME):
        report.fail(f"search {found.seconds:.5g} s is faster than all plans, {every.seconds:.5g} s", (case, SEARCH))


def check_times(report: Report) -> None:
    """Planning of 128 and of 512 devices, with looking whether to fuse."""
    warm_up()
    for nodes, most in ((16, SECONDS_OF_128), (64, SECONDS_OF_512)):
        case = Case(f"times: {8 * nodes} devices", "ppo_70b_128gpus", (), Machines(nodes, 8, "a100-80g"), prompt=1024)
        workload, cluster = case.draft().workload(), case.machines.cluster(report.folder)
        begun, cpu = time.perf_counter(), time.process_time()
        planned = plan_workload(workload, cluster, costs=CostModel(cluster), seed=report.seed)
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
        print(f"{case.name:52} {case.machines!s:28} {planned.seconds:.4g} s, {cpu:.1f} CPU s, {wall:.1f} s", flush=True)
        if cpu > most:
            report.fail(f"planning takes {cpu:.1f} CPU-seconds, more than {most:.0f}", (case, SEARCH))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=30, metavar="N", help="by chance (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of workloads and of searches (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help="8 workloads unless more are asked for, fewer checks of each"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose name has one of these")
    parser.add_argument("--times", action="store_true", help="only how long planning takes")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that a longer search takes (default: 60)")
    parser.add_argument(
        "--folder", type=Path, default=Path(gettempdir()) / "check_planner", help="where descriptions of machines go"
    )
    options = parser.parse_args(arguments)
    mesh.use_processor_alone()
    report = Report(options.folder, options.seed)
    if not options.times:
        number = min(options.workloads, 8) if options.quick else options.workloads
        print(HEADER)
        for case in (*NAMED, *random_cases(number, options.seed)):
            if not options.only or any(text in case.name for text in options.only):
                check_case(case, report, quick=options.quick, seconds=options.seconds)
        for case in small_cases(number, options.seed):
            if not options.only or any(text in case.name for text in options.only):
                check_small(case, report)
    if options.times or not options.only:
        check_times(report)
    print(f"\n{len(report.failures)} failures" if report.failures else "\nAll as it should be")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
