"""What a role can do: a model's methods with the shapes that they give, a Python function of completions, or a sum.

Letters: B sequences, P prompt columns, R response columns, T = P + R.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.call_graph import GraphError
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Max, PolicyOutputs, Prompts, Rollout, Sampling
from jaxrlhf.models import heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat
from jaxrlhf.tracing import Method, RoleMethods, abstract_call, compute

GAP_METRIC = "rollout/logprob_gap_max"
"""The largest difference between a token's log-probability as sampling recorded it and as the training forward gives
it, before the first update of a train call."""


@dataclasses.dataclass(frozen=True)
class ModelRole:
    """A role with a model of its own."""

    model: ModelConfig
    optimizer: OptimizerConfig | None = None
    """None: it is never trained."""
    num_updates: int = 0
    """Updates in the whole run, over which the learning rate decays."""

    def methods(self, name: str) -> RoleMethods:
        """The role as a step function sees it."""
        is_lm = self.model.head == "lm"
        other_head = f"It has {self.model.head!r} for a head: set roles.{name}.head to {'scalar' if is_lm else 'lm'!r}."
        missing = dict.fromkeys(_SCALAR_AVALS if is_lm else ["generate", *_LM_AVALS], other_head)
        methods = {"generate": Method("generate", _rollout_aval)} if is_lm else {}
        avals = _LM_AVALS if is_lm else _SCALAR_AVALS
        methods |= {infer: Method("infer", abstract) for infer, abstract in avals.items()}
        if self.optimizer is not None:
            methods["train"] = Method("train", self._train_aval, row_wise=False)
        else:
            missing["train"] = f"It has no optimizer: set roles.{name}.optimizer to train it."
        return RoleMethods(methods, weights=name, missing=missing)

    def _train_aval(self, loss: Any, batch: Any, update: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Metrics of a train call, from the loss itself."""
        name = getattr(loss, "__name__", repr(loss))
        if not callable(loss):
            raise GraphError(
                "train: the first argument is a loss, (outputs, batch, update) -> (sum, weight, metrics). Got "
                f"{loss!r}."
            )
        if not isinstance(batch, dict) or not hasattr(batch.get("sequences"), "response"):
            keys = list(batch) if isinstance(batch, dict) else type(batch).__name__
            raise GraphError(f"train({name}): the batch is a dict whose 'sequences' the model runs on. Got {keys}.")
        for count in ("mini_batches", "epochs"):
            if not isinstance(getattr(update, count, None), int):
                raise GraphError(
                    f"train({name}): the third argument holds the settings of the update and needs an integer "
                    f"`{count}`. Got {update!r}."
                )
        outputs = self.outputs_aval(batch["sequences"])
        given = abstract_call(loss, (outputs, batch, update))
        if not (isinstance(given, tuple) and len(given) == 3 and isinstance(given[2], dict)):
            raise GraphError(
                f"train({name}): a loss returns (sum, weight, metrics), with a dict of metrics, so that micro-batches "
                f"add up. Got {given!r}."
            )
        wrong = [x for x in jax.tree.leaves(given) if x.shape != ()]
        if wrong:
            raise GraphError(
                f"train({name}): a loss returns sums over the batch, arrays without dims. Got shapes "
                f"{[x.shape for x in wrong]}."
            )
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        names = {*given[2], "loss", "grad_norm", "lr", "num_updates"} | (
            {GAP_METRIC} if records_gap(self, batch) else set()
        )
        return dict.fromkeys(sorted(names), scalar)

    def outputs_aval(self, sequences: Any) -> Any:
        """Shapes of what the model says about sequences, as its losses get it."""
        return _policy_aval(sequences) if self.model.head == "lm" else _values_aval(sequences)


@dataclasses.dataclass(frozen=True)
class FunctionRole:
    """A role that is a Python function, on the host: it scores rollouts."""

    score: Callable[[Rollout], np.ndarray]
    """A rollout of numpy arrays -> float32 scores [B]."""

    def methods(self, name: str) -> RoleMethods:
        return RoleMethods({"scores": Method("host", _scores_aval)}, missing=_needs_a_model(name, "function"))


