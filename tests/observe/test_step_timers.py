import pytest

from jaxrlhf.observe.step_timers import time_rows, timer_of, timer_seconds, timing_metrics


@pytest.mark.parametrize(
    ("name", "kind", "timer"),
    [
        ("actor.generate", "generate", "gen"),
        ("actor.generate#2", "generate", "gen"),
        ("reference.logprobs", "infer", "ref"),
        ("actor.logprobs", "infer", "old_log_prob"),
        ("actor.policy#3", "infer", "old_log_prob"),
        ("expert.logprobs", "infer", "log_prob_expert"),
        ("critic.values", "infer", "values"),
        ("reward.scores", "host", "reward"),
        ("cost.scores", "infer", "reward"),
        ("ppo_batch", "compute", "adv"),
        ("critic.train", "train", "update_critic"),
        ("critic.train#2", "train", "update_critic"),
        ("actor.reallocate", "reallocate", "reallocate_actor"),
        ("reference.offload", "offload", "offload_reference"),
        ("verifier.check", "host", "check"),
        ("reward.scores", "wait", "wait"),
    ],
)
def test_timers_have_verl_s_names(name: str, kind: str, timer: str) -> None:
    assert timer_of(name, kind) == timer


def test_calls_of_one_timer_are_told_together_and_apart() -> None:
    metrics = timing_metrics(
        {
            ("actor.generate", "generate"): [(0.0, 2.0)],
            ("actor.generate#2", "generate"): [(1.0, 3.0), (5.0, 6.0)],
            ("actor.train", "train"): [(6.0, 8.0)],
        }
    )
    assert metrics == {
        "timing_s/gen": 4.0,
        "timing_s/gen/actor.generate": 2.0,
        "timing_s/gen/actor.generate#2": 3.0,
        "timing_s/update_actor": 2.0,
    }
    assert timer_seconds({**metrics, "timing_s/step": 9.0, "timing_s/wait": 2.0, "actor/loss": 1.0}) == {
        "gen": 4.0,
        "update_actor": 2.0,
    }


def test_where_the_time_went() -> None:
    def record(step: int, gen: float, **more: float) -> dict[str, float]:
        return {"step": step, "timing_s/step": 2 * gen, "timing_s/gen": gen, **more}

    records = [
        {"step": 0, "eval/x": 1.0, "timing_s/testing": 9.0},
        record(1, 60.0, **{"timing_s/reallocate_reference": 5.0, "timing_s/adv": 1.0}),
        record(2, 1.0, **{"timing_s/adv": 0.25}),
        record(3, 1.0, **{"timing_s/adv": 0.5, "timing_s/gen/a": 1.0}),
    ]
    rows = time_rows(records)
    assert [tuple(row.values()) for row in rows] == [
        ("gen", 62.0, "50 %", 1.0, 60.0, 1),
        ("reallocate_reference", 5.0, "4 %", 5.0, 5.0, 1),
        ("adv", 1.75, "1 %", 0.5, 1.0, 1),
    ]
    assert list(rows[0]) == ["timer", "seconds", "share", "median", "longest", "at step"]
    assert time_rows([]) == []
