import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import split_args
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Max, PolicyOutputs, Prompts, Rollout, Sampling, Sequences, Term
from jaxrlhf.generation.decoding_weights import ring_params
from jaxrlhf.models import heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params, abstract_params, init_params, param_shardings
from jaxrlhf.programs import micro_batches
from jaxrlhf.programs.call_programs import (
    generate_program,
    infer_program,
    loss_program,
    model_program,
    train_program,
)
from jaxrlhf.programs.generation_in_parts import Progress
from jaxrlhf.programs.optimizer import apply_gradient, init_optimizer, optimizer_shardings
from jaxrlhf.programs.roles import GAP_METRIC, ModelRole
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=2)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-5)
ROLE = ModelRole(MODEL, OPTIMIZER, num_updates=10)
B, P, R = 8, 3, 4
NOISE = np.array([1, 2, 3], np.uint32)


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 1
    epochs: int = 1


def weighted_loss(outputs, batch, update):
    """A loss whose tokens count differently, so that wrong averaging shows."""
    weight_BR = batch["weight"][:, None] * batch["sequences"].response
    loss = -(outputs.logprobs * weight_BR).sum()
    return loss, weight_BR.sum(), {"nll": loss, "largest": Max(weight_BR.max())}


@functools.partial(jax.jit, static_argnums=0)
def first_params(model: ModelConfig) -> Params:
    return init_params(model, jax.random.key(0), random_value_head=True)


def make_batch(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, R + 1, B)
    response_BR = np.arange(R)[None] < lengths[:, None]
    prompt_BP = np.arange(P)[None] >= rng.integers(0, P, B)[:, None]
    rollout = Rollout(
        tokens=jnp.asarray(rng.integers(0, 32, (B, P + R)), jnp.int32),
        mask=jnp.asarray(np.concatenate([prompt_BP, response_BR], 1)),
        response=jnp.asarray(response_BR),
        logprobs=jnp.zeros((B, R)),
        sampled_logprobs=jnp.zeros((B, R)),
        finish=jnp.ones(B, jnp.int32),
        row=jnp.arange(B),
        id=jnp.arange(B, dtype=jnp.uint32),
    )
    return {"sequences": rollout, "weight": jnp.asarray(rng.uniform(0.5, 2.0, B), jnp.float32)}


def train(batch, update, strategy=Strategy()):  # noqa: B008
    """One train call from the same first weights."""
    return train_terms((Term(weighted_loss, batch),), update, strategy)


def train_terms(terms, update, strategy=Strategy()):  # noqa: B008
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    arrays, _, rebuild = split_args((terms, update))
    program = train_program(ROLE, rebuild, [True] * len(arrays), layout)
    params = jax.device_put(first_params(MODEL), param_shardings(MODEL, layout))
    shardings = optimizer_shardings(OPTIMIZER, abstract_params(MODEL), param_shardings(MODEL, layout), layout)
    state = jax.jit(lambda p: init_optimizer(OPTIMIZER, p), out_shardings=shardings)(params)
    return program(params, state, NOISE, arrays)


adam = jax.jit(functools.partial(apply_gradient, OPTIMIZER, 10))


