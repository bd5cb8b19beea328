"""Sets of weights, each of which is stored, trained, moved and saved as one.

A role has a set of its own under its name, unless it reads that of another. Adapters are a set, and `<role>.base` is
the set that they adapt, which other roles may read too: other adapters of it, or the reference, as it is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.models.architecture import declare
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig, declare_adapters
from jaxrlhf.models.params import LayerForm, Shardings, abstract_of, layer_form, shardings_of
from jaxrlhf.programs.arrays import Abstract
from jaxrlhf.programs.optimizer import init_optimizer, optimizer_shardings
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout

BASE = ".base"

Form = tuple[Layout, LayerForm]
"""A layout, and the form of the layers in it."""


@dataclasses.dataclass(frozen=True)
class WeightSet:
    """A set without its arrays: model, shapes and shardings. `layers` is the form of the layers in a tree."""

    model: ModelConfig
    lora: LoRAConfig | None = None
    """The LoRA adapters of the model that are the set. None means that the set is the whole model."""
    optimizer: OptimizerConfig | None = None
    average: AverageConfig | None = None

    @property
    def rests_in_float32(self) -> bool:
        """True for a set that is updated, which has master weights; others rest in the compute precision."""
        return self.optimizer is not None or self.average is not None

    def resting_form(self, layout: Layout) -> LayerForm:
        """The form in which its layers rest, and are trained, in a layout. In a pipelined one no array is of several
        layers."""
        return layer_form(self.model, generates=False, is_pipelined=layout.is_pipelined)

    def declare(self, layers: LayerForm = "list") -> Any:
        """The tree of its weights, as declarations."""
        stacked = layers == "stacked"
        if self.lora is not None:
            return declare_adapters(self.model, self.lora, stacked=stacked)
        return declare(self.model, stacked=stacked)

    def abstract(self, dtype: jax.typing.DTypeLike | None = None, *, layers: LayerForm = "list") -> Abstract:
        """Shapes and dtypes. `dtype` None means that of the master weights."""
        return abstract_of(self.declare(layers), dtype)

    def shardings(self, layout: Layout, *, layers: LayerForm | None = None) -> Shardings:
        """Its shardings in a layout. `layers` None means the form in which they rest there."""
        return shardings_of(self.declare(layers or self.resting_form(layout)), layout)

    def abstract_optimizer(self, *, layers: LayerForm = "list") -> Abstract:
        """Shapes and dtypes of the optimizer's state beside it."""
        config = self.optimizer
        assert config is not None
        return jax.eval_shape(lambda params: init_optimizer(config, params), self.abstract(layers=layers))

    def optimizer_shardings(self, layout: Layout, *, layers: LayerForm | None = None) -> Shardings:
        """The shardings of its optimizer's state in a layout: those of the weights."""
        assert self.optimizer is not None
        layers = layers or self.resting_form(layout)
        abstract, shardings = self.abstract(layers=layers), self.shardings(layout, layers=layers)
        return optimizer_shardings(self.optimizer, abstract, shardings, layout)


def weight_sets(roles: Mapping[str, ModelRole]) -> dict[str, WeightSet]:
    """Every set that roles need, those that others are made from first."""
    sets: dict[str, WeightSet] = {}
    for name, role in roles.items():
        if role.base == name + BASE:
            sets[role.base] = adapted_set(role)
        if not role.weights:
            sets[name] = set_of(role)
    return dict(sorted(sets.items(), key=lambda item: item[1].average is not None))


def set_of(role: ModelRole) -> WeightSet:
    """The set of a role that has one of its own."""
    return WeightSet(role.model, role.lora, role.optimizer, role.average)


def adapted_set(role: ModelRole) -> WeightSet:
    """The set that a role's adapters adapt, if it exists because of that role."""
    head = "lm" if role.model.head == "both" else role.model.head
    return WeightSet(dataclasses.replace(role.model, head=head))


def sets_read(name: str, role: ModelRole) -> tuple[str, ...]:
    """The sets that a role's calls read."""
    return (role.weights or name, *([role.base] if role.base else []))


def sets_owned(name: str, role: ModelRole) -> tuple[str, ...]:
    """The sets that exist because of a role."""
    return tuple(key for key in sets_read(name, role) if key in (name, name + BASE))


def form_read(role: ModelRole, kind: str, layout: Layout) -> LayerForm:
    """The form of the layers that a call of a kind (`generate`, `infer` or `train`) reads in a layout."""
    return layer_form(role.model, generates=kind == "generate", is_pipelined=layout.is_pipelined)
