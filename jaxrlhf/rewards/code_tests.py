"""The reward for code: completions are run against the tests of their rows, in sandboxes."""

import ast
import dataclasses
import json
import math
import os
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.require import errors_as, require
from jaxrlhf.rewards.sandbox import Limits, Program, Result, Sandbox, SandboxError, check_sandbox
from jaxrlhf.rewards.verifiers import RewardFunction, column
from jaxrlhf.rewards.workers import share_out

_PYTHON = ("", "py", "python", "python3")
_SPARE_BYTES = 1024
"""How much longer than twice the expected output a program's may be, before white space is removed."""


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of a row: assertions, or pairs of standard input and output."""

    assertions: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.assertions) + len(self.pairs)


def code_tests(
    tests_column: str = "tests",
    partial_credit: float = 0.0,
    cpu_seconds: int = 5,
    seconds: float = 15.0,
    memory_mb: int = 1024,
    folder_mb: int = 64,
    processes: int = 16,
    parallel: int = 0,
) -> RewardFunction:
    """Runs the Python code of a completion against the tests of its row.

    1                                  all tests pass
    partial_credit * passed / tests    else

    The code is the last fenced block of a completion, or all of it. Each test, or all assertions of a row together, run
    within `cpu_seconds`; all tests of a completion within `seconds`. `parallel` completions run at a time; 0 means
    as many as there are CPUs.
    """
    name = "Reward 'code_tests'"
    require(0 <= partial_credit <= 1, name, "partial_credit must lie in [0, 1]", partial_credit)
    require(0 < seconds <= 1e6 and math.isfinite(seconds), name, "seconds must lie in (0, 1e6]", seconds)
    for option, value, least in (
        ("cpu_seconds", cpu_seconds, 1),
        ("memory_mb", memory_mb, 64),
        ("folder_mb", folder_mb, 1),
        ("processes", processes, 1),
        ("parallel", parallel, 0),
    ):
        require(least <= value <= 10**6, name, f"{option} must lie between {least} and 1000000", value)
    with errors_as(ValueError, f"{name}: ", SandboxError):
        check_sandbox()
    sandbox = Sandbox(Limits(cpu_seconds, seconds, memory_mb, folder_mb, processes))
    at_a_time = parallel or len(os.sched_getaffinity(0))

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        given = column("code_tests", columns, tests_column, "tests_column")
        tests = [_read_tests(each, f"index {index}", tests_column) for index, each in enumerate(given)]
        codes = [code_of(completion) for completion in completions]
        scores = [0.0] * len(codes)

        def score(index: int) -> None:
            passed, total = _passed(sandbox, codes[index], tests[index], stop=partial_credit == 0), len(tests[index])
            scores[index] = 1.0 if passed == total else partial_credit * passed / total

        share_out(score, [index for index, code in enumerate(codes) if code.strip()], at_a_time)
        return scores

    return reward


def code_of(completion: str) -> str:
    """The code of a completion: its last fenced block of Python or of no language, else its last one, else all of it.

    >>> code_of("First:\\n```python\\nx = 1\\n```\\nThen run it:\\n```bash\\npython x.py\\n```")
    'x = 1'
    """
    blocks: list[tuple[str, list[str]]] = []
    language, inside = "", None
    for line in completion.splitlines():
        text = line.strip()
        if inside is None and text.startswith("```"):
            language, inside = text.strip("`").strip().lower(), []
        elif inside is not None and text == "```":
            blocks.append((language, inside))
            inside = None
        elif inside is not None:
            inside.append(line)
    if not blocks:  # one that is cut off
        return completion if inside is None else textwrap.dedent("\n".join(inside))
    python = [lines for language, lines in blocks if language in _PYTHON]
    return textwrap.dedent("\n".join(python[-1] if python else blocks[-1][1]))


def _read_tests(given: Any, where: str, name: str) -> Tests:
    """The tests of a row, in any of their forms."""
    value: Any = given
    try:
        if isinstance(given, str):
            value = json.loads(given) if given.lstrip()[:1] in ("[", "{") else [given]
        if isinstance(value, Mapping):
            inputs, outputs = (value.get(key, value.get(f"{key}s")) for key in ("input", "output"))
            if isinstance(inputs, str) and isinstance(outputs, str):
                inputs, outputs = [inputs], [outputs]
            if not _is_list(inputs) or not _is_list(outputs) or value.keys() - {"input", "inputs", "output", "outputs"}:
                raise ValueError("it must have lists under input and output, and nothing else")
            value = [{"input": x, "output": y} for x, y in zip(inputs, outputs, strict=True)]
        if not _is_list(value) or not len(value):
            raise ValueError("it must be a list, and not empty")
        if all(isinstance(each, str) for each in value):
            for each in value:
                ast.parse(each)
            return Tests(assertions=tuple(value))
        pairs = [(each["input"], each["output"]) for each in value if each.keys() == {"input", "output"}]
        if len(pairs) < len(value) or not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ValueError("all must be texts, or all pairs of texts")
        return Tests(pairs=tuple(pairs))
    except (ValueError, SyntaxError, AttributeError) as error:
        raise ValueError(
            f"code_tests: column {brief(name)} must hold Python statements, as text or a list of texts, or a list of "
            f"{{input: text, output: text}}; or either as JSON. Got {brief(given)} at {where}: {error}. Correct the "
            "row, or set tests_column."
        ) from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _passed(sandbox: Sandbox, code: str, tests: Tests, *, stop: bool) -> int:
    """The number of tests that pass. `stop`: one that fails may end the count."""
    if tests.assertions:
        token = secrets.token_hex(16)
        expected = {f"{token} {index}" for index in range(len(tests))}
        keep = sum(len(line) + 1 for line in expected)
        results = sandbox.run([Program(code, "", tests.assertions, token, keep)], stop=stop)
        return len({line for result in results for line in result.report.splitlines()} & expected)
    programs = [
        Program(code, stdin, keep=2 * len(stdout.encode(errors="replace")) + _SPARE_BYTES)
        for stdin, stdout in tests.pairs
    ]
    results = sandbox.run(programs, stop=stop)
    pairs = zip(results, tests.pairs, strict=False)  # those after one that took too long have no result
    return sum(_prints(result, stdout) for result, (_, stdout) in pairs)


def _prints(result: Result, expected: str) -> bool:
    """True if a program ended well and printed what is expected, apart from white space at the ends of lines."""
    return result.status == 0 and _lines(result.printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
