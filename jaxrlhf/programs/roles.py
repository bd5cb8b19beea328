"""Roles: a model's methods with the shapes that they give, a Python function of completions, or a sum.

Letters: B sequences, P prompt columns, R response columns, T = P + R.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.call_graph import GraphError, named_sequences
from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.experience import Max, PolicyAndValues, PolicyOutputs, Prompts, Rollout, Sampling, Sequences, Term
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.heads import INFERENCE_OUTPUTS, InferenceOutput
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.models.params import Params
from jaxrlhf.programs.loss_check import check_adds_up
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.tracing import Method, RoleMethods, compute

GAP_METRIC = "rollout/logprob_gap_max"
ENCODE = "encode"
"""The method by which a rollout comes into the tokens of a role with its own tokenizer."""
"""The largest difference between a token's log-probability as sampling recorded it and as the training forward gives
it, before the first update of a train call."""


class HostSequences(NamedTuple):
    """A rollout in the tokens of a scorer's own tokenizer, encoded on the host."""

    sequences: Sequences
    num_cut: int
    """The number of sequences whose first tokens were left out."""


@dataclasses.dataclass(frozen=True)
class OwnTokens:
    """How a model reads rollouts of an actor with another tokenizer."""

    columns: Callable[[int], int]
    """Columns of a response -> columns of the sequences that the model reads."""
    encode: Callable[[Rollout], HostSequences]
    """A rollout of NumPy arrays -> those sequences. Several threads may call it at once."""


