"""What a run writes down as it goes: metrics and samples, each step once however often the run was killed."""

import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import LENGTH, STOP, Rollout
from jaxrlhf.runtime.assembly import decode_responses
from jaxrlhf.runtime.json_lines import truncate
from jaxrlhf.runtime.metrics import MetricsWriter, read_metrics
from jaxrlhf.runtime.recovery import Position
from jaxrlhf.runtime.run_folder import RunFolder
from jaxrlhf.runtime.samples import SamplesWriter

FINISH_NAMES = {STOP: "stop", LENGTH: "length"}


class Records:
    """The files of a run that grow with it.

    Args:
        num_samples: Completions written of one rollout.
        position: Where the run goes on. Records of what came after it are dropped; None drops all.
        source: The run that this one branches off from: its records up to `position` are copied.
    """

    def __init__(
        self,
        folder: RunFolder,
        table: PromptTable,
        *,
        num_samples: int,
        position: Position | None = None,
        source: RunFolder | None = None,
    ) -> None:
        self._table, self._num_samples = table, num_samples
        for path in (folder.metrics, folder.samples):
            if source is not None and (source.path / path.name).exists():
                shutil.copyfile(source.path / path.name, path)
            truncate(path, lambda record: position is not None and position.covers(record))
        self.history: list[dict[str, Any]] = read_metrics(folder.metrics) if folder.metrics.exists() else []
        """Records of metrics from before this start."""
        self.latest_samples: list[dict[str, Any]] = []
        self._metrics = MetricsWriter(folder.metrics)
        self._samples = SamplesWriter(folder.samples)

    def write_metrics(self, done: int, metrics: Mapping[str, float]) -> None:
        """One record, after so many steps."""
        self._metrics.write(done, metrics)

    def write_samples(self, done: int, split: str, rollout: Rollout, scores: Mapping[str, np.ndarray]) -> None:
        """The first few responses of a rollout of numpy arrays, with what each scorer gave them."""
        few = jax.tree.map(lambda x: x[: self._num_samples], rollout)
        self.latest_samples = [
            {
                "prompt": self._table.prompt(int(few.row[i])),
                "completion": completion,
                "scores": {name: float(values[i]) for name, values in scores.items()},
                "finish": FINISH_NAMES[int(few.finish[i])],
            }
            for i, completion in enumerate(decode_responses(few, self._table))
        ]
        for sample in self.latest_samples:
            self._samples.write(step=done, split=split, **sample)

    def sync(self) -> None:
        """Returns when all records are on the disk: before the checkpoint that goes with them."""
        self._metrics.sync()
        self._samples.sync()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
