"""Pages of the site that nobody writes: source files that pages link to, notebooks, and what is read from the code.

A hook of MkDocs. Pages link to the repository's files as GitHub resolves these links (`../jaxrlhf/train.py`). There is
no public address of the repository, so each linked file becomes a page of the site, under its path in the repository.
A page gets what the code says by a comment of HTML, which GitHub does not show:

    <!-- from the code: public names -->        the names of `jaxrlhf.__all__`, with signatures and docstrings
    <!-- from the code: commands -->            the options of each command
    <!-- from the code: python MODULE -->       the functions and classes of a module
"""

import argparse
import html
import importlib
import json
import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from jaxrlhf.commands.command_line import COMMANDS

LOG = logging.getLogger(f"mkdocs.hooks.{__name__}")
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", "": "bash"}
PICTURES = (".png", ".svg")
SECTIONS = ("Config", "Update", "Limits", "Lengths", "Scaling", "Placement", "Strategy", "Tail", "Sampling", "Penalty")
"""How names of dataclasses end whose fields are keys of a config."""
FENCE = re.compile(r"^(```.*?^```)", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FROM_THE_CODE = re.compile(r"^<!-- from the code: (.*) -->$", flags=re.MULTILINE)


def github_slug(heading: str, separator: str) -> str:
    """The fragment by which GitHub finds a heading, so that a link holds there and on the site."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"]["slugify"] = github_slug
    tutorials = next(section["Tutorials"] for section in config.nav or [] if "Tutorials" in section)
    tutorials.extend(f"notebooks/{path.name}" for path in _notebooks())
    return config


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    in_nav = set(re.findall(r"[\w./]+\.md", str(config.nav)))
    files_of_ours = [ROOT / uri for uri in in_nav if not (DOCS / uri).exists() and (ROOT / uri).exists()]
    reading = [*DOCS.glob("*.md"), *files_of_ours, *_notebooks()]
    linked = set(files_of_ours)
    while reading:
        found = {path for path in _targets(reading.pop()) if not path.is_relative_to(DOCS)} - linked
        found |= {path for folder in found if folder.is_dir() for path in folder.iterdir() if path.is_file()} - linked
        linked |= found
        reading += [path for path in found if path.suffix == ".md"]
    for path in _notebooks():
        files.append(File(_uri(path), str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted(linked - set(_notebooks())):
        files.append(_source_page(path, config, in_nav))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(match: re.Match[str]) -> str:
        return f"]({_on_the_site(match[1], here, page.file.src_uri)})"

    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    here = ROOT / page.file.src_uri if page.file.generated_by else DOCS / page.file.src_uri
    parts = FENCE.split(markdown)
    parts[::2] = [FROM_THE_CODE.sub(lambda match: _from_the_code(match[1]), LINK.sub(link, x)) for x in parts[::2]]
    return "".join(parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links in notebooks, which come as HTML."""

    def link(match: re.Match[str]) -> str:
        path, _, fragment = html.unescape(match[1]).partition("#")
        if not path or _is_elsewhere(path):
            return match[0]
        target = files.get_file_from_path(_uri((ROOT / page.file.src_uri).parent.joinpath(path).resolve()))
        if target is None:
            LOG.warning("%s links to %s, which is not there", page.file.src_uri, path)
            return match[0]
        return f'href="{target.url_relative_to(page.file)}{"#" if fragment else ""}{fragment}"'

    return re.sub(r'href="([^"]+)"', link, content) if page.file.src_uri.endswith(".ipynb") else content


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def _is_elsewhere(link: str) -> bool:
    return re.match(r"[a-z]+:|#", link) is not None


def _targets(page: Path) -> list[Path]:
    """The files and folders of the repository that a page or a notebook links to."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [link.partition("#")[0] for link in LINK.findall(FENCE.sub("", text)) if not _is_elsewhere(link)]
    return [path for link in links if (path := (page.parent / link).resolve()).exists()]


def _uri(path: Path) -> str:
    """The name of a file's page among the files of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix in (".md", ".ipynb", *PICTURES) else f"{name}.md"


def _on_the_site(link: str, here: Path, uri: str) -> str:
    """A link as it is written in the repository's file `here`, from the page `uri` of the site."""
    path, _, fragment = link.partition("#")
    target = (here.parent / path).resolve()
    if _is_elsewhere(link) or not target.is_relative_to(ROOT):
        return link
    to = posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".")
    return f"{to}#{fragment}" if fragment else to


def _source_page(path: Path, config: MkDocsConfig, in_nav: set[str]) -> File:
    """The page of a file or folder of the repository: Markdown as it is, everything else as code."""
    name, uri = path.relative_to(ROOT).as_posix(), _uri(path)
    if path.suffix in PICTURES:
        return File.generated(config, uri, abs_src_path=str(path))
    if path.is_dir():
        inner = [f"- [{x.name}]({posixpath.basename(name)}/{x.name})" for x in sorted(path.iterdir()) if x.is_file()]
        content = "\n".join([f"# {name}", "", *inner])
    elif path.suffix == ".md":
        content = path.read_text(encoding="utf-8")
    else:
        language = LANGUAGES.get(path.suffix, "text")
        code = path.read_text(encoding="utf-8").rstrip()
        content = f'# {name}\n\n````{language} linenums="1"\n{code}\n````\n'
    if uri not in in_nav:
        content = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n{content}"
    inclusion = InclusionLevel.UNDEFINED if uri in in_nav else InclusionLevel.NOT_IN_NAV
    return File.generated(config, uri, content=content, inclusion=inclusion)


def _from_the_code(what: str) -> str:
    kind, _, argument = what.partition(" ")
    makers: dict[str, Callable[[], str]] = {
        "python": lambda: f"::: {argument}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}\n",
        "public": _public_names,
        "commands": _commands,
    }
    return makers[kind]()


def _public_names() -> str:
    """A directive of mkdocstrings for each name of `jaxrlhf.__all__`, under its comments as headings. Of dataclasses
    whose fields are keys of a config, the signature alone: docs/configuration.md has what they mean."""
    source = (ROOT / "jaxrlhf" / "__init__.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^__all__ = \[(.*?)\]", source, flags=re.MULTILINE | re.DOTALL)
    parts = []
    for heading, name in re.findall(r"# (.*)|\"(\w+)\"", listed):
        if heading:
            parts.append(f"## {heading[:1].upper()}{heading[1:]}\n")
        else:
            options = "    options: {members: false}\n" if name.endswith(SECTIONS) else ""
            parts.append(f"::: jaxrlhf.{name}\n{options}")
    return "\n".join(parts)


def _commands() -> str:
    """The usage and the options of each command, from its parser."""
    parts = []
    for name, command in COMMANDS.items():
        parser: argparse.ArgumentParser = importlib.import_module(command.module).parser()
        rows = [_option(x) for x in parser._actions if x.help != argparse.SUPPRESS and x.dest != "help"]
        lines = [f"### jaxrlhf {name}", "", _sentence(parser.description or command.summary), ""]
        table = ["| Option | Meaning |", "| --- | --- |", *rows, ""] if rows else []
        parts.append("\n".join([*lines, *table]))
    return "\n".join(parts)


def _option(action: argparse.Action) -> str:
    """A row of the table of a command's options."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes_value = action.nargs != 0
    shown = [f"{option} {value}" if takes_value else option for option in action.option_strings] or [str(value)]
    names = ", ".join(f"`{each}`" for each in shown)
    meaning = _sentence(action.help or "").replace("|", "\\|").replace("%%", "%")
    return f"| {names} | {meaning}{' Required.' if action.required and action.option_strings else ''} |"


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith((".", ")")) else ".")
