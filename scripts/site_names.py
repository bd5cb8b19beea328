"""Where the package has a function and a module of one name, the site documents the function.

`jaxrlhf.train` is the function of `jaxrlhf/__init__.py`. The tool that reads docstrings (griffe) puts the module
`jaxrlhf/train.py` in its place; this extension of it puts the function back.
"""

import ast
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Keeps what `jaxrlhf/__init__.py` itself defines."""

    def __init__(self) -> None:
        super().__init__()
        self._defined: dict[str, griffe.Object | griffe.Alias] = {}

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **kwargs: Any) -> None:
        if mod.path == "jaxrlhf":
            kinds = griffe.Function | griffe.Class | griffe.Alias
            self._defined = {name: x for name, x in mod.members.items() if isinstance(x, kinds)}

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, found in self._defined.items() if pkg.path == "jaxrlhf" else ():
            pkg.members[name] = found