@jax.jit
def one_update_by_hand(params, state, batch):
    """The gradient of the mean over all weights, computed on the whole mini-batch at once."""
    layout = Layout.over((0,), Strategy())

    def mean(params):
        loss, weight, _ = weighted_loss(heads.policy_outputs(params, batch["sequences"], MODEL, layout), batch, None)
        return loss / weight

    value, gradient = jax.value_and_grad(mean)(params)
    return *apply_gradient(OPTIMIZER, 10, params, state, gradient), value


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(micro_batches=4),
        Strategy(data=2, micro_batches=2),
        Strategy(data=2, fsdp=2, micro_batches=2, balance=True),
    ],
    ids=lambda s: f"{s}, {s.micro_batches} micro-batches, {s.balance=}",
)
def test_an_update_is_that_of_the_whole_mini_batch(strategy):
    batch = make_batch()
    params, state, metrics = train(batch, Update(), strategy)
    first = first_params(MODEL)
    expected, _, expected_metrics, value = one_update_by_hand(first, init_optimizer(OPTIMIZER, first), batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["nll"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["largest"], batch["weight"].max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-5)
    assert metrics["num_updates"] == state.num_updates == 1
    for got, want, was in zip(*map(jax.tree.leaves, (params, expected, first)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert np.abs(np.asarray(want) - np.asarray(was)).max() > 1e-3


def test_every_row_is_trained_on_once_an_epoch_in_shuffled_mini_batches():
    batch = make_batch()
    _, state, metrics = train(batch, Update(mini_batches=4, epochs=2))
    assert state.num_updates == 8
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 2), 3)
    params = first_params(MODEL)
    expected_state, losses = init_optimizer(OPTIMIZER, params), []
    for epoch in range(2):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), B))
        assert sorted(order) == list(range(B)) and list(order) != list(range(B))
        for chosen in order.reshape(4, 2):
            mini_batch = jax.tree.map(lambda x: x[chosen], batch)  # noqa: B023
            params, expected_state, _, value = one_update_by_hand(params, expected_state, mini_batch)
            losses.append(value)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-4)


def test_gap_between_recorded_and_recomputed_logprobs_is_that_before_the_first_update():
    batch = make_batch()
    layout = Layout.over((0,), Strategy())
    policy = jax.jit(lambda params: heads.policy_outputs(params, batch["sequences"], MODEL, layout))
    logprobs = policy(first_params(MODEL)).logprobs
    off = jnp.zeros((B, R)).at[2, 0].set(0.25)  # response token 0 of every row is real
    batch["sequences"] = batch["sequences"].replace(logprobs=logprobs + off)
    _, _, metrics = train(batch, Update(epochs=3))
    np.testing.assert_allclose(metrics[GAP_METRIC], 0.25, atol=1e-5)


def test_demonstrations_have_no_gap():
    batch = make_batch()
    rollout = batch["sequences"]
    batch["sequences"] = Sequences(tokens=rollout.tokens, mask=rollout.mask, response=rollout.response)
    assert GAP_METRIC not in train(batch, Update())[2]


