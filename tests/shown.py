"""A console whose output a test can read."""

import io

from jaxrlhf.observe.console import Console


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A console on plain files, with a clock that stands still unless moved."""

    def __init__(self, quiet: bool = False, width: int = 80, encoding: str = "utf-8") -> None:
        self.out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        self.err = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        self.clock = Clock()
        self.console = Console(quiet, output=self.out, errors=self.err, width=width, clock=self.clock)

    def text(self) -> str:
        return self._read(self.out)

    def errors(self) -> str:
        return self._read(self.err)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.text().splitlines() if line.strip()]

    def _read(self, file: io.TextIOWrapper) -> str:
        file.flush()
        buffer = file.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(file.encoding)