@dataclasses.dataclass(frozen=True)
class ModelRole:
    """A role with a model of its own."""

    model: ModelConfig
    optimizer: OptimizerConfig | None = None
    """None means that it is never trained."""
    num_updates: int = 0
    """Updates in the whole run, over which the learning rate decays."""
    weights: str = ""
    """The set of weights that it reads. Empty means one of its own, under its name."""
    lora: LoRAConfig | None = None
    """Its own set are adapters."""
    base: str = ""
    """The set that its adapters adapt."""
    view: Head | None = None
    """The one of its model's heads whose methods it has. None means all."""
    average: AverageConfig | None = None
    """Its set is a moving average of another's."""
    own_tokens: OwnTokens | None = None
    """It has another tokenizer than the actor. None means the same one."""

    def methods(self, name: str) -> RoleMethods:
        """The role as a step function sees it."""
        if self.own_tokens is not None:
            return self._scoring_methods(name, self.own_tokens)
        view = self.view or self.model.head
        other_head = f"It has {view!r} for a head: set roles.{name}.head to {'scalar' if view == 'lm' else 'lm'!r}."
        missing = dict.fromkeys({"lm": _SCALAR_AVALS, "scalar": ["generate", *_LM_AVALS]}.get(view, ()), other_head)
        methods = {} if view == "scalar" else {"generate": Method("generate", _rollout_aval, tokens=_drawn)}
        methods |= {infer: Method("infer", aval, tokens=_read) for infer, aval in self._avals.items()}
        of_losses = functools.partial(Method, row_wise=False, tokens=_of_terms)
        methods["loss"] = of_losses("infer", functools.partial(self._loss_aval, missing), bind=_loss_arguments)
        if self.optimizer is not None:
            methods["train"] = of_losses("train", functools.partial(self._train_aval, missing), bind=_train_arguments)
        else:
            missing["train"] = f"It has no optimizer: set roles.{name}.optimizer to train it."
        if self.average is not None:
            missing["train"] = f"It follows the weights of '{self.average.of}', and is not trained itself."
        if self.view is not None:
            copy = (
                f"It has a head of its own on the weights of '{self.weights}'. A reference is a copy of them: set "
                f"roles.{name} to {{init: {self.weights}}}."
            )
            missing |= {method: copy for method in ("generate", *_LM_AVALS) if method in missing}
        if self.weights:
            missing["train"] = f"It shares the weights of '{self.weights}': train that role, with both losses."
        # a moving average has a new version with each of what it follows
        weights = self.average.of if self.average is not None else self.weights or name
        return RoleMethods(methods, weights=weights, missing=missing)

    def _scoring_methods(self, name: str, own: OwnTokens) -> RoleMethods:
        """Those of a scorer with its own tokenizer: the host encodes rollouts in its tokens, which it scores."""

        def encoded(rollout: Rollout) -> Sequences:
            B, T = rollout.tokens.shape[0], own.columns(rollout.response.shape[1])
            aval: Any = jax.ShapeDtypeStruct
            masks = {"mask": aval((B, T), jnp.bool), "response": aval((B, 1), jnp.bool)}
            return Sequences(tokens=aval((B, T), jnp.int32), **masks)

        methods = {
            ENCODE: Method("host", encoded, tokens=_read),
            "scores": Method("infer", _scores_aval, tokens=_read, through=ENCODE),
        }
        why = (
            f"roles.{name} has another tokenizer than the actor, so that it says nothing about single tokens of a "
            "response: use its scores, or a model with the actor's tokenizer."
        )
        others = ("generate", "train", "loss", *_LM_AVALS, *(_SCALAR_AVALS.keys() - {"scores"}))
        return RoleMethods(methods, weights=self.weights or name, missing=dict.fromkeys(others, why))

    @property
    def _avals(self) -> Mapping[str, Callable[..., Any]]:
        """Inference methods -> the shapes that they give."""
        return _AVALS[self.view or self.model.head]

    def _train_aval(self, missing: Mapping[str, str], terms: tuple[Term, ...], update: Any) -> dict[str, Any]:
        """Metrics of a train call, from the losses themselves."""
        for count in ("mini_batches", "epochs"):
            if not isinstance(getattr(update, count, None), int):
                raise GraphError(
                    f"{_called('train', terms)}: the last argument holds the settings of the update and needs an "
                    f"integer `{count}`. Got {update!r}."
                )
        metrics = self._loss_aval(missing, terms, update, called="train")
        more = {"grad_norm", "lr", "num_updates"} | ({GAP_METRIC} if gap_term(self, terms) is not None else set())
        return metrics | dict.fromkeys(sorted(more), _float())

    def _loss_aval(
        self, missing: Mapping[str, str], terms: tuple[Term, ...], update: Any, called: str = "loss"
    ) -> dict[str, Any]:
        """Metrics of losses. Those of a term with a name are a dict under it. `missing`: methods that the role could
        have -> what to do to get them."""
        names, avals = ["loss"], {"loss": _float()}
        for term in terms:
            where = _called(called, (term,))
            metrics = {"loss": None, **self._check_loss(where, missing, term, update)}
            of_term = term_metrics(term, dict.fromkeys(sorted(metrics), _float()))
            names += of_term
            avals |= of_term
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise GraphError(
                f"{_called(called, terms)}: the metrics of its terms must have names of their own. Got "
                f"{', '.join(twice)} twice. Give a Term a name: Term(loss, batch, name='pretraining')."
            )
        return avals

    def _check_loss(self, where: str, missing: Mapping[str, str], term: Term, update: Any) -> dict[str, Any]:
        """Checks that a term is what a term should be. Returns the metrics of its loss."""
        if not callable(term.loss):
            raise GraphError(
                f"{where}: the first argument is a loss, (outputs, batch, update) -> (sum, weight, metrics). Got "
                f"{_shown(term.loss)}. Write train(loss, batch, update)."
            )
        sequences = term.batch.get("sequences") if isinstance(term.batch, dict) else None
        if not all(hasattr(x, "response") for x in named_sequences(sequences).values()):
            keys = list(term.batch) if isinstance(term.batch, dict) else type(term.batch).__name__
            raise GraphError(
                f"{where}: the batch is a dict whose 'sequences' the model runs on: a Rollout, Sequences, or a dict "
                f"of them. Got {keys}. Put what the loss is about under that name."
            )
        shapes = {name: (x.tokens.shape, x.response.shape) for name, x in named_sequences(sequences).items()}
        if len(set(shapes.values())) > 1:
            raise GraphError(f"{where}: sequences of one batch must have equal shapes. Got {shapes}.")
        if term.of and term.of not in self._avals:
            raise GraphError(
                f"{where}: `of` names an inference method of the role. Got {term.of!r}. It has: "
                f"{', '.join(self._avals)}.{did_you_mean(term.of, self._avals)}"
                + (f" {missing[term.of]}" if term.of in missing else "")
            )
        if np.shape(term.weight) != ():
            raise GraphError(f"{where}: the weight of a term is one number. Got the shape {np.shape(term.weight)}.")
        return check_adds_up(where, term.loss, self.outputs_aval(sequences, term.of), term.batch, update)

    def outputs_aval(self, sequences: Any, of: str = "") -> Any:
        """Shapes of what the model says about sequences, as its losses get it."""
        aval = self._avals[of or default_outputs(self.model)]
        return {n: aval(x) for n, x in sequences.items()} if isinstance(sequences, Mapping) else aval(sequences)


