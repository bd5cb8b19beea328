"""What is asked of a run between two steps, by signals and by the clock: the same answer in all of its processes."""

import dataclasses

from jaxrlhf.runtime.channel import Channel
from jaxrlhf.runtime.checkpoints import Checkpoints
from jaxrlhf.runtime.interruption import RunStopped, StopRequest


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
        self._told = False
        channel.on_stop = stop.make

    def look(self) -> Asked:
        """What is asked for by now. Every process calls this as often as the others."""
        if self._stop.signal is not None and not self._told:
            self._channel.ask_to_stop(self._stop.signal)
            self._told = True
        signal, save = self._channel.share(lambda: (self._stop.signal, self._checkpoints.minutes_are_over()))
        if signal is not None:
            self._stop.make(signal)
        return Asked(signal is not None, save)

    def stopped(self, message: str) -> RunStopped:
        """What the run raises when it was asked to stop, and has saved."""
        return self._stop.stopped(message)