def test_terms_add_up_with_their_weights_each_over_its_own_rows():
    """Half of the mean of one batch, plus the mean of another with half as many rows."""
    first, second = make_batch(), jax.tree.map(lambda x: x[: B // 2], make_batch(seed=1))
    terms = (Term(weighted_loss, first, weight=0.5), Term(weighted_loss, second, name="other"))
    params = first_params(MODEL)

    def total(params):
        means = []
        for batch in (first, second):
            outputs = heads.policy_outputs(params, batch["sequences"], MODEL, Layout.over((0,), Strategy()))
            loss, weight, _ = weighted_loss(outputs, batch, None)
            means.append(loss / weight)
        return 0.5 * means[0] + means[1], means

    (value, means), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    expected, _, _ = adam(params, init_optimizer(OPTIMIZER, params), gradient)
    for strategy in (Strategy(), Strategy(data=2, micro_batches=2)):
        trained, _, metrics = train_terms(terms, Update(), strategy)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        np.testing.assert_allclose([metrics["nll"], metrics["other"]["nll"]], means, rtol=1e-5)
        np.testing.assert_allclose(metrics["other"]["loss"], means[1], rtol=1e-5)
        for got, want in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def pair_loss(outputs: dict[str, PolicyOutputs], batch, update):
    better, worse = (outputs[name].logprobs.sum(axis=1) for name in ("chosen", "rejected"))
    loss = (batch["weight"] * jnp.logaddexp(0.0, worse - better)).sum()
    return loss, batch["weight"].sum(), {"accuracy": (batch["weight"] * (better > worse)).sum()}


def test_a_pair_of_sequences_stays_together_and_the_model_runs_on_both():
    chosen, rejected = make_batch(), make_batch(seed=1)
    batch = {
        "sequences": {"chosen": chosen["sequences"], "rejected": rejected["sequences"]},
        "weight": chosen["weight"],
    }
    params, one = first_params(MODEL), Layout.over((0,), Strategy())

    def mean(params):
        outputs = {n: heads.policy_outputs(params, x, MODEL, one) for n, x in batch["sequences"].items()}
        loss, weight, metrics = pair_loss(outputs, batch, None)
        return loss / weight, metrics["accuracy"] / weight

    (value, accuracy), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    expected, _, _ = adam(params, init_optimizer(OPTIMIZER, params), gradient)
    terms = (Term(pair_loss, batch),)
    for strategy in (Strategy(micro_batches=2), Strategy(data=2, micro_batches=2, balance=True)):
        trained, _, metrics = train_terms(terms, Update(), strategy)
        np.testing.assert_allclose([metrics["loss"], metrics["accuracy"]], [value, accuracy], rtol=1e-5)
        for got, want in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        arrays, _, rebuild = split_args((terms, Update()))
        layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
        placed = jax.device_put(params, param_shardings(MODEL, layout))
        told = loss_program(ROLE, rebuild, [True] * len(arrays), layout)(placed, arrays)
        np.testing.assert_allclose(told, [accuracy, value], rtol=1e-5)


def test_a_loss_of_scores_is_that_of_the_last_tokens():
    batch, role = make_batch(), ModelRole(dataclasses.replace(MODEL, head="scalar"), OPTIMIZER, num_updates=10)
    params = first_params(role.model)
    layout = Layout.over((0,), Strategy())
    arrays, _, rebuild = split_args(((Term(sum_of_scores, batch, of="scores"),), Update()))
    loss = loss_program(role, rebuild, [True] * len(arrays), layout)(params, arrays)
    scores = jax.jit(lambda params: heads.scores(params, batch["sequences"], role.model, layout))(params)
    np.testing.assert_allclose(loss, [scores.mean()], rtol=1e-5)


def sum_of_scores(outputs, batch, update):
    return outputs.sum(), jnp.float32(outputs.shape[0]), {}


def test_inference_in_micro_batches_keeps_the_order_of_rows():
    rollout = make_batch()["sequences"]
    params = first_params(MODEL)
    outputs = []
    for strategy in (Strategy(), Strategy(micro_batches=4), Strategy(data=2, micro_batches=2)):
        layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
        arrays, _, rebuild = split_args((rollout,))
        placed = jax.device_put(params, param_shardings(MODEL, layout))
        outputs.append(np.asarray(infer_program(ROLE, "logprobs", rebuild, layout)(placed, arrays)[0]))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)
    np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-5)
    assert np.abs(outputs[0][0] - outputs[0][1]).max() > 1e-2


def test_generation_in_micro_batches_and_through_stages_keeps_the_order_of_rows():
    rollout, sampling = make_batch()["sequences"], Sampling(max_new_tokens=R, num_samples=2, stop_ids=(3, 17))
    prompts = Prompts(rollout.tokens[:, :P], rollout.mask[:, :P], rollout.row, rollout.id)
    arrays, _, rebuild = split_args((prompts, sampling))
    rollouts = []
    for strategy in (Strategy(), Strategy(data=2, micro_batches=2), Strategy(pipeline=2, data=2, micro_batches=2)):
        layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
        params = reallocate(first_params(MODEL), param_shardings(MODEL, layout))
        if layout.is_pipelined:
            params = ring_params(params, MODEL, layout, move=reallocate)
        placed = jax.device_put(arrays, layout.rows)
        rollouts.append(generate_program(ROLE, rebuild, layout)(params, NOISE, jnp.float32(1), placed))
    for other in rollouts[1:]:
        for x, expected in zip(jax.device_get(other), jax.device_get(rollouts[0]), strict=True):
            np.testing.assert_allclose(x, expected, atol=1e-5 if x.dtype == np.float32 else 0)
    assert len({tuple(tokens) for tokens in np.asarray(rollouts[0][0]).tolist()}) == 2 * B


