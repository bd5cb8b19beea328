"""Plans of workloads by chance: none is slower than another strategy's, with more of anything, or than brute force."""

import dataclasses
import itertools
import json
import math
import shlex

import numpy as np
import pytest

from jaxrlhf import plan
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.search import search
from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.simulate import steady_state
from scripts.check_planner import (
    STRATEGIES,
    Outcome,
    Report,
    check_case,
    check_small,
    never_slower,
    outcomes,
    strategies_agree,
)
from scripts.planner_brute_force import cannot_fit, lower_bounds
from scripts.planner_cases import NAMED, Machines, random_cases, small_cases
from tests.planner.made_up_problem import random_problem

SEED = 1
CASES = [random_cases(8, SEED, most_devices=16, most_billions=14)[k] for k in (0, 4)]
"""PPO and ReMax. `python -m scripts.check_planner` has more and larger ones."""
SMALL = small_cases(1, SEED)
"""PPO on two devices."""


@pytest.fixture
def report(tmp_path, monkeypatch) -> Report:
    """A report on searches that are a tenth as long, since there are many."""
    monkeypatch.setattr(search, "STEPS", search.STEPS // 10)
    return Report(tmp_path, SEED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_search_is_the_fastest_and_more_of_anything_never_slower(case, report):
    check_case(case, report, quick=True)
    assert not report.failures


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_workloads_agree_with_brute_force(case, report):
    check_small(case, report)
    assert not report.failures


def test_what_was_lost_where_memory_is_scarce(report):
    """7B actor and critic on four H100: the fastest choices of calls do not fit together."""
    workload, cluster = NAMED[0].draft().workload(), NAMED[0].machines.cluster(report.folder)
    assert not list(strategies_agree(outcomes(workload, cluster, STRATEGIES, seed=SEED)))


# -- the checks themselves ---------------------------------------------------------------------------------------------


def test_cases_are_the_same_for_a_seed_and_differ_in_all_that_they_should():
    cases = random_cases(30, 0)
    assert cases[:10] == random_cases(10, 0) != random_cases(10, 1)
    assert {case.machines.kind for case in cases} == {"a100-80g", "h100", "a100-40g"}
    assert {case.config for case in cases} == {
        "ppo_70b_128gpus", "grpo_arithmetic", "remax_arithmetic", "safe_rlhf_arithmetic",
    }  # fmt: skip
    assert min(case.machines.num_devices for case in cases) == 4
    assert max(case.machines.num_devices for case in cases) == 128
    assert 0 < sum(any("lora" in value for value in case.values) for case in cases) < 15
    assert len({case.name for case in cases}) == 30


def test_machines_are_described_as_the_command_reads_them(tmp_path):
    plain = Machines(2, 8, "h100")
    assert plain.text(tmp_path) == "2x8:h100" and not list(tmp_path.iterdir())
    less = dataclasses.replace(plain, memory=0.5, links=2.0)
    (group,), (before,) = read_cluster(less.text(tmp_path)).groups, plain.cluster(tmp_path).groups
    assert group.kind.capacity == pytest.approx(before.kind.capacity / 2, rel=1e-6)
    assert group.kind.link.bandwidth == 2 * before.kind.link.bandwidth
    assert group.network.bandwidth == 2 * before.network.bandwidth
    assert (group.nodes, group.devices_per_node) == (2, 8)


def outcome(strategy: str, seconds: float, why_not: str = "") -> Outcome:
    return Outcome(strategy, seconds, 0.0, why_not)


def test_a_strategy_that_is_slower_than_another_is_told():
    def told(**seconds: float) -> list[tuple[str, ...]]:
        return [names for _, names in strategies_agree({k: outcome(k, v, "too large") for k, v in seconds.items()})]

    assert told(search=10.0, hybridflow=10.1, colocate=10.1, heuristic=10.2) == []
    assert told(search=10.0, colocate=10.1, heuristic=9.9) == [("colocate", "heuristic")]
    assert told(search=10.3, hybridflow=10.0) == [("search", "hybridflow")]
    assert told(search=10.0, hybridflow=10.1, split=10.09) == [("hybridflow", "split")]
    assert told(search=math.inf, heuristic=10.0, hybridflow=math.inf) == [("search", "heuristic")]
    assert told(search=math.inf, heuristic=math.inf) == []


def test_what_gets_slower_with_more_is_told():
    assert not list(never_slower(outcome("search", 10.0), outcome("search", 10.05), what="more"))
    assert not list(never_slower(outcome("search", math.inf), outcome("search", 10.0), what="more"))
    (line,) = never_slower(outcome("search", 10.0), outcome("search", 10.2), what="1.5 x memory")
    assert line == "search 10 s, with 1.5 x memory 10.2 s"
    (line,) = never_slower(outcome("search", 10.0), outcome("search", math.inf, "it does not fit"), what="more")
    assert line == "search 10 s, with more inf s it does not fit"


def test_a_failure_names_the_commands_that_show_it(tmp_path, capsys):
    report = Report(tmp_path)
    report.fail("is slow", (NAMED[0], "search"), (NAMED[0].on(memory=0.5), "colocate"))
    first, *commands = capsys.readouterr().out.splitlines()
    assert first == report.failures[0] == "FAILED 7b and 7b, 4 H100 on 1x4:h100: is slow"
    assert "--config ppo_70b_128gpus --set roles.actor.model.preset=7b" in commands[0]
    assert commands[0].endswith("--cluster 1x4:h100 --prompt-tokens 1024 --costs analytic --strategy search")
    assert f"--cluster {tmp_path}/1x4-h100-memory-0.5" in commands[1]


def test_the_command_of_a_case_plans_that_case(tmp_path, capsys):
    case = SMALL[0]
    words = shlex.split(case.command(tmp_path, "colocate"))
    assert words[:3] == ["python", "-m", "jaxrlhf.plan"]
    assert plan.main([*words[3:], "--json"]) == 0
    found = outcomes(case.draft().workload(), case.machines.cluster(tmp_path), ["colocate"])
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(found["colocate"].seconds)


@pytest.mark.parametrize("seed", range(20))
def test_what_brute_force_skips_cannot_be_the_fastest(seed):
    problem = random_problem(seed, most_choices=3)
    bounds, lacking = lower_bounds(problem), cannot_fit(problem)
    for picks in itertools.islice(np.ndindex(*bounds.shape), 0, None, 1 + bounds.size // 20):
        simulation = steady_state(problem, picks)
        if simulation.period:
            assert simulation.seconds >= bounds[picks] * (1 - 1e-9)
        if lacking[picks]:
            assert any(a > b for a, b in zip(peak_memory(problem, picks), problem.capacity, strict=True))
