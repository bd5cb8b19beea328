"""What is asked of a run between two steps, by signals and by the clock: the same answer in all of its processes."""

import dataclasses

from jaxrlhf.execution.channel import Channel
from jaxrlhf.run.checkpoints import Checkpoints
from jaxrlhf.run.interruption import RunStopped, StopRequest


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a run is to do now."""

    stop: bool
    """Save and stop."""
    save: bool
    """Save, since the last checkpoint is long ago."""


class Requests:
    """Looks whether the run is to stop or to save. The first process decides, by its clock; a signal to any counts."""

    def __init__(self, stop: StopRequest, checkpoints: Checkpoints, channel: Channel) -> None:
        self._stop, self._checkpoints, self._channel = stop, checkpoints, channel
        channel.on_stop = stop.make
        stop.on_request = channel.ask_to_stop
        if stop.signal is not None:
            channel.ask_to_stop(stop.signal)

    def look(self) -> Asked:
        """What is asked for by now. Every process calls this as often as the others."""
        signal, save = self._channel.share(lambda: (self._stop.signal, self._checkpoints.minutes_are_over()))
        if signal is not None:
            self._stop.make(signal)
        return Asked(signal is not None, save)

    def has_unsaved(self, unsaved: bool) -> None:
        """Takes note of something done that is not on the disk, or of everything being there.

        In a run of several processes none of them ends by itself, which the others would take for a failure.
        """
        self._stop.can_end_at_once = (
            not unsaved and self._channel.count == 1 and not self._checkpoints.are_being_written
        )

    def stopped(self, message: str) -> RunStopped:
        """What the run raises when it was asked to stop, and has saved."""
        return self._stop.stopped(message)
