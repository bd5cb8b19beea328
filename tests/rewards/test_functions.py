"""Finding reward functions by name, passing them what they take, and refusing what they must not return."""

import asyncio
import pathlib
import re
import sys
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.rewards.functions import RewardError, call_reward, call_token_reward, check_reward, load_reward

SOURCE = """
import dataclasses

@dataclasses.dataclass
class Record:
    text: str

def longest(prompts, completions, weight=1.0, **columns):
    return [weight * len(Record(completion).text) for completion in completions]

def strict(prompts, completions, answer):
    return [float(completion == right) for completion, right in zip(completions, answer)]

NUMBER = 3
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return str(tmp_path / "mine.py")


def call(function, completions=("x", "yy"), name="f", **columns):
    return call_reward(function, ["p0", "p1"][: len(completions)], list(completions), columns, name=name)


def test_built_in():
    reward = load_reward("exact_answer", {"partial_credit": 0.5})
    scores = call(reward, [">12", ">13"], answer=["12", "12"], finished=[True, True])
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [1.0, 0.25])


def test_function_of_a_file(source):
    np.testing.assert_array_equal(call(load_reward(f"{source}:longest", {})), [1, 2])
    np.testing.assert_array_equal(call(load_reward(f"{source}:longest", {"weight": 2.5}), level=[1, 2]), [2.5, 5])


def test_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "reward_module_for_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("reward_module_for_test:strict", {})
    np.testing.assert_array_equal(call(reward, answer=["x", "x"], finished=[True, True]), [1, 0])


def test_a_function_gets_the_columns_it_names():
    seen = {}

    def named(questions, texts, *, level):
        seen.update(questions=questions, texts=texts, level=level)
        return [0, 0]

    def everything(prompts, completions, **columns):
        seen.update(columns)
        return [0, 0]

    def completions_only(completions, **columns):
        seen.update(columns, completions=completions)
        return [0, 0]

    call(named, level=[1, 2], other=[3, 4], texts=["no", "no"])
    assert seen == {"questions": ["p0", "p1"], "texts": ["x", "yy"], "level": [1, 2]}
    seen.clear()
    call(everything, level=[1, 2], other=[3, 4])
    assert seen == {"level": [1, 2], "other": [3, 4]}
    seen.clear()
    call(completions_only, level=[1, 2])
    assert seen == {"level": [1, 2], "prompts": ["p0", "p1"], "completions": ["x", "yy"]}


def test_options_win_over_columns_of_the_same_name(source):
    reward = load_reward(f"{source}:longest", {"weight": 3})
    np.testing.assert_array_equal(call(reward, weight=[7, 7]), [3, 6])


@pytest.mark.parametrize(
    "rewards",
    [
        [1, 0.5],
        (True, 0.5),
        np.array([1, 0.5]),
        [np.float64(1), np.array(0.5)],
        jnp.array([1, 0.5], jnp.bfloat16),
        [jnp.array(1), 0.5],
    ],
)
def test_what_may_be_returned(rewards):
    np.testing.assert_array_equal(call(lambda prompts, completions: rewards), [1, 0.5])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (None, "Reward 'f': must return a list of 2 numbers. Got None."),
        ("ab", "must return a list of 2 numbers. Got 'ab'."),
        ({0: 1, 1: 1}, "must return a list of 2 numbers. Got {0: 1, 1: 1}."),
        ({1, 2}, "must return a list of 2 numbers. Got {1, 2}."),
        (3.0, "must return a list of 2 numbers. Got 3.0."),
        (np.array(3.0), "must return a list of 2 numbers. Got array(3.)."),
        ([1.0], "Reward 'f': must return one number for each of 2 completions. Got 1."),
        ([1.0, None], "Reward 'f': must return finite numbers. Got None at index 1 for prompt 'p1', completion 'yy'."),
        ([float("nan"), 1], "must return finite numbers. Got nan at index 0 for prompt 'p0', completion 'x'."),
        ([1, float("inf")], "must return finite numbers. Got inf at index 1"),
        ([1, 1e39], "must return finite numbers. Got 1e+39 at index 1"),
        ([1, 10**400], "must return finite numbers. Got 1000"),
        (["1.0", 1], "must return finite numbers. Got '1.0' at index 0"),
        ([[1.0], [2.0, 3.0]], "must return finite numbers. Got [1.0] at index 0"),
        ([1j, 1], "must return finite numbers. Got 1j at index 0"),
        (np.array(["1", "2"]), "must return finite numbers. Got np.str_('1') at index 0"),
        (jnp.array([1, jnp.nan]), "must return finite numbers. Got np.float32(nan) at index 1 for prompt 'p1'"),
        (np.ones((2, 1)), "must return finite numbers. Got array([1.]) at index 0"),
    ],
)
def test_what_may_not_be_returned(rewards, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        call(lambda prompts, completions: rewards)


def test_a_number_for_each_token():
    halves: Any = lambda completions, num_tokens: [[0.5] * n for n in num_tokens]  # noqa: E731
    got = call_token_reward(halves, ["p", "q"], ["x", "yy"], {"num_tokens": [1, 2]}, name="mine")
    assert [x.tolist() for x in got] == [[0.5], [0.5, 0.5]] and got[0].dtype == np.float32


@pytest.mark.parametrize("wrong", [[1.0, 2.0, 3.0], 1.0, "ab", [1.0, float("nan")], [None, 1.0]])
def test_what_may_not_be_returned_for_tokens(wrong):
    message = (
        f"Reward 'mine': must return, for each completion, a list of as many finite numbers as it has tokens. Got "
        f"{wrong!r} at index 1, of 2 tokens, for prompt 'q', completion 'yy'."
    )
    function: Any = lambda completions: [[0.5], wrong]  # noqa: E731
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        call_token_reward(function, ["p", "q"], ["x", "yy"], {"num_tokens": [1, 2]}, name="mine")


def test_long_texts_are_shortened():
    with pytest.raises(RewardError) as caught:
        call(lambda prompts, completions: [None], ["z" * 5000])
    assert "completion 'zzz" in str(caught.value) and len(str(caught.value)) < 300


def test_a_raising_function_is_named_and_chained():
    with pytest.raises(RewardError, match=r"Reward 'mine': must not raise\. Got ZeroDivisionError: divis") as caught:
        call(lambda prompts, completions: [1 / 0], name="mine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


LIBRARY_ERRORS = """
import asyncio
import json

