"""The reward for code: which code of a completion counts, forms of tests, and scores of many completions at a time."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrlhf.rewards import code_tests as module
from jaxrlhf.rewards.code_tests import code_of, code_tests
from jaxrlhf.rewards.functions import call_reward, load_reward
from jaxrlhf.rewards.sandbox import SandboxError

ADD = "Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
WRONG = ADD.replace("+", "-")
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(5, 0) == 5", "assert add(-1, 1) == 0"]
ECHO = "n = int(input())\nprint(*[int(input()) * 2 for _ in range(n)], sep='\\n')"
PAIRS = [{"input": "2\n1\n2\n", "output": "2\n4\n"}, {"input": "1\n7", "output": "14"}]


def score(completion, tests, **options):
    return code_tests(**options)(["p"], [completion], tests=[tests])[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("x = 1\n", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n\ny = 3\n```\n", "x = 2\n\ny = 3"),
        ("1. As this\n   ``` Python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("```python\nx = 1\n```\n```bash\npython x.py\n```", "x = 1"),
        ("```java\nA\n```\n```c\nB\n```", "B"),
        ("```python\nx = 1\n```\nand\n```python\nx = ", "x = 1"),
        ("so\n```python\nx = 1\ny", "x = 1\ny"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_code_of(completion, expected):
    assert code_of(completion) == expected


@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (ADD, ASSERTIONS, 1.0),
        (ADD, "\n".join(ASSERTIONS), 1.0),
        (ADD, '["assert add(1, 2) == 3"]', 1.0),
        (WRONG, ASSERTIONS, 0.5 * 1 / 3),
        (WRONG, "\n".join(ASSERTIONS), 0.0),
        ("no code", ASSERTIONS, 0.0),
        ("", ASSERTIONS, 0.0),
        ("```python\nraise SystemExit\n```", ASSERTIONS, 0.0),
        ("def add(a, b):\n    while a == 5: pass\n    return a + b", ASSERTIONS, 0.5 * 1 / 3),
        (ECHO, PAIRS, 1.0),
        (ECHO, '{"inputs": ["1\\n3"], "outputs": ["6"]}', 1.0),
        (ECHO, {"input": "1\n3", "output": "  6"}, 0.0),
        (ECHO.replace("'\\n'", "'  \\n'") + "\nprint()", PAIRS, 1.0),
        (ECHO.replace("range(n)", "range(1)"), PAIRS, 0.25),
        (ECHO + "\n1 / 0", PAIRS, 0.0),
        ("print(14)", PAIRS, 0.25),
        ("if input() == '2':\n    while True: print('x' * 1000)\nprint(14)", PAIRS, 0.25),
        ("if input() == '2':\n    while True: pass\nprint(14)", PAIRS, 0.25),
    ],
)
def test_scores(completion, tests, expected):
    got = score(completion, tests, partial_credit=0.5, cpu_seconds=1, seconds=4.0, folder_mb=1)
    assert got == pytest.approx(expected)


def test_without_partial_credit_the_first_failing_program_is_the_last(tmp_path):
    slow = "import time\ntime.sleep(0.5)\n1 / 0"
    started = time.monotonic()
    assert score(slow, [{"input": "", "output": ""}] * 20) == 0.0
    assert time.monotonic() - started < 5


def test_hundreds_of_completions_at_a_time():
    endless = "while True: pass"
    completions = [ADD, WRONG, "1 / 0", ADD, ECHO] * 80
    completions[7] = completions[300] = endless
    tests = [ASSERTIONS, ASSERTIONS, ASSERTIONS, ASSERTIONS, PAIRS] * 80
    expected = [1.0, 0.0, 0.0, 1.0, 1.0] * 80
    expected[300] = 0.0
    reward = load_reward("code_tests", {"cpu_seconds": 1, "parallel": 4})
    started = time.monotonic()
    scores = call_reward(reward, ["p"] * 400, completions, {"tests": tests, "other": [0] * 400}, name="reward")
    assert scores.tolist() == expected
    assert time.monotonic() - started < 60


def test_two_batches_at_once():
    reward = code_tests(parallel=2)
    with ThreadPoolExecutor(2) as pool:
        batches = [pool.submit(reward, ["p"] * 6, [each] * 6, tests=[ASSERTIONS] * 6) for each in (ADD, WRONG)]
        assert [batch.result() for batch in batches] == [[1.0] * 6, [0.0] * 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_credit": 2.0}, "Reward 'code_tests': partial_credit must lie in [0, 1]. Got 2.0."),
        ({"seconds": 0.0}, "Reward 'code_tests': seconds must lie in (0, 1e6]. Got 0.0."),
        ({"cpu_seconds": 0}, "Reward 'code_tests': cpu_seconds must lie between 1 and 1000000. Got 0."),
        ({"memory_mb": 32}, "Reward 'code_tests': memory_mb must lie between 64 and 1000000. Got 32."),
        ({"folder_mb": 0}, "Reward 'code_tests': folder_mb must lie between 1 and"),
        ({"processes": 0}, "Reward 'code_tests': processes must lie between 1 and"),
        ({"parallel": -1}, "Reward 'code_tests': parallel must lie between 0 and"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        code_tests(**options)


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
    def refuse():
        raise SandboxError("Programs are run in Linux namespaces.")

    monkeypatch.setattr(module, "check_sandbox", refuse)
    with pytest.raises(ValueError, match=r"Reward 'code_tests': Programs are run in Linux namespaces\."):
        load_reward("code_tests", {})


@pytest.mark.parametrize(
    ("tests", "got"),
    [
        ([], "Got [] at index 0: it must be a list, and not empty."),
        (7, "Got 7 at index 0: it must be a list"),
        ("assert f(1) = 2", "Got 'assert f(1) = 2' at index 0: "),
        ("[1, ", "Got '[1, ' at index 0: Expecting value"),
        ({"input": "1"}, "Got {'input': '1'} at index 0: it must have lists under input and output, and nothing else."),
        ({"inputs": ["1"], "outputs": []}, "at index 0: zip() argument 2 is shorter than argument 1"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "at index 0: it must have lists"),
        ([{"input": "1", "output": 2}], "at index 0: all must be texts, or all pairs of texts."),
        ([{"input": "1"}], "at index 0: all must be texts"),
        (["assert True", 3], "at index 0: "),
    ],
)
def test_data_errors(tests, got):
    with pytest.raises(ValueError, match=re.escape(got)) as caught:
        score(ADD, tests)
    assert str(caught.value).startswith("code_tests: column 'tests' must hold Python statements, as text or a list of")
    assert str(caught.value).endswith("Correct the row, or set tests_column.")


def test_a_missing_column():
    with pytest.raises(ValueError, match=r"code_tests: needs a column 'checks' in every row.* Set tests_column\."):
        code_tests("checks")(["p"], [""], tests=[ASSERTIONS])
