"""The public names of the package, frozen: each with its signature, as tests/public_api.txt has it."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrlhf as rl
from jaxrlhf.api import names
from jaxrlhf.api.generating import SamplingKeys
from jaxrlhf.api.keys import RunKeys

# `jaxrlhf.train` may be the module of that name here, which another test has imported: names are taken from `names`.
FROZEN = Path(__file__).parent / "public_api.txt"


def issubclass_of(name: str, kind: type) -> bool:
    found = getattr(names, name)
    return isinstance(found, type) and issubclass(found, kind)


def signature(name: str) -> list[str]:
    """A public name with its parameters, and the public methods of a class that is not plain data."""
    found = getattr(names, name)
    if issubclass_of(name, BaseException):
        return [f"{name}: {', '.join(base.__name__ for base in found.__mro__[1:2])}"]
    if dataclasses.is_dataclass(found):
        return [f"{name}({', '.join(field.name for field in dataclasses.fields(found) if field.init)})"]
    lines = [f"{name}({', '.join(_parameters(found))})"]
    if isinstance(found, type):
        for member, value in sorted(vars(found).items()):
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                shown = f"({', '.join(_parameters(value)[1:])})" if callable(value) else ""
                lines.append(f"{name}.{member}{shown}")
    return lines


def _parameters(function: object) -> list[str]:
    assert callable(function)
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = []
    for x in inspect.signature(function).parameters.values():
        if x.kind is x.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if x.default is x.empty else re.sub("=<.*>$", "=...", f"={x.default!r}")
        shown.append(marks.get(x.kind, "") + x.name + default)
    return shown


def test_public_names_are_as_they_were():
    text = "".join(f"{line}\n" for name in rl.__all__ for line in signature(name))
    if os.environ.get("PUBLIC_API") == "write":
        FROZEN.write_text(text, encoding="utf-8")
    assert text == FROZEN.read_text(encoding="utf-8"), (
        "Public names have changed. If that is meant, write tests/public_api.txt anew by PUBLIC_API=write pytest "
        "tests/test_public_names.py, and say it in CHANGELOG.md: under `Breaks` where code that uses the package must "
        "change, otherwise under `Changed` or `Added`."
    )


@pytest.mark.parametrize("name", rl.__all__)
def test_every_public_name_has_a_docstring(name):
    doc = inspect.getdoc(getattr(names, name)) or ""
    assert len(doc) > 10 and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


@pytest.mark.parametrize("name", [name for name in rl.__all__ if not issubclass_of(name, BaseException)])
def test_every_public_name_has_an_example(name):
    """Which tests/test_docs.py and tests/api/test_examples.py run. Errors need none."""
    found = getattr(names, name)
    members = vars(found).values() if isinstance(found, type) else ()
    docs = [inspect.getdoc(each) or "" for each in (found, *members) if callable(each)]
    assert any(">>>" in doc for doc in docs)


def test_keywords_that_are_spelled_out_are_the_fields_of_what_they_make():
    fields = {field.name for field in dataclasses.fields(rl.RunConfig) if field.init}
    assert fields | {"model", "reward", "sampling", "optimizer"} == set(RunKeys.__annotations__)
    assert [field.name for field in dataclasses.fields(rl.Sampling)] == list(SamplingKeys.__annotations__)


def test_what_authors_of_algorithms_import_is_public():
    page = (Path(__file__).parents[1] / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
    lines = re.findall(r"^from jaxrlhf\.(?:algorithms|experience|tracing)[\w.]* import (.*)$", page, flags=re.MULTILINE)
    imported = {name.strip() for line in lines for name in line.split(",")}
    assert len(imported) > 15 and imported <= set(rl.__all__)


def test_names_are_listed_once_and_all_there_are():
    assert len(set(rl.__all__)) == len(rl.__all__)
    assert set(rl.__all__) <= set(dir(rl))
    with pytest.raises(AttributeError, match="module 'jaxrlhf' has no attribute 'Runn'"):
        _ = rl.Runn  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_imports_no_jax():
    code = "import sys, jaxrlhf as rl; assert 'jax' not in sys.modules and 'numpy' not in sys.modules; rl.Sampling"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_type_checker_sees_every_name():
    source = (Path(rl.__file__)).read_text(encoding="utf-8")
    imported = source.split("if TYPE_CHECKING:")[1].split(")")[0]
    assert {name.strip() for name in imported.split("(")[1].split(",") if name.strip()} == set(rl.__all__)