def _train_arguments(loss: Any, batch: Any, update: Any = None) -> tuple[tuple[Term, ...], Any]:
    """`train(loss, batch, update)`, or `train(terms, update)`."""
    return _terms("train", loss, batch, update)


def _loss_arguments(loss: Any, batch: Any, settings: Any = None) -> tuple[tuple[Term, ...], Any]:
    """`loss(loss, batch, settings)`, or `loss(terms, settings)`."""
    return _terms("loss", loss, batch, settings)


def _terms(called: str, loss: Any, batch: Any, update: Any) -> tuple[tuple[Term, ...], Any]:
    terms: Any = loss
    if isinstance(loss, Term):
        terms = (loss,)
    if isinstance(terms, tuple | list):
        if not terms or not all(isinstance(term, Term) for term in terms) or update is not None:
            raise GraphError(
                f"{called}: several losses are given as {called}((Term(loss, batch), Term(loss, batch, weight=0.5)), "
                f"settings). Got {[type(x).__name__ for x in (*terms, batch)]}."
            )
        return tuple(terms), batch
    return (Term(terms, batch),), update


def _drawn(_: tuple[Any, ...], rollout: Rollout) -> tuple[Any, ...]:
    """Tokens of a call of `generate`: prompts with the responses drawn for them."""
    return (rollout.tokens,)


