"""A report of a run, or of several side by side: one HTML page that needs nothing else.

jaxrlhf report RUN [RUN ...] [--out report.html] [--steps 3-5]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxrlhf.observe.console import Console
from jaxrlhf.pages.report_page import report_page
from jaxrlhf.pages.run_files import ReportError, RunFiles, read_run
from jaxrlhf.run.run_folder import RunFolder, RunFolderError
from jaxrlhf.writing import UnwritableError, write_atomically


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxrlhf report", description="Write a page about a run, or several side by side."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs, such as runs/latest")
    parser.add_argument(
        "--out", metavar="PAGE.HTML", type=Path, default=Path("report.html"), help="otherwise report.html, here"
    )
    parser.add_argument("--steps", metavar="FIRST-LAST", help="of the timelines; otherwise the last three")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 1 after an error that the user can mend."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        if options.out.is_dir() or options.out.suffix not in (".html", ".htm"):
            raise ReportError(f"--out: must be a file whose name ends in .html. Got {str(options.out)!r}.")
        runs = read_runs(options.runs)
        write_atomically(options.out, report_page(runs, steps=options.steps))
    except (ValueError, OSError, UnwritableError) as error:
        console.error(str(error))
        return 1
    for run in runs:
        for note in run.notes:
            console.line(f"Note: {run.path}: {note}")
    console.line(f"Written to {options.out}")
    return 0


def read_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """The files of runs, each under a name of its own. Raises as `read_run`, and ReportError if one is named twice."""
    whole = [path.resolve() for path in paths]
    if twice := [str(path) for path, count in Counter(whole).items() if count > 1]:
        raise ReportError(f"runs: must be named once. Got {twice[0]} more than once. Leave the others out.")
    names = Counter(path.name for path in whole)
    return [
        read_run(
            path, is_running=_is_running(path),
            name=real.name if names[real.name] == 1 else f"{real.parent.name}/{real.name}",
        )
        for path, real in zip(paths, whole, strict=True)
    ]  # fmt: skip


def _is_running(path: Path) -> bool:
    try:
        RunFolder(path).check_free()
    except RunFolderError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
