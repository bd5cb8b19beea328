"""jaxrlhf: reinforcement learning from feedback for language models, planned and run as one JAX program.

import jaxrlhf

run = jaxrlhf.train("grpo_arithmetic", steps=20)
run.folder, run.metrics[-1], run.generate(["17+85="])
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrlhf.huge_pages import restart_with_huge_pages

if TYPE_CHECKING:
    import os

    from jaxrlhf.api import TrainedRun

if sys.argv[:1] == ["-m"]:  # Python is about to run a command of this package
    restart_with_huge_pages()

__version__ = "0.1.0"
__all__ = ["train"]


def train(
    config: "str | os.PathLike[str] | Mapping[str, Any]",
    *,
    data: "str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | None" = None,
    reward: Callable[..., Sequence[float]] | None = None,
    quiet: bool = False,
    **more: Any,
) -> "TrainedRun":
    """Executes a run in this process, like `python -m jaxrlhf.train`.

    Args:
        config: The name of a shipped config, a YAML file, or a dict. Functions can replace their names:
            `{"roles": {"reward": {"function": my_reward}}, "algorithm": my_step, ...}`.
        data: Rows in place of those of the config: a file, or a list of dicts, which is written to a file under
            `output.folder`. Or keys of `data`, merged over the config's, of which `path` and `eval_path` may be such
            lists: `{"path": rows, "eval_rows": 16, "chat": "user"}`.
        reward: The role `reward`, as a function `f(prompts, completions, **columns) -> list[float]`.
        quiet: Print nothing.
        more: Keys of the config, merged over it: `steps=20, roles={"actor": {"lora": {"rank": 16}}}`.

    Raises:
        ValueError: Config, data and plan do not fit together. Nothing was compiled.
        RuntimeError: The run could not continue: a reward function failed, or a loss was not finite.
    """
    from jaxrlhf.api import train  # imported late, since JAX is configured before its import

    return train(config, data=data, reward=reward, quiet=quiet, more=more)
