"""What is measured of calls and machines, and that it is."""

import dataclasses

import jax
import pytest

from jaxrlhf.calibration import measure_calls as measure_module
from jaxrlhf.calibration import measure_machine as machine_module
from jaxrlhf.calibration import timing as timing_module
from jaxrlhf.calibration.measure_calls import Degrees, Job, divides, jobs, measure
from jaxrlhf.calibration.measure_slots import num_rounds, of_phases, runs
from jaxrlhf.calibration.timing import Timing
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.planner.costs.calibration import case_of
from jaxrlhf.planner.workload import Workload
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

STEP = ppo(rows=64)
SMALL = ppo(dataclasses.replace(TINY, num_layers=1), rows=16).workload


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(timing_module, "WINDOW_SECONDS", 0.0)


def test_rows_are_powers_of_two_and_the_most_come_first():
    call = STEP.workload.call("actor.train")
    found = jobs(
        dataclasses.replace(STEP.workload, calls=(dataclasses.replace(call, needs=()),)),
        {"actor.train": [Strategy(), Strategy(data=2, micro_batches=4)]},
    )
    assert [(job.strategy, job.rows, job.rows_per_shard) for job in found] == [
        (Strategy(), 32, 32), (Strategy(data=2), 32, 16),
        (Strategy(micro_batches=4), 8, 8), (Strategy(data=2, micro_batches=4), 8, 4),
        (Strategy(micro_batches=4), 2, 2), (Strategy(data=2, micro_batches=4), 2, 1),
    ]  # fmt: skip
    assert {job.cases[1].phase for job in found} == {"update"}


def test_equal_calls_are_measured_once():
    strategies = {call.name: [Strategy()] for call in STEP.workload.calls}
    names = [job.call.name for job in jobs(STEP.workload, strategies)]
    both = [call.name for call in STEP.workload.calls if call.name in ("actor.train", "critic.train")]
    assert set(both) <= set(names)
    again = dataclasses.replace(STEP.workload.call("critic.values"), name="again", needs=("critic.values",))
    more = dataclasses.replace(STEP.workload, calls=(*STEP.workload.calls, again))
    assert "again" not in [job.call.name for job in jobs(more, {**strategies, "again": [Strategy()]})]


def test_degrees_are_those_that_divide():
    call = STEP.workload.call("actor.train")
    found = Degrees(data=(1, 8, 64), fsdp=(1, 2), tensor=(1, 2, 4, 8), remat=("none", "layer")).strategies(call, 8)
    assert {(s.data, s.fsdp, s.tensor) for s in found} == {
        (1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 2, 2), (1, 2, 4), (8, 1, 1),
    }  # fmt: skip
    assert {s.remat for s in found} == {"none", "layer"}
    assert not divides(call, Strategy(tensor=8))  # four query heads
    assert not divides(call, Strategy(data=64))  # a mini-batch has 32 rows


def test_a_long_response_is_measured_by_steps_with_the_slots_of_an_average_one():
    call = STEP.workload.call("actor.generate")
    assert measure_module._decoding_prompt(call) == call.prompt
    longer = dataclasses.replace(call, response=100)
    # the cache grows by 32 columns: 32 steps see 8 + 32 of them, 32 see 72, 32 see 104, and 4 see 112
    average = (32 * 40 + 32 * 72 + 32 * 104 + 4 * 112) / 100
    assert measure_module._decoding_prompt(longer) == round(average) - measure_module.DECODED


def test_seconds_of_two_depths_make_a_layer_and_the_rest():
    call = dataclasses.replace(STEP.workload.call("critic.values"), model=dataclasses.replace(TINY, num_layers=16))
    timings = [Timing(0.5, 0.01, 0.0), Timing(0.8, 0.02, 0.1)]
    point = measure_module._point(Job(call, Strategy(), 64), "forward", (2, 4), timings)
    assert (point.layer, point.rest) == (pytest.approx(0.15), pytest.approx(0.2))
    assert (point.spread, point.others) == (0.02, 0.1)
    whole = measure_module._point(
        Job(STEP.workload.call("critic.values"), Strategy(), 64), "forward", (4,), timings[:1]
    )
    assert 4 * whole.layer + whole.rest == pytest.approx(0.5)


def test_phases_are_told_apart():
    def seconds(name, phase, *timings, micro_batches=1):
        job = Job(STEP.workload.call(name), Strategy(micro_batches=micro_batches), 8)
        return measure_module._of_phase(job, phase, [Timing(t, 0.1, 0.0) for t in timings], on_gpu=False).seconds

    assert seconds("critic.values", "forward", 8.0, micro_batches=4) == 2.0
    assert seconds("actor.train", "gradient", 18.0, 1.0, micro_batches=4) == 2.0  # two updates
    assert seconds("actor.train", "update", 18.0, 1.0, micro_batches=4) == 1.0
    assert seconds("actor.generate", "prefill", 3.0, 17.0) == 1.0  # and a step of two seconds
    assert seconds("actor.generate", "decode", 3.0, 17.0) == 2.0  # seven steps more
    assert seconds("actor.generate", "decode", 1.0, 16.0, 2.0, micro_batches=2) == 1.0


