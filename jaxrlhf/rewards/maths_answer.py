"""The reward for mathematics: answers that are equal in whatever form, by math-verify in processes of its own."""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from jaxrlhf.require import require
from jaxrlhf.rewards.line_process import LineProcesses, ProcessEnded
from jaxrlhf.rewards.numbers import last_box
from jaxrlhf.rewards.verifiers import RewardFunction, column, require_choice
from jaxrlhf.rewards.workers import share_out

_PROCESS = Path(__file__).with_name("maths_process.py")
"""Not imported here: it needs math-verify."""
_SPARE_SECONDS = 5.0
"""How much longer than its time a process may take before it is ended: it may have to import sympy first."""


def maths_answer(
    answer_column: str = "answer", where: str = "any", marker: str = "####", seconds: float = 5.0, parallel: int = 0
) -> RewardFunction:
    r"""1 if the answer of a completion equals that of the answer column as mathematics, else 0.

    Fractions, decimals, roots, sets, intervals, tuples and expressions are equal in any form, LaTeX or plain. `where`
    is the place of the answer: in the last `\boxed{}` (`boxed`); or `any`: that, or else after the last `marker`, or
    else what math-verify takes for the answer of the text. The answer column may hold the bare answer, or a text with
    a box or marker. An answer that takes longer than `seconds` is wrong. `parallel` completions are compared at a
    time; 0 means as many as there are CPUs.
    """
    name = "Reward 'maths_answer'"
    require_choice("maths_answer", "where", where, ("any", "boxed"))
    require(marker != "", name, "marker must not be empty", marker)
    require(0 < seconds <= 1e6, name, "seconds must lie in (0, 1e6]", seconds)
    require(0 <= parallel <= 1024, name, "parallel must lie between 0 and 1024", parallel)
    found = importlib.util.find_spec("math_verify")
    require(found is not None, name, "needs math-verify", found, "Install it: pip install 'jaxrlhf[maths]'.")
    check_maths()
    at_a_time, processes = parallel or len(os.sched_getaffinity(0)), _processes()

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        answers = [str(answer) for answer in column("maths_answer", columns, answer_column)]
        scores = [0.0] * len(completions)

        def score(index: int) -> None:
            given = answer_in(completions[index], marker, boxed_only=where == "boxed")
            right = answer_in(answers[index], marker, boxed=False)
            scores[index] = float(given is not None and _equal(processes, right or "", given, seconds))

        share_out(score, [index for index, text in enumerate(completions) if text.strip()], at_a_time)
        return scores

    return reward


def answer_in(text: str, marker: str, *, boxed_only: bool = False, boxed: bool = True) -> str | None:
    r"""The part of a text in which its answer stands: the last \boxed{}, which is left out unless `boxed`; what follows
    the last marker; or all of it. With `boxed_only`, None without a box."""
    content = last_box(text)
    if content is not None:
        return rf"\boxed{{{content}}}" if boxed else content
    return None if boxed_only else text.rpartition(marker)[2]


@functools.cache
def check_maths() -> None:
    """Checks that math-verify works here. Raises ValueError if not."""
    try:
        works = _equal(_processes(), "1/2", r"\boxed{\frac{2}{4}}", 60.0, ended_is_wrong=False)
    except ProcessEnded as error:
        works = error
    rule, remedy = "needs a math-verify that knows 1/2", "Install it anew: pip install 'jaxrlhf[maths]'."
    require(works is True, "Reward 'maths_answer'", rule, works, remedy)


def _processes() -> LineProcesses:
    return LineProcesses(["-P", str(_PROCESS)], os.environ)


def _equal(processes: LineProcesses, right: str, given: str, seconds: float, *, ended_is_wrong: bool = True) -> bool:
    """True if answers are equal. Of those that their process does not survive, or not in time, it is said that they are
    not, unless that is to be an error."""
    request = {"answer": right, "given": given, "seconds": seconds}
    try:
        reply = processes.ask(request, seconds=seconds + _SPARE_SECONDS)
    except ProcessEnded:
        if ended_is_wrong:
            return False
        raise
    return reply is not None and reply["right"]