IN_PARTS = {
    "all at once": Strategy(data=2, tensor=2),
    "all at once, over stages": Strategy(data=2, pipeline=2),
    "slots": Strategy(data=2, slots=2, prefill_rows=1),
    "slots over stages": Strategy(data=2, pipeline=2, slots=4, prefill_rows=1),
}


@pytest.mark.parametrize("strategy", IN_PARTS.values(), ids=IN_PARTS)
def test_generation_in_parts_gives_the_same_bits_and_says_how_far_it_is(strategy):
    rollout, sampling = make_batch()["sequences"], Sampling(max_new_tokens=20, num_samples=2, stop_ids=(3, 17))
    prompts = Prompts(rollout.tokens[:, :P], rollout.mask[:, :P], rollout.row, rollout.id)
    arrays, _, rebuild = split_args((prompts, sampling))
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    params = jax.device_put(first_params(MODEL), param_shardings(MODEL, layout))
    if layout.is_pipelined:
        params = ring_params(params, MODEL, layout, move=jax.device_put)
    given = (params, NOISE, jnp.float32(1), jax.device_put(arrays, layout.rows))
    whole = generate_program(ROLE, rebuild, layout)(*given)
    program = model_program("generate", "", ROLE, rebuild, [True] * len(arrays), layout, part_tokens=8)
    dispatched: list[Progress] = []
    for x, expected in zip(program(*given, dispatched.append), whole, strict=True):
        np.testing.assert_array_equal(x, expected)
    parts = [np.sum(part.progress, axis=0).tolist() for part in dispatched]
    assert parts == sorted(parts) and len(parts) > 3
    assert parts[-1][:2] == [2 * B, int(np.sum(whole[2]))] and parts[0][1] < parts[1][1] < parts[-1][1]
    assert {part.name for part in dispatched} == ({"prefill and decode"} if strategy.slots else {"prefill", "decode"})


@pytest.mark.parametrize("strategy", [Strategy(data=4), Strategy(data=2, fsdp=2, micro_batches=2)], ids=str)
def test_balanced_inference_gives_the_same_in_the_same_order(strategy):
    rollout, params, outputs = make_batch()["sequences"], first_params(MODEL), []
    for balance in (False, True):
        layout = Layout.over((0, 1, 2, 3), dataclasses.replace(strategy, balance=balance))
        arrays, _, rebuild = split_args((rollout,))
        placed = jax.device_put(params, param_shardings(MODEL, layout))
        outputs.append(np.asarray(infer_program(ROLE, "logprobs", rebuild, layout)(placed, arrays)[0]))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-6)
    assert np.abs(outputs[0][0] - outputs[0][1]).max() > 1e-2


@pytest.mark.parametrize("strategy", [Strategy(data=2, micro_batches=2), Strategy(fsdp=2, tensor=2)], ids=str)
def test_balanced_training_makes_the_same_updates(strategy):
    """Mini-batches are those without: only the order of rows within them differs."""
    update, trained = Update(mini_batches=2, epochs=2), []
    for balance in (False, True):
        trained.append(train(make_batch(), update, dataclasses.replace(strategy, balance=balance)))
    (params, _, metrics), (balanced_params, _, balanced_metrics) = trained
    for name, value in metrics.items():
        np.testing.assert_allclose(balanced_metrics[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), balanced_params, params)


def test_a_balanced_program_deals_its_rows():
    rollout, layout = make_batch()["sequences"], Layout.over((0, 1), Strategy(data=2, balance=True))
    order, inverse = jax.jit(lambda x: micro_batches.balanced(x, layout))(rollout)
    tokens_B = np.asarray(rollout.mask.sum(axis=1))
    undealt, dealt = (tokens_B.reshape(2, -1).sum(axis=1), tokens_B[np.asarray(order)].reshape(2, -1).sum(axis=1))
    assert np.ptp(dealt) < np.ptp(undealt)
    np.testing.assert_array_equal(tokens_B[np.asarray(order)][np.asarray(inverse)], tokens_B)