def reward(completions):
    return [parsed(completion) for completion in completions]

def parsed(completion):
    return json.loads(completion)["score"]

async def judged(completions):
    await asyncio.sleep(0)
    return [parsed(completion) for completion in completions]
"""


@pytest.mark.parametrize("name", ["reward", "judged"])
@pytest.mark.parametrize("options", [{}, {"weight": 2}], ids=["plain", "partial"])
def test_an_error_names_the_user_s_own_line(tmp_path, name, options):
    (tmp_path / "mine.py").write_text(LIBRARY_ERRORS.replace("(completions)", "(completions, weight=1)"))
    with pytest.raises(RewardError, match=rf"Got JSONDecodeError: .*, at {tmp_path}/mine\.py:9\.$"):
        call(load_reward(f"{tmp_path}/mine.py:{name}", options), name="mine")


def test_of_an_installed_function_it_names_the_line_in_its_file(tmp_path):
    (tmp_path / "site-packages").mkdir()
    path = tmp_path / "site-packages" / "installed.py"
    path.write_text(LIBRARY_ERRORS)
    with pytest.raises(RewardError, match=rf"Got JSONDecodeError: .*, at {path}:9\.$"):
        call(load_reward(f"{path}:reward", {}))


def test_an_async_function_is_awaited():
    seen = []

    async def one(completion):
        seen.append(completion)
        await asyncio.sleep(0.001)
        assert len(seen) == 2  # both have begun
        return len(completion)

    async def whole(prompts, completions):
        return await asyncio.gather(*map(one, completions))

    async def in_parts(prompts, completions):
        return [one(completion) for completion in completions]

    class Judge:
        async def __call__(self, completions):
            return await whole([], completions)

    async def inside_of_a_loop():
        return call(whole)

    functions: list[Any] = [whole, in_parts, lambda completions: [one(c) for c in completions], Judge()]
    for function in functions:
        seen.clear()
        np.testing.assert_array_equal(call(function), [1, 2])
    seen.clear()
    np.testing.assert_array_equal(asyncio.run(inside_of_a_loop()), [1, 2])

    async def sleeps(completions):
        await asyncio.sleep(0.5)

    with pytest.raises(RewardError, match=r"must return within 0\.05 seconds for 1 completions"):
        slow: Any = sleeps
        call_reward(slow, ["p"], ["x"], {}, name="mine", timeout_seconds=0.05)

    async def cancelled(completions):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match=r"must not raise\. Got CancelledError"):
        call(cancelled)


def test_a_function_that_yields_is_refused_before_the_call():
    def yields(completions):
        yield from completions

    async def yields_later(completions):
        for completion in completions:
            yield completion

    functions: list[Any] = [yields, yields_later]
    for function in functions:
        with pytest.raises(
            ValueError, match=r"^Reward 'mine': must return a list of scores\. Got a function that yields"
        ):
            check_reward(function, [], name="mine")


def test_a_function_that_takes_too_long_is_named():
    finished = threading.Event()

    def slow(prompts, completions):
        finished.wait(60)
        return [0, 0]

    message = (
        "Reward 'mine': must return within 0.05 seconds for 2 completions. Got nothing by then. Raise "
        "roles.mine.timeout_seconds, or set it to 0 to wait for ever."
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        call_reward(slow, ["p", "q"], ["x", "y"], {}, name="mine", timeout_seconds=0.05)
    finished.set()


def test_within_its_time_a_function_is_what_it_was(source):
    def timed(function):
        return call_reward(function, ["p", "q"], ["x", "y"], {}, name="mine", timeout_seconds=60)

    np.testing.assert_array_equal(timed(lambda prompts, completions: [1, 2]), [1, 2])
    with pytest.raises(RewardError, match=r"must not raise\. Got ZeroDivisionError: .*test_functions\.py:"):
        timed(lambda prompts, completions: [1 / 0])
    with pytest.raises(RewardError, match=r"must not raise\. Got SystemExit: 3"):
        timed(lambda prompts, completions: sys.exit(3))


def test_a_missing_column_is_found_before_the_call(source):
    reward = load_reward(f"{source}:strict", {})
    check_reward(reward, ["answer", "finished"], name="strict")
    message = r"Reward 'strict': its arguments must be .* Got 'answer'\. Columns: answers\. Did you mean 'answers'\?"
    with pytest.raises(ValueError, match=message):
        check_reward(reward, ["answers"], name="strict")
    with pytest.raises(ValueError, match=r"Got 'answer'\. Columns: none\.$"):
        call(reward)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "exact_anser",
            {},
            r"Reward: must be built in, module:function .* Got 'exact_anser'\. Built in: .* "
            r"Did you mean 'exact_answer'\?",
        ),
        (
            "exact_answer",
            {"partial": 1},
            r"Reward 'exact_answer': options must be arguments of it\. Got 'partial'\. "
            r"Known: partial_credit, .*separator\. Did you mean 'partial_credit'\?",
        ),
        (
            "exact_answer",
            {"partial_credit": "x"},
            r"Reward 'exact_answer': partial_credit must be of type float. Got 'x'",
        ),
        ("final_number", {"marker": 5}, r"Reward 'final_number': marker must be of type str\. Got 5\."),
        ("length_penalty", {"target": True, "scale": 1}, r"'length_penalty': target must be of type int\. Got True\."),
        ("regex_format", {}, r"Reward 'regex_format': needs the option 'pattern'\. Got none\."),
        ("no_such_module_here:f", {}, r"Reward .*: its module must import\. Got ModuleNotFoundError: No module"),
        ("/nowhere/x.py:f", {}, r"Reward .*: must be in an existing file\. Got '/nowhere/x\.py'\."),
        (
            "MINE:longst",
            {},
            r"must name a function of .*mine\.py\. Got 'longst'\. There: Record, longest, strict\. "
            r"Did you mean 'longest'\?",
        ),
        ("MINE:NUMBER", {}, r"must name a function\. Got int 3\."),
        ("MINE:strict", {"answr": 1}, r"options must be .* Got 'answr'\. Known: answer\. Did you mean 'answer'\?"),
        ("MINE:longest", {"prompts": 1}, r"options must be arguments of it\. Got 'prompts'\. Known: weight\."),
    ],
)
def test_load_errors(source, name, options, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name.replace("MINE", source), options)


def test_a_file_whose_import_fails_in_a_library_names_its_own_line(tmp_path):
    (tmp_path / "bad.py").write_text("import json\nSETTINGS = json.loads('x')\n")
    with pytest.raises(
        ValueError, match=r"its module must import\. Got JSONDecodeError: .*, at .*bad\.py:2\."
    ) as caught:
        load_reward(f"{tmp_path}/bad.py:f", {})
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_gsm8k_example():
    path = pathlib.Path(__file__).parents[2] / "examples" / "gsm8k_reward.py"
    reward = load_reward(f"{path}:gsm8k_reward", {})
    answer = ["24+48\n#### 72", "#### 1,000"]
    np.testing.assert_array_equal(call(reward, ["#### 5\n#### 72", "#### $1000."], answer=answer), [1, 1])
    np.testing.assert_allclose(call(reward, ["#### 7", "1000"], answer=answer, question=["?", "?"]), [0.1, 0])
    np.testing.assert_allclose(
        call(load_reward(f"{path}:gsm8k_reward", {"format_credit": 0.5}), ["#### 7"], answer=answer[:1]), [0.5]
    )


def test_a_function_that_raises_what_ctrl_c_raises_is_an_error_of_one_line():
    def interrupted(completions):
        raise KeyboardInterrupt("first\nsecond")

    with pytest.raises(RewardError, match=r"must not raise\. Got KeyboardInterrupt: first second, at .*:\d+\.$"):
        call_reward(interrupted, ["p"], ["c"], {}, name="interrupted", timeout_seconds=5.0)
