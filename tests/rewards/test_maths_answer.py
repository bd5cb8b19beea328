"""Answers as mathematics, in any form; limits of time; and what happens without math-verify."""

import importlib.util
import os
import re
import signal
import time

import pytest

from jaxrlhf.rewards import maths_answer as module
from jaxrlhf.rewards.functions import call_reward, load_reward
from jaxrlhf.rewards.line_process import LineProcesses
from jaxrlhf.rewards.maths_answer import answer_in, check_maths, maths_answer

installed = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra maths")


@pytest.fixture(scope="module")
def reward():
    return maths_answer()


@installed
@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("1/2", r"so it is $\frac{1}{2}$."),
        (r"\frac{1}{2}", "0.5"),
        ("0.5", r"\boxed{\dfrac12}"),
        (0.5, r"\boxed{1/2}"),
        ("{1,2}", r"\boxed{\{2, 1\}}"),
        (r"$\{1,2\}$", r"$\{2,1\}$"),
        ("(1, 2)", r"\boxed{\left(1,2\right)}"),
        ("[0,1)", r"\boxed{[0, 1)}"),
        ("sqrt(2)", r"\boxed{\sqrt2}"),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
        ("x^2+1", r"\boxed{1 + x^2}"),
        ("1,072", "The answer is 1072"),
        ("a\n#### 72", "<think>1 #### 2</think>\n#### 72"),
        (r"We get \boxed{72}.", r"\boxed{3} or rather \boxed{72}"),
        ("10", r"\boxed{10\text{ cm}}"),
        ("50%", r"\boxed{50\%}"),
        ("east", r"\boxed{\text{east}}"),
    ],
)
def test_equal_answers(reward, answer, completion):
    assert reward(["p"], [completion], answer=[answer]) == [1.0]


@installed
@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("1/2", r"$\frac{1}{3}$"),
        ("72", r"\boxed{72} no, \boxed{73}"),
        ("{1,2}", r"\boxed{\{1, 3\}}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        ("72", "no idea"),
        ("72", ""),
        ("72", "#### none of 72 or 73"),
        ("x^2", r"\boxed{x^3}"),
        ("72", "\\boxed{\\frac{"),
    ],
)
def test_unequal_answers(reward, answer, completion):
    assert reward(["p"], [completion], answer=[answer]) == [0.0]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (r"1 \boxed{\frac{1}{2}} 3", {}, r"\boxed{\frac{1}{2}}"),
        (r"1 \boxed{\frac{1}{2}} 3", {"boxed": False}, r"\frac{1}{2}"),
        (r"\boxed{2", {}, r"\boxed{2"),
        (r"\boxed{2", {"boxed_only": True}, None),
        ("1 #### 2 #### 3", {}, " 3"),
        ("1 #### 2", {"boxed_only": True}, None),
    ],
)
def test_where_an_answer_stands(text, options, expected):
    assert answer_in(text, "####", **options) == expected


@installed
def test_only_boxes_count_if_asked_for():
    reward = maths_answer(where="boxed", answer_column="truth")
    assert reward(["p"] * 2, ["7", r"\boxed{7}"], truth=["7", "7"]) == [0.0, 1.0]


@installed
def test_many_answers_at_a_time():
    reward = load_reward("maths_answer", {"parallel": 2})
    completions = [rf"\boxed{{\frac{{{number}}}{{{2 * number + number % 2}}}}}" for number in range(2, 202)]
    scores = call_reward(reward, ["p"] * 200, completions, {"answer": ["1/2"] * 200, "other": [0] * 200}, name="reward")
    assert scores.tolist() == [1.0, 0.0] * 100


@installed
@pytest.mark.parametrize("endless", ["9^{9^{9^{9}}}", r"\sum_{n=1}^{\infty} \frac{\sin(n^{n})}{n^{n!}}"])
def test_an_answer_that_takes_too_long_is_wrong(endless, monkeypatch):
    monkeypatch.setattr(module, "_SPARE_SECONDS", 1.0)
    reward = maths_answer(seconds=1.0, parallel=2)
    started = time.monotonic()
    scores = reward(["p"] * 4, ["1", rf"\boxed{{{endless}}}", "1", "1"], answer=["1", "2", "1", "2"])
    assert scores == [1.0, 0.0, 1.0, 0.0] and time.monotonic() - started < 10


@installed
def test_an_answer_that_its_process_does_not_survive_is_wrong(monkeypatch):
    def start():
        return LineProcesses(["-c", f"import os; os.kill(os.getpid(), {signal.SIGSEGV})"], os.environ)

    reward = maths_answer()
    monkeypatch.setattr(module, "_processes", start)
    assert maths_answer()(["p"], ["1"], answer=["1"]) == [0.0]
    assert reward(["p"], ["1"], answer=["1"]) == [1.0]
    with pytest.raises(ValueError, match=r"maths_answer': needs a math-verify that knows 1/2\. Got .*status -11"):
        check_maths.__wrapped__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "box"}, "Reward 'maths_answer': where must be one of any, boxed. Got 'box'. Did you mean 'boxed'?"),
        ({"marker": ""}, "Reward 'maths_answer': marker must not be empty. Got ''."),
        ({"seconds": 0.0}, "Reward 'maths_answer': seconds must lie in (0, 1e6]. Got 0.0."),
        ({"parallel": -1}, "Reward 'maths_answer': parallel must lie between 0 and 1024. Got -1."),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        maths_answer(**options)


def test_without_math_verify(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = "Reward 'maths_answer': needs math-verify. Got None. Install it: pip install 'jaxrlhf[maths]'."
    with pytest.raises(ValueError, match=re.escape(message)):
        load_reward("maths_answer", {})
