"""What the tool that reads docstrings for the site (griffe) takes otherwise than Python does.

Where the package has a function and a module of one name, it has the module: `jaxrlhf.train` is the function of
`jaxrlhf/__init__.py`, and this extension puts it back. And only a section `Examples:` is code to it, while
ours are called `Example:`, or stand in the text.
"""

import ast
import re
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Keeps what `jaxrlhf/__init__.py` itself defines, and examples as code."""

    def __init__(self) -> None:
        super().__init__()
        self._defined: dict[str, griffe.Object | griffe.Alias] = {}

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **kwargs: Any) -> None:
        if mod.path == "jaxrlhf":
            kinds = griffe.Function | griffe.Class | griffe.Alias
            self._defined = {name: x for name, x in mod.members.items() if isinstance(x, kinds)}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^>>> .*(\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, found in self._defined.items() if pkg.path == "jaxrlhf" else ():
            pkg.members[name] = found
