"""Pages in a real browser: what it draws, and that it complains of nothing and asks for nothing."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = "JAXRLHF_REQUIRE_BROWSER"
"""With this variable set, tests fail where there is no browser, as in CI."""


def browser_path() -> str:
    """The browser of this machine. Without one, or without playwright, the test is skipped, or fails where the
    environment requires one."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None and importlib.util.find_spec("playwright") is not None:
        return found
    reason = "playwright: pip install 'jaxrlhf[test]'" if found else "Chromium: apt-get install chromium"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but there is no {reason}")
    pytest.skip(f"needs {reason}")


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """A browser that runs."""
    path = browser_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that is open in a browser, with all that it complained of and asked for."""

    def __init__(
        self, browser: Any, path: Path, *, width: int = 1280, scheme: Literal["light", "dark"] = "light",
        scripts: bool = True,
    ) -> None:  # fmt: skip
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self._path = path

    def check(self) -> None:
        """Nothing is logged, nothing else is loaded, and nothing is wider than the window."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self._path.as_uri()]
        widths = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], "nothing sticks out"

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def outside(self, boxes: str, inner: str, outer: str) -> list[str]:
        """Of each of the elements `boxes`, the texts of `inner` that reach out of its `outer` on the screen."""
        return self.page.evaluate(
            """([boxes, inner, outer]) => [...document.querySelectorAll(boxes)].flatMap(box => {
                const frame = box.querySelector(outer).getBoundingClientRect();
                return [...box.querySelectorAll(inner)].filter(text => {
                    const own = text.getBoundingClientRect();
                    return own.left < frame.left || own.right > frame.right
                        || own.top < frame.top || own.bottom > frame.bottom;
                }).map(text => text.textContent);
            })""",
            [boxes, inner, outer],
        )
