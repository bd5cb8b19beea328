"""`jaxrlhf.train` and `jaxrlhf.resume`: runs from beginning to end, and runs that go on."""

import os
from pathlib import Path
from typing import Unpack

from jaxrlhf.api.keys import Config, RunKeys, with_keys
from jaxrlhf.api.run import Run
from jaxrlhf.brief import brief
from jaxrlhf.run.checked_run import InputError


@with_keys
def train(config: Config | None = None, *, quiet: bool = False, **keys: Unpack[RunKeys]) -> Run:
    """Makes a run and takes all of its steps, like the command line. Arguments and errors are those of `Run`.

    Returns:
        The run, for `generate`, `evaluate`, `metrics` and the others.

    Example:
        >>> run = rl.train(config, steps=2, quiet=True)
        >>> run.done, len(run.rewards), sorted(path.name for path in run.folder.glob("*.jsonl"))
        (2, 2, ['metrics.jsonl', 'samples.jsonl'])
    """
    run = Run(config, quiet=quiet, **keys)
    return run.train()


@with_keys
def resume(path: str | os.PathLike[str], *, quiet: bool = False, **keys: Unpack[RunKeys]) -> Run:
    """A run that goes on from its newest checkpoint, in the same folder; or a new run from a checkpoint.

    A run that has done all of its steps can be asked (`generate`, `evaluate`, `export`), or go on with more `steps`.

    Args:
        path: The folder of a run, or of a checkpoint, `<run>/checkpoints/steps/<n>`.
        keys: Keys of the config, laid over the run's.

    Raises:
        InputError: There is no such run, or it cannot go on with these keys.

    Example:
        >>> finished = rl.train(config, steps=1, quiet=True)
        >>> longer = rl.resume(finished.folder, steps=2, quiet=True).train()
        >>> longer.done, longer.folder == finished.folder
        (2, True)
    """
    for folder in (Path(path), *Path(path).absolute().parents[:3]):
        if (folder / "config.yaml").is_file():
            return Run(folder / "config.yaml", quiet=quiet, **{"resume": os.fspath(path), **keys})
    raise InputError(
        f"resume: must be the folder of a run, or a checkpoint in one. Got {brief(os.fspath(path))}, which has no "
        "config.yaml."
    )
