"""Sets of weights: what is held, trained, moved and saved as one.

A role has a set of its own under its name, unless it reads that of another. Adapters are a set, and `<role>.base` is
the set that they adapt, which other roles may read too: other adapters of it, or the reference, as it is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig, declare_adapters
from jaxrlhf.models.params import LayerForm, abstract_of, declare, layer_form, shardings_of
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.sharding.layout import Layout

BASE = ".base"

How = LayerForm


@dataclasses.dataclass(frozen=True)
class WeightSet:
    """What there is to know of a set beside its arrays."""

    model: ModelConfig
    lora: LoRAConfig | None = None
    """The set is the adapters of the model. None: it is all its weights."""
    optimizer: OptimizerConfig | None = None
    average: AverageConfig | None = None

    @property
    def rests_in_float32(self) -> bool:
        """It changes, so its master weights are kept; others rest in the compute precision."""
        return self.optimizer is not None or self.average is not None

    def resting_form(self, layout: Layout) -> How:
        """How its layers rest, and are trained, in a layout. In a pipelined one no array is of several layers."""
        return layer_form(self.model, generates=False, is_pipelined=layout.is_pipelined)

    def declare(self, how: How = "list") -> Any:
        """The tree of its weights."""
        stacked = how == "stacked"
        if self.lora is not None:
            return declare_adapters(self.model, self.lora, stacked=stacked)
        return declare(self.model, stacked=stacked)

    def abstract(self, dtype: jax.typing.DTypeLike | None = None, *, how: How = "list") -> Any:
        """Shapes and dtypes."""
        return abstract_of(self.declare(how), dtype)

    def shardings(self, layout: Layout, *, how: How | None = None) -> Any:
        """How it lies in a layout. `how`: None is as it rests there."""
        return shardings_of(self.declare(how or self.resting_form(layout)), layout)


def weight_sets(roles: Mapping[str, ModelRole]) -> dict[str, WeightSet]:
    """Every set that roles need, those that others are made from first."""
    sets: dict[str, WeightSet] = {}
    for name, role in roles.items():
        if role.base == name + BASE:
            head = "lm" if role.model.head == "both" else role.model.head
            sets[role.base] = WeightSet(dataclasses.replace(role.model, head=head))
        if not role.weights:
            sets[name] = set_of(role)
    return dict(sorted(sets.items(), key=lambda item: item[1].average is not None))


def set_of(role: ModelRole) -> WeightSet:
    """The set of a role that has one of its own."""
    return WeightSet(role.model, role.lora, role.optimizer, role.average)


def sets_read(name: str, role: ModelRole) -> tuple[str, ...]:
    """The sets that a role's calls read."""
    return (role.weights or name, *([role.base] if role.base else []))


def sets_owned(name: str, role: ModelRole) -> tuple[str, ...]:
    """The sets that are there because of a role."""
    return tuple(key for key in sets_read(name, role) if key in (name, name + BASE))
