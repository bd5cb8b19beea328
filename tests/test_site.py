"""The site: built strictly, complete, without anything from elsewhere. What is generated says what the code says."""

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrlhf
from jaxrlhf.commands.command_line import COMMANDS

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(600)
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"?([^\s\">]+)|<link\b[^>]*?\bhref=\"?([^\s\">]+)")
ADDRESS = re.compile(r"https?://([\w-]+\.)+[a-z]+(/\S*)?|http://(localhost|127\.0\.0\.1)(:\d+)?(/\S*)?")
LINKED = re.compile(r"<a\b[^>]*?\bhref=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A warning, as of a link that leads nowhere or a page that no menu has, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site):
    elsewhere = {
        (name, found) for name, text in pages(site).items() for pair in LOADED.findall(text) for found in pair
        if re.match(r"(https?:)?//", found)
    }  # fmt: skip
    assert not elsewhere
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles and not [text for text in styles if re.search(r"@import|url\(['\"]?(https?:)?//", text)]


def test_external_links_are_well_formed(site):
    links = {html.unescape(link) for text in pages(site).values() for link in LINKED.findall(text) if ":" in link}
    assert links and not [link for link in links if not ADDRESS.fullmatch(link)]


def test_every_page_of_the_docs_is_on_the_site(site):
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {name for name in names if not (site / name / "index.html").exists()} == set()
    assert all((site / "notebooks" / path.stem / "index.html").exists() for path in ROOT.glob("notebooks/*.ipynb"))


def test_links_to_source_files_lead_to_pages_of_them(site):
    page = (site / "architecture" / "index.html").read_text(encoding="utf-8")
    assert "../jaxrlhf/execution/executor.py/" in page
    source = (site / "jaxrlhf" / "execution" / "executor.py" / "index.html").read_text(encoding="utf-8")
    assert "def run" in re.sub(r"<[^>]+>", "", source)


def test_every_public_name_is_documented(site):
    page = (site / "python" / "index.html").read_text(encoding="utf-8")
    there = set(re.findall(r"<h3\b[^>]*? id=\"?jaxrlhf\.(\w+)", page))
    assert there >= set(jaxrlhf.__all__)


def test_every_option_of_every_command_is_documented(site):
    page = html.unescape((site / "commands" / "index.html").read_text(encoding="utf-8"))
    for name, command in COMMANDS.items():
        assert f"jaxrlhf {name}" in page
        for action in importlib.import_module(command.module).parser()._actions:
            assert all(option in page for option in action.option_strings), (name, action.option_strings)
