"""A picture of a run's timeline.

jaxrlhf timeline RUN_FOLDER_OR_TRACE [--steps 3-5] [--out timeline.png]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrlhf.observe.chrome_trace import TraceError, read_rows
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.timeline_picture import check_matplotlib, draw_timeline
from jaxrlhf.observe.timeline_view import PictureError, choose_steps
from jaxrlhf.run.run_folder import RunFolder


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="jaxrlhf timeline", description="Draw the timeline of a run.")
    parser.add_argument("run", metavar="RUN_FOLDER_OR_TRACE", type=Path, help="such as runs/latest")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="such as 3-5, or 7; otherwise the last three")
    parser.add_argument("--out", metavar="PICTURE", type=Path, help="otherwise timeline.png, beside the trace")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 1 after an error that the user can mend."""
    options = parser().parse_args(arguments)
    console = Console()
    try:
        check_matplotlib()  # before a long trace is read
        trace = RunFolder(options.run).timeline if options.run.is_dir() else options.run
        rows = read_rows(trace)
        picture = options.out or trace.with_name("timeline.png")
        draw_timeline(rows, picture, steps=choose_steps(rows, options.steps), title=trace.resolve().parent.name)
    except (TraceError, PictureError, OSError) as error:
        console.error(str(error))
        return 1
    console.line(f"Drawn to {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
