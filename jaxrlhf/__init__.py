"""jaxrlhf: reinforcement learning from feedback for language models, planned and run as one JAX program.

import jaxrlhf as rl

run = rl.Run("grpo_arithmetic", steps=20)
for metrics in run:
    print(metrics["critic/score/mean"])
run.folder, run.metrics, run.generate(["17+85="])
"""

import sys
from typing import TYPE_CHECKING, Any

from jaxrlhf.huge_pages import restart_with_huge_pages

if TYPE_CHECKING:
    from jaxrlhf.api.names import Run, RunEndedError, RunStopped, read_config, resume, train, write_config

if sys.argv[:1] == ["-m"]:  # Python is about to run a command of this package
    restart_with_huge_pages()

__version__ = "0.1.0"
__all__ = ["Run", "train", "resume", "RunEndedError", "RunStopped", "read_config", "write_config"]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: JAX can be configured before its import."""
    if name not in __all__:
        raise AttributeError(f"module 'jaxrlhf' has no attribute {name!r}")
    import jaxrlhf.api.names

    return getattr(jaxrlhf.api.names, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
