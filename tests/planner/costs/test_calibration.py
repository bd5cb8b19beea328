"""Measurements between which lines are drawn, and the file that keeps them."""

import dataclasses
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.reading import ConfigError, to_tree
from jaxrlhf.planner import cost_sources as costs
from jaxrlhf.planner.costs.calibration import (
    Calibration,
    Curve,
    Load,
    Machine,
    Point,
    Rates,
    calibration_file,
    case_of,
    read_calibration,
    this_machine,
    write_calibration,
)
from jaxrlhf.planner.costs.cost_model import CostModel, PassSeconds
from jaxrlhf.planner.workload import Workload
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

WORK = ppo(rows=64, mini_batches=1).workload
INFER, TRAIN, GENERATE = (WORK.call(name) for name in ("reference.logprobs", "actor.train", "actor.generate"))
GPU = Machine("gpu", "NVIDIA H200", "some processor", 16, "0.10.2", "0.10.2")
CPU = Machine("cpu", "cpu", "some processor", 2, "0.10.2", "0.10.2")
RATES = Rates(
    num_devices=8, float32_flops=5e9, bfloat16_flops=7e9, half_dim=20.0, memory_bandwidth=3e9, kernel_seconds=2e-6,
    graph_kernel_seconds=1e-6, dispatch_seconds=1e-4, step_seconds=1e-5, host_bandwidth=4e8, collective_seconds=3e-5,
    link_bandwidth=2e9, host_seconds=2e-4,
)  # fmt: skip


def point(rows, layer, rest=0.0):
    return Point(rows, layer, rest, spread=0.0, others=0.0)


def measured(machine, *curves):
    """A calibration of `(call, phase, strategy, {rows: seconds of a layer})`; the rest takes a tenth."""
    pairs = [
        (case_of(call, phase, strategy), point(rows, seconds, seconds / 10))
        for call, phase, strategy, points in curves
        for rows, seconds in points.items()
    ]
    return Calibration("2025-01-02", machine, RATES, Load(0.0, 0.5, 2)).with_points(pairs)


def curve(*points):
    return Curve(case_of(INFER, "forward", Strategy()), tuple(points))


def parts(seconds):
    """Seconds of a layer and of the rest, to compare with."""
    return pytest.approx((seconds.layer, seconds.rest))


def test_between_two_measurements_lies_a_straight_line():
    line = curve(point(8, 1.0, 10.0), point(16, 2.0, 6.0), point(64, 5.0, 6.0))
    assert line.at(8) == PassSeconds(1.0, 10.0)
    assert line.at(12) == PassSeconds(1.5, 8.0)
    assert line.at(16) == PassSeconds(2.0, 6.0)
    assert line.at(40) == PassSeconds(3.5, 6.0)


def test_beyond_the_last_measurements_their_line_goes_on():
    line = curve(point(8, 1.0), point(16, 2.0), point(64, 5.0))
    assert line.at(128).layer == pytest.approx(5 + 64 * 3 / 48)
    offset = curve(point(8, 3.0), point(16, 4.0))
    assert offset.at(4).layer == pytest.approx(2.5)


def test_noise_bends_no_line_below_reason():
    assert curve(point(8, 2.0), point(16, 1.9)).at(64).layer == 1.9
    assert curve(point(8, 1.0, 0.5), point(16, 4.0, 0.6)).at(2) == PassSeconds(0.25, 0.125)
    assert curve(point(8, 1.0)).at(32).layer == 4.0
    assert curve(point(0, 0.5)).at(0) == PassSeconds(0.5, 0.0)


@hypothesis.given(
    fixed=st.floats(0, 1), slope=st.floats(1e-3, 1), rows=st.sets(st.integers(1, 512), min_size=2, max_size=6),
    asked=st.floats(0.5, 2048),
)  # fmt: skip
def test_measurements_on_one_line_are_that_line(fixed, slope, rows, asked):
    line = curve(*(point(n, fixed + slope * n, -fixed) for n in sorted(rows)))
    assert line.at(asked).layer == pytest.approx(fixed + slope * asked)


def test_points_come_in_order_and_once():
    for rows in ([], [8, 4], [8, 8]):
        with pytest.raises(ValueError, match=r"points: must be at least one, from the fewest rows on, each once. Got"):
            curve(*(point(n, 1.0) for n in rows))


def test_of_devices_of_their_own_rows_on_each_count():
    calibration = measured(GPU, (INFER, "forward", Strategy(), {8: 1.0, 16: 2.0}))
    for strategy in (Strategy(), Strategy(data=2), Strategy(data=8), Strategy(data=4, pipeline=2)):
        assert parts(calibration(INFER, "forward", strategy, 12)) == (1.5, 0.15)


