"""The records of a run: metrics and samples, each step once, however often the run was killed."""

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.config.schema import RunConfig
from jaxrlhf.configured.function_roles import decode_responses
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.experience import LENGTH, STOP, Rollout
from jaxrlhf.observe.json_lines import JsonLinesWriter, truncate
from jaxrlhf.observe.metrics import metrics_record, read_metrics, sample_record
from jaxrlhf.observe.trackers import Trackers
from jaxrlhf.run.resume_point import ResumePoint
from jaxrlhf.run.run_folder import RunFolder, RunFolderError
from jaxrlhf.writing import writing

FINISH_NAMES = {STOP: "stop", LENGTH: "length"}


class Records:
    """The files of metrics and samples of a run, and its trackers. Of several processes, the first one writes them.

    Records after the position from which the run is resumed are dropped. A branch copies the records of its origin
    first.
    """

    def __init__(
        self, channel: Channel, folder: RunFolder, config: RunConfig, table: PromptTable, resume: ResumePoint | None,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._table, self._num_samples, self._writes = table, config.output.num_samples, channel.is_first
        self.latest_samples: list[dict[str, Any]] = []
        self.history, self.shown_at = channel.share(lambda: self._open(folder, config, resume, warn))
        """Records of metrics from before this start, and the paths or addresses of trackers."""

    def _open(
        self, folder: RunFolder, config: RunConfig, resume: ResumePoint | None, warn: Callable[[str], None]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        position = resume.position if resume is not None else None
        for path in (folder.metrics, folder.samples):
            if resume is not None and resume.is_branch and (resume.folder.path / path.name).exists():
                with writing(path):
                    shutil.copyfile(resume.folder.path / path.name, path)
            try:
                truncate(path, lambda record: position is not None and position.covers(record))
            except (ValueError, KeyError) as error:
                raise RunFolderError(f"{error} Mend or remove the line, and resume again.") from error
        self._metrics = JsonLinesWriter(folder.metrics)
        self._samples = JsonLinesWriter(folder.samples)
        shown = (0, 0) if resume is not None else (None, None)
        if position is not None:
            shown = (position.done, None) if position.phase == "steps" else (0, position.done)
        self._trackers = Trackers(folder.path, config, resumed_at=shown[0], warm_start_resumed_at=shown[1], warn=warn)
        return read_metrics(folder.metrics), self._trackers.shown_at

    def write_metrics(self, done: int, metrics: Mapping[str, float]) -> None:
        """Writes one record, after `done` steps."""
        if not self._writes:
            return
        self._metrics.write(metrics_record(done, metrics))
        self._trackers.metrics(done, metrics)

    def write_samples(self, done: int, split: str, rollout: Rollout, scores: Mapping[str, np.ndarray]) -> None:
        """Writes the first few responses of a rollout of NumPy arrays, with the scores of each scorer."""
        if not self._writes:
            return
        few = jax.tree.map(lambda x: x[: self._num_samples], rollout)
        self.latest_samples = [
            {
                "prompt": self._table.prompts[int(few.row[i])],
                "completion": completion,
                "scores": {name: float(values[i]) for name, values in scores.items()},
                "finish": FINISH_NAMES[int(few.finish[i])],
            }
            for i, completion in enumerate(decode_responses(few, self._table))
        ]
        for sample in self.latest_samples:
            self._samples.write(sample_record(done, split, sample))
        self._trackers.samples(done, split, self.latest_samples)

    def sync(self) -> None:
        """Returns when all records are on the disk. To be called before a checkpoint."""
        if self._writes:
            self._metrics.sync()
            self._samples.sync()

    def close(self, *, failed: bool) -> None:
        """Closes all files. `failed`: the run ended by an error."""
        if self._writes:
            self._metrics.close()
            self._samples.close()
            self._trackers.close(failed=failed)