@pytest.mark.parametrize("name", ["critic.values", "actor.train", "actor.generate"])
def test_calls_are_measured(name, impatient):
    call = SMALL.call(name)
    job = Job(call, Strategy(micro_batches=2), 4)
    found = dict(measure(job, dispatch_seconds=0.0, patience_seconds=0.0))
    phases = {"infer": ["forward"], "train": ["gradient", "update"], "generate": ["prefill", "decode"]}[call.kind]
    assert [case.phase for case in found] == phases
    assert all(case == case_of(call, case.phase, Strategy()) for case in found)
    for case, point in found.items():
        assert point.rows == (0 if case.phase == "update" else 4)
    # a gradient is what is left beside the update: beside other work on the machine that can be nothing
    assert sum(point.layer * call.model.num_layers + point.rest for point in found.values()) > 0


LONGER = ppo(dataclasses.replace(TINY, num_layers=1), rows=32, prompt=20, response=60).workload.call("actor.generate")


def test_every_number_of_slots_is_measured_where_lengths_are_known():
    def measured(call, strategy):
        found = jobs(Workload((call,)), {call.name: [strategy]})
        return [(job.strategy.slots, job.strategy.prefill_rows, job.rows) for job in found if job.strategy.slots]

    known = dataclasses.replace(LONGER, rows=128, lengths=ResponseLengths(mean=8, p99=60))
    assert measured(LONGER, Strategy()) == []
    assert measured(known, Strategy(data=2)) == [(16, 2, 32), (32, 4, 64)]
    assert measured(LONGER, Strategy(slots=24, prefill_rows=4)) == [(24, 4, 24)]


def test_phases_of_slots_are_told_apart():
    """Ten steps of 2 s without columns and 0.5 s for each; 3 s for a group; 5 s for anything else."""
    slots, rounds = Slots(8, prefill_rows=4), num_rounds(LONGER)
    assert rounds == 7 and [run.tokens for run in runs(LONGER)] == [1, 1, 65, 65, 0]

    def timing(num_rounds, columns, groups=0):
        return Timing(5 + 8 * num_rounds * (2 + 0.5 * columns) + 3 * groups, 0.0, 0.0)

    seen = [timing(1, 64), timing(7, 64), timing(1, 128), timing(7, 128), timing(1, 64, groups=2)]
    assert of_phases(seen, LONGER, slots, on_gpu=False) == {"slot_prefill": 3, "slot_step": 2, "slot_column": 0.5}
    whole = of_phases(seen[:2] * 2 + seen[4:], LONGER, slots, on_gpu=True)
    assert whole == {"slot_prefill": 3, "slot_step": 34, "slot_column": 0}


@pytest.mark.parametrize("strategy", [Strategy(slots=16, prefill_rows=4), Strategy(data=2, slots=8)], ids=str)
def test_slots_are_measured(strategy, impatient):
    found = dict(measure(Job(LONGER, strategy, 16), dispatch_seconds=0.0, patience_seconds=0.0))
    assert [case.phase for case in found] == ["slot_prefill", "slot_step", "slot_column"]
    assert all(case == case_of(LONGER, case.phase, strategy) for case in found)
    assert [point.rows for point in found.values()] == [strategy.prefill_rows, strategy.slots, strategy.slots]
    assert sum(point.layer + point.rest for point in found.values()) > 0


def test_a_deeper_model_is_measured_by_two_depths(monkeypatch):
    """Both are run; which takes longer is not left to other work on the machine."""
    call = STEP.workload.call("critic.values")
    deep = dataclasses.replace(call, model=dataclasses.replace(call.model, num_layers=64))

    def in_turn(programs, *, patience_seconds):
        assert len([jax.block_until_ready(program()) for program in programs]) == 2
        return [Timing(0.5, 0.0, 0.0), Timing(0.8, 0.0, 0.0)]

    monkeypatch.setattr(measure_module, "DEPTHS", (1, 2))
    monkeypatch.setattr(measure_module, "time_in_turn", in_turn)
    [(_, point)] = measure(Job(deep, Strategy(data=2), 64), dispatch_seconds=0.1, patience_seconds=0.0)
    assert (point.rows, point.layer, point.rest) == (32, pytest.approx(0.3), pytest.approx(0.1))


def test_a_machine_is_measured(impatient, monkeypatch):
    monkeypatch.setattr(machine_module, "NARROW_DIMS", (16, 64))
    rates = machine_module.measure_machine(large=2**14, patience_seconds=0.0)  # refuses what is not positive
    assert rates.num_devices == 8
    for name in ("dispatch_seconds", "collective_seconds", "link_bandwidth"):
        assert getattr(rates, name) > 0
    assert rates.dispatch_seconds < 1