def test_of_devices_that_share_a_processor_all_rows_count():
    calibration = measured(
        CPU,
        (INFER, "forward", Strategy(), {16: 1.0, 64: 4.0}),
        (INFER, "forward", Strategy(data=4), {4: 1.4, 16: 5.6}),
    )
    assert parts(calibration(INFER, "forward", Strategy(), 32)) == (2.0, 0.2)
    assert parts(calibration(INFER, "forward", Strategy(data=4), 8)) == (2.8, 0.28)
    assert parts(calibration(INFER, "forward", Strategy(data=2), 16)) == (2.4, 0.24)  # half way, by logarithms
    assert parts(calibration(INFER, "forward", Strategy(data=8), 4)) == (2.8, 0.28)
    assert parts(calibration(INFER, "forward", Strategy(pipeline=2), 32)) == (4.0, 0.2)  # two stages at once


def test_where_nothing_near_was_measured_there_is_no_answer():
    curves = [(INFER, "forward", Strategy(fsdp=2), {8: 1.0}), (TRAIN, "gradient", Strategy(), {8: 1.0})]
    gpu, cpu = measured(GPU, *curves), measured(CPU, *curves)
    assert gpu(INFER, "forward", Strategy(fsdp=4), 8) is None
    assert cpu(INFER, "forward", Strategy(fsdp=4), 4) == PassSeconds(1.0, 0.1)
    for calibration in (gpu, cpu):
        assert calibration(INFER, "forward", Strategy(data=2), 8) is None
        assert calibration(INFER, "forward", Strategy(fsdp=2, tensor=2), 8) is None
        assert calibration(TRAIN, "gradient", Strategy(remat="layer"), 8) is None
        assert calibration(dataclasses.replace(TRAIN, response=9), "gradient", Strategy(), 8) is None
        assert calibration(WORK.call("critic.train"), "gradient", Strategy(), 8) is None
        assert calibration(TRAIN, "gradient", Strategy(schedule="gpipe"), 8) is not None
        assert calibration(GENERATE, "decode", Strategy(), 8) is None


def test_equal_calls_share_what_was_measured():
    calibration = measured(GPU, (WORK.call("critic.values"), "forward", Strategy(), {8: 1.0}))
    values = dataclasses.replace(WORK.call("critic.values"), name="other.values", role="other", weights="other")
    assert calibration(values, "forward", Strategy(), 8) == PassSeconds(1.0, 0.1)


def test_the_cost_model_takes_what_was_measured():
    layers = TINY.num_layers
    calibration = measured(
        CPU,
        (TRAIN, "gradient", Strategy(), {64: 1.0}),
        (TRAIN, "update", Strategy(), {0: 0.1}),
        (TRAIN, "gradient", Strategy(data=8), {8: 1.0}),
        (TRAIN, "update", Strategy(data=8), {0: 0.8}),
    )
    cluster = calibration.on(read_cluster("cpu:8"))
    model = CostModel(cluster, measured=calibration)
    seconds = model.seconds(TRAIN, range(8), Strategy(data=8))
    assert seconds.passes == pytest.approx(layers + 0.1)
    assert seconds.update == pytest.approx(layers * 0.8 + 0.08)
    assert seconds.reduction == 0  # it is in the update
    assert (seconds.dispatch, seconds.host) == (RATES.dispatch_seconds, 8 * RATES.host_seconds)
    quarters = model.seconds(TRAIN, range(8), Strategy(data=8, micro_batches=4))
    assert quarters.passes == pytest.approx(seconds.passes)
    assert model.seconds(TRAIN, range(8), Strategy(data=4, tensor=2)).reduction > 0  # counted, not measured


def test_forecasts_say_what_they_rest_on(tmp_path, monkeypatch):
    calibration = measured(CPU, (INFER, "forward", Strategy(), {8: 1.0}))
    monkeypatch.setattr(costs, "this_machine", lambda: CPU)
    work, cluster = Workload(tuple(dataclasses.replace(c, needs=()) for c in (INFER, TRAIN))), read_cluster("cpu:8")
    write_calibration(tmp_path / "here.json", dataclasses.replace(calibration, load=Load(0.25, 3.0, 2)))
    note, load = costs.costs_from("measured", work, cluster, calibration=tmp_path / "here.json")[1]
    assert load.startswith("While it was measured, other processes had 25 % of 2 cores, too much to tell")
    assert f": {INFER.name}; of {TRAIN.name} only what the devices do in a second." in note
    assert "Measure it first" in costs.costs_from("analytic", work, cluster)[1][0]
    assert "Measure" not in costs.costs_from("analytic", work, read_cluster("1x8:h100"))[1][0]


def test_a_sum_over_row_shards_that_was_not_measured_is_counted():
    calibration = measured(GPU, (TRAIN, "gradient", Strategy(), {8: 1.0}), (TRAIN, "update", Strategy(), {0: 0.1}))
    model = CostModel(read_cluster("1x8:h200"), measured=calibration)
    seconds = model.seconds(TRAIN, range(8), Strategy(data=8))
    assert (seconds.update, seconds.passes) == (pytest.approx(0.1 * TINY.num_layers + 0.01), TINY.num_layers + 0.1)
    assert seconds.reduction == CostModel(read_cluster("1x8:h200")).seconds(TRAIN, range(8), Strategy(data=8)).reduction