@dataclasses.dataclass(frozen=True)
class WeightedSumRole:
    """A role whose scores are those of other roles, weighted and added up. Each of them is a call of its own."""

    weights: Mapping[str, float]

    def methods(self, name: str) -> RoleMethods:
        """The role as a step function sees it."""

        def scores(roles: Any, rollout: Any) -> Any:
            parts = {part: getattr(roles, part).scores(rollout) for part in self.weights}
            return compute(weighted_sum, parts, dict(self.weights), name=f"{name}.{weighted_sum.__name__}")

        return RoleMethods({}, composed={"scores": scores}, missing=_needs_a_model(name, "weighted_sum"))


def _needs_a_model(name: str, kind: str) -> dict[str, str]:
    """What to do about methods that only models have."""
    methods = ("generate", "train", *_LM_AVALS, *(_SCALAR_AVALS.keys() - {"scores"}))
    return dict.fromkeys(methods, f"roles.{name} is a {kind}: give it a model instead.")


def weighted_sum(scores: dict[str, jax.Array], weights: dict[str, float]) -> jax.Array:
    """sum_i weights[i] * scores[i], for each sequence."""
    return sum((weights[part] * scores_B for part, scores_B in scores.items()), jnp.zeros((), jnp.float32))


Role = ModelRole | FunctionRole | WeightedSumRole

Infer = Callable[[Params, Any, ModelConfig, Layout, Remat], Any]


def _policy(params: Params, sequences: Any, config: ModelConfig, layout: Layout, remat: Remat) -> PolicyOutputs:
    return heads.policy_outputs(params, sequences, config, layout, remat=remat)


def _logprobs(params: Params, sequences: Any, config: ModelConfig, layout: Layout, remat: Remat) -> jax.Array:
    return heads.policy_outputs(params, sequences, config, layout, remat=remat).logprobs


def _values(params: Params, sequences: Any, config: ModelConfig, layout: Layout, remat: Remat) -> jax.Array:
    return heads.values(params, sequences, config, layout, remat=remat)


def _scores(params: Params, sequences: Any, config: ModelConfig, layout: Layout, remat: Remat) -> jax.Array:
    return heads.scores(params, sequences, config, layout, remat=remat)


INFER: dict[str, Infer] = {"policy": _policy, "logprobs": _logprobs, "values": _values, "scores": _scores}
"""The functions behind inference methods."""


def model_outputs(model: ModelConfig) -> Infer:
    """What a train call runs, and hands to its loss."""
    return _policy if model.head == "lm" else _values


def records_gap(role: ModelRole, batch: dict[str, Any]) -> bool:
    """Whether a train call can compare its log-probabilities with those recorded while sampling."""
    return role.model.head == "lm" and isinstance(batch["sequences"], Rollout)


def logprob_gap(outputs: PolicyOutputs, rollout: Rollout) -> Max:
    """The largest difference between recorded and recomputed log-probabilities."""
    return Max(jnp.where(rollout.response, jnp.abs(outputs.logprobs - rollout.logprobs), 0.0).max())


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _rollout_aval(prompts: Prompts, sampling: Sampling) -> Rollout:
    B, P = prompts.tokens.shape
    R = sampling.max_new_tokens

    def aval(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return Rollout(
        tokens=aval(jnp.int32, B, P + R),
        mask=aval(jnp.bool, B, P + R),
        response=aval(jnp.bool, B, R),
        logprobs=aval(jnp.float32, B, R),
        sampled_logprobs=aval(jnp.float32, B, R),
        finish=aval(jnp.int32, B),
        row=aval(jnp.int32, B),
        id=aval(jnp.uint32, B),
    )


def _policy_aval(sequences: Any) -> Any:
    return PolicyOutputs(logprobs=_values_aval(sequences), entropy=_values_aval(sequences))  # pyright: ignore[reportArgumentType]


def _values_aval(sequences: Any) -> jax.ShapeDtypeStruct:
    return _float(*sequences.response.shape)


def _scores_aval(sequences: Any) -> jax.ShapeDtypeStruct:
    return _float(sequences.response.shape[0])


_LM_AVALS: dict[str, Callable[..., Any]] = {"logprobs": _values_aval, "policy": _policy_aval}
_SCALAR_AVALS: dict[str, Callable[..., Any]] = {"values": _values_aval, "scores": _scores_aval}
