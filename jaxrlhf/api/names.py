"""All public names of the package, imported: `jaxrlhf.__getattr__` looks them up here when they are first used."""

from jaxrlhf.api.configs import read_config, write_config
from jaxrlhf.api.run import Run, RunEndedError, resume, train
from jaxrlhf.run.interruption import RunStopped

__all__ = ["Run", "train", "resume", "RunEndedError", "RunStopped", "read_config", "write_config"]
