"""The public names of the package, frozen: each with its signature, as tests/public_api.txt has it."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrlhf as rl

FROZEN = Path(__file__).parent / "public_api.txt"


def signature(name: str) -> list[str]:
    """A public name with its parameters, and the public methods of a class that is not plain data."""
    found = getattr(rl, name)
    if isinstance(found, type) and issubclass(found, BaseException):
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
        default = "" if x.default is x.empty else f"={x.default!r}".replace("<as in the config>", "...")
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
    doc = inspect.getdoc(getattr(rl, name)) or ""
    assert len(doc) > 10 and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


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
