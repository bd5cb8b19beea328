"""Programs that all executors of a process share: a later run neither traces nor compiles them anew."""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax

from jaxrlhf.call_graph import Call
from jaxrlhf.experience import Term
from jaxrlhf.programs.arrays import Program

_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class _Maker:
    """The key of a program. Programs with equal keys are interchangeable."""

    key: Hashable
    make: Callable[[], Program] = dataclasses.field(compare=False)


def shared_program(call: Call, key: Hashable, make: Callable[[], Program]) -> Program:
    """The program of a call that another executor has made, or a new one. `key`: all that the program depends on.
    `make`: makes it. It is kept with the program, and must hold no arrays."""
    return made(_Maker(key, make)) if is_of_package(call) else make()


@functools.lru_cache(maxsize=64)
def made(maker: _Maker) -> Program:
    return maker.make()


def is_of_package(call: Call) -> bool:
    """True if all functions of a call are this package's. Another one may read what changes from run to run."""
    terms = jax.tree.leaves(call.args, is_leaf=lambda x: isinstance(x, Term))
    functions = [call.function, *(term.loss for term in terms if isinstance(term, Term))]
    return all(
        x is None or (getattr(x, "__module__", "").partition(".")[0] == _PACKAGE and "<" not in x.__qualname__)
        for x in functions
    )