def test_a_cluster_gets_the_rates_of_the_machine():
    gpu = measured(GPU).on(read_cluster("1x8:h200+1x8:a100-80g"))
    h200, a100 = gpu.groups[0].kind, gpu.groups[1].kind
    assert a100 == read_cluster("1x8:a100-80g").groups[0].kind
    assert (h200.matmul_flops("float32"), h200.matmul_flops("bfloat16")) == (5e9, 7e9)
    assert h200.coefficients.step_seconds == RATES.step_seconds
    assert h200.link.bandwidth * h200.coefficients.link_efficiency == RATES.link_bandwidth
    assert h200.coefficients.source == "measured on 2025-01-02"
    one = dataclasses.replace(RATES, link_bandwidth=0.0, collective_seconds=0.0)  # nothing to send to
    alone = dataclasses.replace(measured(GPU), rates=one).on(read_cluster("1x8:h200")).groups[0].kind
    before = read_cluster("1x8:h200").groups[0].kind
    assert alone.link.bandwidth == before.link.bandwidth * before.coefficients.link_efficiency
    assert alone.coefficients.collective_seconds == before.coefficients.collective_seconds


def test_fewer_devices_have_more_of_a_processor():
    two, eight = (measured(CPU).on(read_cluster(f"cpu:{n}")).groups[0].kind for n in (2, 8))
    assert eight.matmul_flops("float32") == 5e9
    assert two.matmul_flops("float32") == 4 * 5e9
    assert two.memory.bandwidth == 4 * eight.memory.bandwidth
    assert two.coefficients.dispatch_seconds == eight.coefficients.dispatch_seconds


def test_what_was_measured_later_counts():
    calibration = measured(
        GPU, (INFER, "forward", Strategy(), {8: 1.0}), (INFER, "forward", Strategy(tensor=2), {8: 3.0})
    )
    both = calibration.with_points([(case_of(INFER, "forward", Strategy()), point(8, 2.0, 0.2))])
    assert parts(both(INFER, "forward", Strategy(), 8)) == (2.0, 0.2)
    assert parts(both(INFER, "forward", Strategy(tensor=2), 8)) == (3.0, 0.3)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    path = calibration_file(GPU, tmp_path / "new")
    calibration = measured(GPU, (TRAIN, "gradient", Strategy(), {8: 1.0, 16: 1 / 3}))
    write_calibration(path, calibration)
    return path, calibration


def test_a_file_comes_back_as_it_was(written):
    path, calibration = written
    assert read_calibration(path, machine=GPU) == calibration
    assert list(path.parent.iterdir()) == [path]


def test_every_machine_and_version_has_a_file_of_its_own(tmp_path):
    changes = [{}, {"jax": "0.11.0"}, {"num_cores": 8}, {"device_kind": "NVIDIA H100"}, {"processor": "another"}]
    assert len({calibration_file(dataclasses.replace(GPU, **change), tmp_path) for change in changes}) == len(changes)
    assert this_machine().shares_processor
    assert this_machine() == this_machine()


@pytest.mark.parametrize("change", [{"jax": "0.9.0"}, {"jaxlib": "0.9.0"}, {"device_kind": "cpu"}, {"num_cores": 3}])
def test_another_machine_or_version_is_refused(written, change):
    path, _ = written
    other = dataclasses.replace(GPU, **change)
    with pytest.raises(
        ConfigError, match=r"must have been measured on this machine, .*Got NVIDIA H200, .*Measure this"
    ):
        read_calibration(path, machine=other)


def test_what_is_no_calibration_is_refused(written):
    path, calibration = written
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*Measure this machine: python -m"):
        read_calibration(path.with_name("none.json"), machine=GPU)
    tree = to_tree(calibration)
    curve = tree["curves"][0]
    cases = {
        "must be the JSON of a calibration. Got": "{",
        "version: must be 3. Got None": json.dumps({"curves": []}),
        "version: must be 3. Got 1": json.dumps(tree | {"version": 1}),
        "rates: required": json.dumps({key: value for key, value in tree.items() if key != "rates"}),
        "unknown key 'curve'": json.dumps(tree | {"curve": []}),
        r"curves\[0\].case.phase: expected one of forward,": json.dumps(
            tree | {"curves": [curve | {"case": curve["case"] | {"phase": "backward"}}]}
        ),
        r"curves\[0\].points\[0\].layer: must be finite and not negative. Got -1.0": json.dumps(
            tree | {"curves": [curve | {"points": [curve["points"][0] | {"layer": -1.0}]}]}
        ),
        "rates.float32_flops: must be finite and positive. Got 0.0": json.dumps(
            tree | {"rates": tree["rates"] | {"float32_flops": 0.0}}
        ),
    }
    for message, text in cases.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_calibration(path, machine=GPU)


def test_numbers_are_finite():
    with pytest.raises(ValueError, match=r"layer: must be finite and not negative. Got nan"):
        point(1, math.nan)
    assert point(1, 1.0, -0.5).rest == -0.5
