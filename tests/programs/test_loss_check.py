"""What a train call can add up passes, and what it cannot is refused with what to do about it."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import pytest

from jaxrlhf.algorithms.kl import KLTerm
from jaxrlhf.algorithms.masked import masked_count, masked_mean, masked_sum, whiten
from jaxrlhf.algorithms.ppo import PolicyUpdate, ValueUpdate, ppo_policy_loss, value_loss
from jaxrlhf.algorithms.sft import SupervisedUpdate, sft_loss
from jaxrlhf.call_graph import GraphError
from jaxrlhf.experience import Max, PolicyOutputs, Rollout, Sequences
from jaxrlhf.programs.loss_check import check_adds_up
from tests.made_up_step import shape

B, T, R = 6, 9, 5
UPDATE = SupervisedUpdate()


ROWS_BR = shape(B, R)
SEQUENCES = Sequences(
    tokens=shape(B, T, dtype=jnp.int32), mask=shape(B, T, dtype=jnp.bool), response=shape(B, R, dtype=jnp.bool)
)
ROLLOUT = Rollout(
    **{f.name: getattr(SEQUENCES, f.name) for f in dataclasses.fields(SEQUENCES)},  # pyright: ignore
    logprobs=ROWS_BR, sampled_logprobs=ROWS_BR, finish=shape(B, dtype=jnp.int32), row=shape(B, dtype=jnp.int32),
    id=shape(B, dtype=jnp.uint32),
)  # fmt: skip
OUTPUTS = PolicyOutputs(logprobs=ROWS_BR, entropy=ROWS_BR)
BATCH = {"sequences": ROLLOUT, "advantages": ROWS_BR, "returns": ROWS_BR, "values": ROWS_BR}


def check(loss: Any, outputs: Any = OUTPUTS, batch: Any = BATCH, update: Any = UPDATE) -> None:
    check_adds_up("train(loss)", loss, outputs, batch, update)


def test_losses_that_are_there_pass():
    check(sft_loss, batch={"sequences": SEQUENCES})
    check(ppo_policy_loss, update=PolicyUpdate(entropy_coef=0.1))
    kl = KLTerm(reference=ROWS_BR, coef=shape(B), estimator="k3")
    check(ppo_policy_loss, batch={**BATCH, "kl": kl}, update=PolicyUpdate())
    check(value_loss, ROWS_BR, update=ValueUpdate())


def counted(outputs, batch, update):
    """Sums over rows, with a constant number of tokens a row for the weight."""
    loss_BR = -outputs.logprobs * batch["coef"]
    return loss_BR.sum(), float(loss_BR.size), {"largest": Max(loss_BR.max()), "negative": (loss_BR < 0).sum()}


def test_a_weight_of_rows_times_columns_a_maximum_and_an_array_without_rows_pass():
    check(counted, batch={**BATCH, "coef": shape()})


def mean_over_sequences(outputs, batch, update):
    """The sum over rows of the mean of each."""
    mask_BR = batch["sequences"].response
    lengths_B = jnp.maximum(mask_BR.sum(axis=1), 1)
    mean_B = (outputs.logprobs * mask_BR).sum(axis=1) / lengths_B
    return -mean_B.sum(), mask_BR.any(axis=1).sum(), {}


def test_means_within_rows_pass():
    check(mean_over_sequences)


def undefined(outputs, batch, update):
    """Not a number for the numbers that are made up: nothing can be said of it."""
    loss = jnp.log(outputs.logprobs).mean()
    return loss, masked_count(batch["sequences"].response), {}


def test_what_made_up_numbers_cannot_tell_passes():
    check(undefined)


def mean(outputs, batch, update):
    return outputs.logprobs.mean(), masked_count(batch["sequences"].response), {}


def mean_over_tokens(outputs, batch, update):
    mask_BR = batch["sequences"].response
    return masked_mean(outputs.logprobs, mask_BR), masked_count(mask_BR), {}


def whitened(outputs, batch, update):
    mask_BR = batch["sequences"].response
    return (
        masked_sum(jnp.square(whiten(batch["advantages"], mask_BR) + 1.0) * outputs.logprobs, mask_BR),
        masked_count(mask_BR),
        {},
    )


def weight_of_one(outputs, batch, update):
    return outputs.logprobs.sum(), 1.0, {}


def mean_metric(outputs, batch, update):
    mask_BR = batch["sequences"].response
    return outputs.logprobs.sum(), masked_count(mask_BR), {"entropy": outputs.entropy.mean()}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean, r"Got the sum -?[0-9.]+ for 4 rows, and .* Return jnp.sum\(\.\.\.\) where there is a mean, and what it"),
        (mean_over_tokens, r"never means, so that micro-batches and devices add up\. Got the sum"),
        (whitened, r"Got the sum .* as whitening, belongs into a compute function before\."),
        (weight_of_one, r"Got the weight 1 for 4 rows, and 1 and 1 for .* Return how many tokens or rows the sum is"),
        (
            mean_metric,
            r"Got the metric 'entropy' .* Return its sum, which is divided by the weight, or Max\(\.\.\.\) of",
        ),
    ],
)
def test_what_does_not_add_up_is_refused(loss, message):
    for _ in range(2):  # it is not taken for one that passed
        with pytest.raises(GraphError, match=r"^train\(loss\): a loss returns sums over its rows, .*" + message):
            check(loss)


def one_value(outputs, batch, update):
    return outputs.logprobs.sum()


def two_values(outputs, batch, update):
    return outputs.logprobs.sum(), {}


def no_dict(outputs, batch, update):
    return outputs.logprobs.sum(), outputs.logprobs.sum(), None


def forgotten(outputs, batch, update):
    outputs.logprobs.sum()


def for_each_row(outputs, batch, update):
    return outputs.logprobs.sum(axis=1), masked_count(batch["sequences"].response), {}


def for_each_token(outputs, batch, update):
    mask_BR = batch["sequences"].response
    return outputs.logprobs.sum(), masked_count(mask_BR), {"kl": outputs.logprobs}


def two_arguments(outputs, batch):
    return outputs.logprobs.sum(), 1.0, {}


def misspelt(outputs, batch, update):
    return (outputs.logprobs * batch["advantage"]).sum(), 1.0, {}


def of_values(outputs, batch, update):
    return outputs.values.sum(), 1.0, {}


def of_six_rows(outputs, batch, update):
    return (
        outputs.logprobs.reshape(6, -1).sum(),
        jnp.zeros(R).sum(),
        {"first": (outputs.logprobs * jnp.ones((6, 1))).sum()},
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (one_value, "returns (sum, weight, metrics), so that micro-batches add up. Got an array float32[]. Return"),
        (two_values, "Got (an array float32[], {}). Return the loss summed over rows and tokens, how many of them"),
        (no_dict, "Got (an array float32[], an array float32[], None). Return"),
        (forgotten, "Got None. Return"),
        (for_each_row, "arrays without dims. Got the sum of shape [6]. Sum over rows and tokens."),
        (for_each_token, "arrays without dims. Got the metric 'kl' of shape [6, 5]."),
        (two_arguments, "a loss takes three arguments, (outputs, batch, update). Got (outputs, batch): too many"),
        (misspelt, "its loss asks the batch for 'advantage', which is not there. The batch has: sequences, advantages, "
                   "returns, values. Did you mean 'advantages'?"),
        (of_values, "its loss fails: AttributeError: 'PolicyOutputs' object has no attribute 'values', at "),
        (of_values, "Its outputs are PolicyOutputs(logprobs=an array float32[6, 5], entropy=an array float32[6, 5])."),
        (of_six_rows, "a loss must work for any number of rows, since they are cut into micro-batches. It fails on 2"),
    ],
)  # fmt: skip
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(GraphError, match=re.escape(message)):
        check(loss)


def test_an_error_in_a_loss_names_its_line():
    line = of_values.__code__.co_firstlineno + 1
    with pytest.raises(GraphError, match=rf"test_loss_check\.py:{line}\."):
        check(of_values)