def _read(args: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    """Tokens of a call that says something about each sequence."""
    return (args[0].tokens,)


def _of_terms(args: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    """Tokens of a call of `train` or `loss`."""
    return tuple(x.tokens for term in args[0] for x in named_sequences(term.batch["sequences"]).values())


def _shown(value: Any) -> str:
    """A value in an error message: of a dict its keys."""
    return f"a dict of {', '.join(map(str, value))}" if isinstance(value, dict) else brief(value)


def _called(method: str, terms: tuple[Term, ...]) -> str:
    """A call in an error message, by its losses."""
    return f"{method}({' + '.join(getattr(term.loss, '__name__', _shown(term.loss)) for term in terms)})"


def term_metrics(term: Term, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a term, under its name. The loss of a term without a name is in the sum of all only."""
    if not term.name:
        return {name: x for name, x in metrics.items() if name != "loss"}
    return {term.name: dict(metrics)}


class HostScores(NamedTuple):
    """What a Python function gives for a rollout."""

    scores: np.ndarray
    timeouts: int | None = None
    """The number of sequences whose score stands for a function that took too long; None where that is an error."""


@dataclasses.dataclass(frozen=True)
class FunctionRole:
    """A role that is a Python function, on the host: it scores rollouts. Several threads may call it at once."""

    score: Callable[[Rollout], HostScores]
    """A rollout of numpy arrays -> float32 scores [B]."""
    score_tokens: Callable[[Rollout], HostScores] | None = None
    """The same -> float32 scores [B, R] of each response token, zero elsewhere."""

    def methods(self, name: str) -> RoleMethods:
        methods = {"scores": Method("host", _scores_aval, tokens=_read)}
        if self.score_tokens is not None:
            methods["token_scores"] = Method("host", _values_aval, tokens=_read)
        return RoleMethods(methods, missing=_needs_a_model(name, "function"))


@dataclasses.dataclass(frozen=True)
class WeightedSumRole:
    """A role whose scores are the weighted sum of other roles' scores. Each of these is a call of its own."""

    weights: Mapping[str, float]

    def methods(self, name: str) -> RoleMethods:
        """The role as a step function sees it."""

        def added(method: str, roles: Any, rollout: Any) -> Any:
            parts = {part: getattr(getattr(roles, part), method)(rollout) for part in self.weights}
            return compute(weighted_sum, parts, dict(self.weights), name=f"{name}.{weighted_sum.__name__}")

        composed = {method: functools.partial(added, method) for method in ("scores", "token_scores")}
        return RoleMethods({}, composed=composed, missing=_needs_a_model(name, "weighted_sum"))


def _needs_a_model(name: str, kind: str) -> dict[str, str]:
    """Methods that only models have -> what to do to get them."""
    methods = ("generate", "train", *_LM_AVALS, *(_SCALAR_AVALS.keys() - {"scores", "token_scores"}))
    return dict.fromkeys(methods, f"roles.{name} is a {kind}: give it a model instead.")


def weighted_sum(scores: dict[str, jax.Array], weights: dict[str, float]) -> jax.Array:
    """sum_i weights[i] * scores[i], for each sequence, or for each token."""
    return sum((weights[part] * x for part, x in scores.items()), jnp.zeros((), jnp.float32))


Role = ModelRole | FunctionRole | WeightedSumRole


def host_function(role: Role, method: str) -> Callable[[Rollout], HostScores | HostSequences]:
    """The Python function of a role's calls of kind `host`."""
    if isinstance(role, ModelRole):
        assert role.own_tokens is not None
        return role.own_tokens.encode
    assert isinstance(role, FunctionRole)
    score = role.score if method == "scores" else role.score_tokens
    assert score is not None
    return score


def default_outputs(model: ModelConfig) -> str:
    """The inference method whose outputs a loss gets that names none."""
    return {"lm": "policy", "scalar": "values", "both": "policy_and_values"}[model.head]


def term_outputs(role: ModelRole, term: Term, params: Params, layout: Layout) -> Any:
    """The outputs of the model for the sequences of a term. Where they are several by name, it runs once on all."""
    sequences = joined_sequences(term, layout)
    outputs = term_output(role, term)(params, sequences, role.model, layout, remat=layout.strategy.remat)
    return parted_outputs(term, outputs)


def term_output(role: ModelRole, term: Term) -> InferenceOutput[Any]:
    """The outputs of the model that the loss of a term gets."""
    return INFERENCE_OUTPUTS[term.of or default_outputs(role.model)]


def joined_sequences(term: Term, layout: Layout) -> Any:
    """The sequences of a term; where they are several by name, side by side row by row, so that no row leaves its
    device."""
    sequences = term.batch["sequences"]
    if not isinstance(sequences, Mapping):
        return sequences
    joined = jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *sequences.values())
    return layout.constrain_rows(joined)


def parted_outputs(term: Term, outputs: Any) -> Any:
    """The outputs of the model for `joined_sequences`, by name where they are several."""
    sequences = term.batch["sequences"]
    if not isinstance(sequences, Mapping):
        return outputs
    apart = jax.tree.map(lambda x: x.reshape(-1, len(sequences), *x.shape[1:]), outputs)
    return {name: jax.tree.map(lambda x, i=i: x[:, i], apart) for i, name in enumerate(sequences)}


def gap_term(role: ModelRole, terms: tuple[Term, ...]) -> Term | None:
    """The first term whose log-probabilities can be compared with those recorded while sampling."""
    if role.model.head == "scalar":
        return None
    return next((t for t in terms if not t.of and isinstance(t.batch["sequences"], Rollout)), None)


def logprob_gap(outputs: PolicyOutputs | PolicyAndValues, rollout: Rollout) -> Max:
    """The largest difference between recorded and recomputed log-probabilities."""
    return Max(jnp.where(rollout.response, jnp.abs(outputs.logprobs - rollout.logprobs), 0.0).max())


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _rollout_aval(prompts: Prompts, sampling: Sampling) -> Rollout:
    B, P = prompts.tokens.shape
    B, R = B * sampling.num_samples, sampling.max_new_tokens
    aval: Any = jax.ShapeDtypeStruct
    return Rollout(
        tokens=aval((B, P + R), jnp.int32),
        mask=aval((B, P + R), jnp.bool),
        response=aval((B, R), jnp.bool),
        logprobs=aval((B, R), jnp.float32),
        sampled_logprobs=aval((B, R), jnp.float32),
        finish=aval((B,), jnp.int32),
        row=aval((B,), jnp.int32),
        id=aval((B,), jnp.uint32),
    )


def _policy_aval(sequences: Any) -> Any:
    return PolicyOutputs(logprobs=_values_aval(sequences), entropy=_values_aval(sequences))  # pyright: ignore[reportArgumentType]


def _both_aval(sequences: Any) -> Any:
    values = _values_aval(sequences)
    return PolicyAndValues(logprobs=values, entropy=values, values=values)  # pyright: ignore[reportArgumentType]


def _values_aval(sequences: Any) -> jax.ShapeDtypeStruct:
    return _float(*sequences.response.shape)


def _scores_aval(sequences: Any) -> jax.ShapeDtypeStruct:
    return _float(sequences.response.shape[0])


_LM_AVALS: dict[str, Callable[..., Any]] = {"logprobs": _values_aval, "policy": _policy_aval}
_SCALAR_AVALS: dict[str, Callable[..., Any]] = {
    "values": _values_aval,
    "scores": _scores_aval,
    "token_scores": _values_aval,
}
_AVALS: dict[Head, dict[str, Callable[..., Any]]] = {
    "lm": _LM_AVALS,
    "scalar": _SCALAR_AVALS,
    "both": {**_LM_AVALS, **_SCALAR_AVALS, "policy_and_values": _both_aval},
}
