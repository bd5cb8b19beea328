"""The work of a traced step, every call of which knows what makes its programs."""

from collections.abc import Mapping

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.planner.workload import Workload, workload_of
from jaxrlhf.programs.ahead_of_time import describe_call
from jaxrlhf.programs.roles import ModelRole, Role
from jaxrlhf.programs.weight_sets import weight_sets


def step_workload(graph: CallGraph, roles: Mapping[str, Role]) -> Workload:
    """The calls of the models of a step, as a planner sees them."""
    of_models = {name: role for name, role in roles.items() if isinstance(role, ModelRole)}
    described = {
        call.plan_name: describe_call(call, of_models[call.role]) for call in graph.calls if call.role in of_models
    }
    adapters = {name: role.lora for name, role in of_models.items() if role.lora is not None}
    models = {name: role.model for name, role in of_models.items()}
    sets = weight_sets(of_models)
    bases = {name: (role.base, sets[role.base].model) for name, role in of_models.items() if role.lora is not None}
    return workload_of(graph, models, described=described, adapters=adapters, bases=bases)
