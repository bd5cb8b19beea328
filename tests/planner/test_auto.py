"""Experiments that are lists of calls."""

import dataclasses
import re
from typing import Any

import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.auto import FunctionCall, auto, workload_of_calls
from tests.planner.described_step import TINY, ppo

SCORES = ModelConfig(**{**dataclasses.asdict(TINY), "head": "scalar", "rope_scaling": None})
PPO = [
    FunctionCall("critic", "train", inputs=["sequences", "values", "reference", "scores"], mini_batches=2),
    FunctionCall("actor", "train", inputs=["sequences", "values", "reference", "scores"], mini_batches=2),
    FunctionCall("actor", "generate", model=TINY, inputs=["prompts"], outputs=["sequences"]),
    FunctionCall("critic", "infer", model=SCORES, inputs=["sequences"], outputs=["values"], method="values"),
    FunctionCall("reference", "infer", model=TINY, inputs=["sequences"], outputs=["reference"], method="logprobs"),
    FunctionCall("reward", "infer", model=SCORES, inputs=["sequences"], outputs=["scores"], method="scores"),
]


def workload(calls=tuple(PPO), **data):
    return workload_of_calls(calls, batch_size=16, prompt=8, response=8, **data)


def test_the_work_is_that_of_the_step_that_is_written_as_code():
    traced = {call.name: call for call in ppo(rows=16).workload.calls}
    written = {call.name: call for call in workload().calls}
    assert written.keys() == traced.keys()
    for name, call in written.items():
        same = ("kind", "model", "weights", "rows", "prompt", "response", "scored", "mini_batches", "divisible")
        assert [getattr(call, field) for field in same] == [getattr(traced[name], field) for field in same], name
        assert set(call.needs) == set(traced[name].needs), name


def test_a_call_of_several_samples_gives_as_many_rows():
    generate = dataclasses.replace(PPO[2], num_samples=4)
    work = workload([generate, *PPO[3:], *PPO[:2]])
    assert (work.call("actor.generate").rows, work.call("critic.values").rows) == (16, 64)
    assert work.call("actor.train").divisible == (32,)


def test_a_train_call_waits_for_all_that_read_what_it_trains():
    work = workload(
        [
            FunctionCall("actor", "train", model=TINY, inputs=["prompts"], outputs=["trained"]),
            FunctionCall("actor", "infer", inputs=["trained"], method="after"),
            FunctionCall("actor", "infer", inputs=["prompts"], method="before"),
        ]
    )
    assert [call.name for call in work.calls] == ["actor.before", "actor.train", "actor.after"]
    assert work.call("actor.train").needs == ("actor.before",)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [FunctionCall("actor", "infer", model="7bb")],
            "actor.infer: model must be a ModelConfig or one of tiny, small,",
        ),
        ([FunctionCall("actor", "infer")], "actor.infer: one of the calls of a role must have a model. Got none."),
        (
            [FunctionCall("actor", "infer", model="7b"), FunctionCall("actor", "train", model="13b")],
            "actor.train: calls of one role have one model. Got ModelConfig(",
        ),
        ([FunctionCall("actor", "sleep", model="7b")], "actor.sleep: must generate, infer or train. Got 'sleep'."),  # pyright: ignore
        (
            [FunctionCall("actor", "infer", model="7b", inputs=["promts"])],
            "Got 'promts'. Known: prompts. Did you mean 'prompts'?",
        ),
        (
            [FunctionCall("actor", "infer", model="7b", outputs=["prompts"])],
            "Got 'prompts', which comes with the data. Rename it.",
        ),
        (
            [
                FunctionCall("a", "infer", model="7b", outputs=["x"]),
                FunctionCall("b", "infer", model="7b", outputs=["x"]),
            ],
            "b.infer: outputs must have names of their own. Got 'x', which is an output of a.infer.",
        ),
        (
            [
                FunctionCall("a", "infer", model="7b", inputs=["y"], outputs=["x"]),
                FunctionCall("b", "infer", model="7b", inputs=["x"], outputs=["y"]),
            ],
            "calls: must not wait for each other in a circle. Got a.infer, b.infer.",
        ),
        (
            [FunctionCall("a", "train", model="7b", mini_batches=3)],
            "a.train: mini_batches must divide its 16 rows. Got 3.",
        ),
        (
            [FunctionCall("a", "infer", model="7b")] * 2,
            "workload: every call has a name of its own. Got 'a.infer' twice.",
        ),
    ],
)
def test_calls_that_are_refused(calls, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        workload(calls)


SIZES: dict[str, Any] = dict(batch_size=16, prompt_tokens=8, response_tokens=8)


@dataclasses.dataclass
class Experiment:
    mini_batches: int = 2

    @property
    def calls(self) -> list[FunctionCall]:
        trained = [dataclasses.replace(call, mini_batches=self.mini_batches) for call in PPO[:2]]
        return [*trained, *PPO[2:]]


def test_an_experiment_is_planned_for_under_the_hood():
    @auto(nodes=1, devices_per_node=2, gpu="a100-80g", strategy="colocate", **SIZES)
    class Ours(Experiment):
        pass

    experiment: Any = Ours(mini_batches=4)
    assert experiment.workload.call("actor.train").mini_batches == 4
    planned = experiment.plan()
    assert planned.cluster.num_devices == 2 and planned.strategy == "colocate"
    assert set(planned.placements()) == {call.name for call in PPO}
    assert experiment.plan(strategy="heuristic").strategy == "heuristic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**SIZES, "batch_size": 0, "gpu": "h100"}, "auto: batch_size: must be at least 1. Got 0."),
        (SIZES, "auto: exactly one of gpu and cluster must be given. Got gpu='' and cluster=''."),
        ({**SIZES, "gpu": "h100", "cluster": "cpu:8"}, "Got gpu='h100' and cluster='cpu:8'."),
        ({**SIZES, "cluster": "cpu:8", "nodes": 2}, "auto: nodes and devices_per_node go with gpu. Got them beside"),
        ({**SIZES, "cluster": "cpu:8", "nodes": 0}, "auto: nodes and devices_per_node go with gpu. Got them beside"),
        (
            {**SIZES, "gpu": "h100", "stratgy": "split"},
            "auto: unknown option 'stratgy'. Known: strategy, costs, fixed,",
        ),
    ],
)
def test_what_the_decorator_refuses(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        auto(**arguments)


def test_classes_that_the_decorator_refuses():
    decorate = auto(gpu="h100", **SIZES)
    with pytest.raises(ValueError, match=r"int must have a property `calls`, a list of FunctionCall"):
        decorate(int)
    with pytest.raises(ValueError, match=r"gives a class a `plan`. Got Mine with one of its own"):
        decorate(type("Mine", (), {"calls": [], "plan": None}))
    with pytest.raises(ValueError, match="unknown kind of device 'h10'"):
        auto(gpu="h10", **SIZES)(type("Another", (), {"calls": PPO}))().plan()  # pyright: ignore
