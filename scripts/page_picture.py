"""A picture of a page, as documentation shows it.

python -m scripts.page_picture report.html docs/report.png --section curves --height 1000

Needs playwright and Pillow (with the extra `test`) and Chromium (apt-get install chromium).
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_COLORS = 128
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.page_picture", description="Take a picture of a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path, help="a .png file")
    parser.add_argument("--section", default="", help="the id of the element that the picture begins with")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true", help="in the dark theme")
    options = parser.parse_args(arguments)
    chromium = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if chromium is None:
        print("Error: Chromium: must be installed. Got none on PATH. Run apt-get install chromium.", file=sys.stderr)
        return 1
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--hide-scrollbars"])
        size = {"width": options.width, "height": options.height}
        page = browser.new_page(viewport=size, color_scheme="dark" if options.dark else "light")  # pyright: ignore
        fragment = f"#{options.section}" if options.section else ""
        page.goto(options.page.resolve().as_uri() + fragment)
        page.screenshot(path=options.picture)
        browser.close()
    with Image.open(options.picture) as drawn:  # a third of the bytes, and nothing to be seen of it
        drawn.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(options.picture, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
