"""Checkpoints of transformers compute here what they compute there, and survive being written and read.

The goldens are made by scripts/make_parity_goldens.py.

Letters: B sequences, P prompt columns, R response columns, T = P + R, D hidden size, V vocabulary, L outputs: each
layer's, then the last norm's.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.generation import generate
from jaxrlhf.models import heads, layers
from jaxrlhf.models.config import FULL, SLIDING, ModelConfig, RopeScaling
from jaxrlhf.models.config_json import Origin, read_config
from jaxrlhf.models.huggingface import load_params, read_origin, save_params
from jaxrlhf.models.params import Params, init_params, param_shardings, with_layers
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.subprocesses import run_processes

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-4

LLAMA = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_position_embeddings=256,
    norm_eps=1e-2,
    rope_scaling=RopeScaling(original_max_position_embeddings=128),
)
QWEN2 = dataclasses.replace(
    LLAMA, intermediate_size=32, num_layers=3, norm_eps=1e-3, rope_theta=1e6, rope_scaling=None, attention_bias=True,
    tie_embeddings=True,
)  # fmt: skip
QWEN3 = dataclasses.replace(LLAMA, head_dim=12, rope_theta=500.0, rope_scaling=None, qk_norm=True)
MISTRAL = dataclasses.replace(LLAMA, rope_theta=500.0, rope_scaling=None, sliding_window=4)
QWEN2_WINDOWS = dataclasses.replace(
    QWEN2, rope_theta=500.0, tie_embeddings=False, sliding_window=4, layer_types=(FULL, SLIDING, SLIDING)
)
OLMO2 = dataclasses.replace(
    LLAMA, rope_theta=500.0, rope_scaling=None, norms="after", qk_norm=True, qk_norm_over="projection"
)
GEMMA3 = dataclasses.replace(
    LLAMA,
    num_layers=3,
    head_dim=12,
    rope_theta=500.0,
    rope_scaling=RopeScaling(2.0, type="linear"),
    rope_local_theta=50.0,
    sliding_window=4,
    layer_types=(SLIDING, FULL),
    query_pre_attn_scalar=20.0,
    qk_norm=True,
    norms="both",
    norm_plus_one=True,
    scale_embeddings=True,
    activation="gelu_pytorch_tanh",
    tie_embeddings=True,
)
CONFIGS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "qwen2_windows": QWEN2_WINDOWS,
    "olmo2": OLMO2,
    "gemma3": GEMMA3,
}
NAMES = tuple(CONFIGS)
SMALL = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1)


@dataclasses.dataclass(frozen=True)
class Goldens:
    tokens_BT: np.ndarray
    mask_BT: np.ndarray
    prompts: Prompts
    responses_BR: np.ndarray
    logits_BTV: np.ndarray
    hidden_LBTD: np.ndarray


def goldens(name: str) -> Goldens:
    with np.load(DATA / name / "goldens.npz") as stored:
        prompts_BP, mask_BP, responses_BR = (stored[key] for key in ("prompts", "mask", "responses"))
        B = prompts_BP.shape[0]
        return Goldens(
            tokens_BT=np.concatenate([prompts_BP, responses_BR], axis=1),
            mask_BT=np.concatenate([mask_BP, np.ones_like(responses_BR, bool)], axis=1),
            prompts=Prompts(
                tokens=jnp.asarray(prompts_BP),
                mask=jnp.asarray(mask_BP),
                row=jnp.arange(B),
                id=jnp.arange(B, dtype=jnp.uint32),
            ),
            responses_BR=responses_BR,
            logits_BTV=stored["logits"],
            hidden_LBTD=stored["hidden"],
        )


def one_device() -> Layout:
    return Layout.over((0,), Strategy())


def forward(params: Params, config: ModelConfig, layout: Layout, golden: Goldens, *, padding: int = 0) -> np.ndarray:
    """The logits of the golden batch, with more padding on the right."""

    @jax.jit
    def logits(params: Params, tokens_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return heads.logits(params, hidden_states(params, tokens_BT, mask_BT, config, layout), config, layout)

    tokens_BT, mask_BT = (np.pad(x, ((0, 0), (0, padding))) for x in (golden.tokens_BT, golden.mask_BT))
    return np.asarray(logits(params, tokens_BT, mask_BT))[:, : golden.tokens_BT.shape[1]]


def greedy(params: Params, config: ModelConfig, layout: Layout, golden: Goldens) -> tuple[np.ndarray, np.ndarray]:
    sampling = Sampling(max_new_tokens=golden.responses_BR.shape[1], temperature=0.0)
    noise = jnp.zeros(3, jnp.uint32)
    decode = jax.jit(generate.generate, static_argnames=("sampling", "config", "layout"))
    rollout = decode(params, golden.prompts, noise, jnp.float32(0), sampling=sampling, config=config, layout=layout)
    return np.asarray(rollout.tokens[:, golden.prompts.tokens.shape[1] :]), np.asarray(rollout.logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_config(name: str) -> None:
    assert read_config(DATA / name) == CONFIGS[name]
    assert read_config(DATA / name, head="scalar") == dataclasses.replace(CONFIGS[name], head="scalar")


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str) -> None:
    golden, config = goldens(name), CONFIGS[name]
    logits_BTV = forward(load_params(DATA / name, config), config, one_device(), golden, padding=3)
    np.testing.assert_allclose(logits_BTV[golden.mask_BT], golden.logits_BTV[golden.mask_BT], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_of_every_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream as the MLP of each layer leaves it, and what the last norm makes of it."""
    golden, config = goldens(name), CONFIGS[name]
    residual, add_mlp = [], layers.add_mlp

    def recorded(*args: Any) -> jax.Array:
        residual.append(add_mlp(*args))
        return residual[-1]

    monkeypatch.setattr(layers, "add_mlp", recorded)
    params = load_params(DATA / name, config)
    last_BTD = hidden_states(params, jnp.asarray(golden.tokens_BT), jnp.asarray(golden.mask_BT), config, one_device())
    assert len(residual) == config.num_layers
    ours_LBTD = np.stack([*residual, last_BTD])
    mask_BT = golden.mask_BT
    np.testing.assert_allclose(ours_LBTD[:, mask_BT], golden.hidden_LBTD[:, mask_BT], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding(name: str) -> None:
    golden, config = goldens(name), CONFIGS[name]
    tokens_BR, logprobs_BR = greedy(load_params(DATA / name, config), config, one_device(), golden)
    np.testing.assert_array_equal(tokens_BR, golden.responses_BR)
    P = golden.prompts.tokens.shape[1]
    golden_BRV = np.asarray(jax.nn.log_softmax(golden.logits_BTV[:, P - 1 : -1]))
    golden_BR = np.take_along_axis(golden_BRV, golden.responses_BR[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(logprobs_BR, golden_BR, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        ("llama", {"rope_scaling": None}),
        ("llama", {"rope_scaling": RopeScaling(original_max_position_embeddings=1024)}),
        ("llama", {"norm_eps": 1e-5}),
        ("qwen2", {"rope_theta": 1e4}),
        ("qwen3", {"rope_theta": 1e4}),
        ("qwen3", {"norm_eps": 1e-5}),
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 0}),
        ("qwen2_windows", {"layer_types": (SLIDING,)}),
        ("qwen2_windows", {"layer_types": (FULL, FULL, SLIDING)}),
        ("olmo2", {"norm_eps": 1e-5}),
        ("olmo2", {"rope_theta": 1e4}),
        ("gemma3", {"norm_eps": 1e-5}),
        ("gemma3", {"query_pre_attn_scalar": 0.0}),
        ("gemma3", {"activation": "silu"}),
        ("gemma3", {"scale_embeddings": False}),
        ("gemma3", {"rope_local_theta": 0.0}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"sliding_window": 5}),
        ("gemma3", {"layer_types": (SLIDING,)}),
    ],
    ids=str,
)
def test_goldens_depend_on_settings(change: tuple[str, dict[str, Any]]) -> None:
    """A setting that is read wrongly would be seen."""
    name, fields = change
    golden, config = goldens(name), dataclasses.replace(CONFIGS[name], **fields)
    logits_BTV = forward(load_params(DATA / name, config), config, one_device(), golden)
    assert np.abs(logits_BTV - golden.logits_BTV)[golden.mask_BT].max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_goldens_depend_on_every_weight(name: str) -> None:
    """Weights that are mixed up or left at their start would be seen: none of them is a constant, or equals another."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(load_params(DATA / name, CONFIGS[name]))]
    assert all(np.std(leaf) > 0.1 for leaf in leaves)
    assert len({leaf.tobytes() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", NAMES)
def test_load_into_shards(name: str) -> None:
    golden, config = goldens(name), CONFIGS[name]
    layout = Layout.over(tuple(range(8)), Strategy(fsdp=2, tensor=4))  # twice the key-value heads
    params = load_params(DATA / name, config, layout)
    assert jax.tree.map(lambda w: w.sharding, params) == param_shardings(config, layout)
    chex.assert_trees_all_equal(params, load_params(DATA / name, config))
    logits_BTV = forward(params, config, layout, golden)
    np.testing.assert_allclose(logits_BTV[golden.mask_BT], golden.logits_BTV[golden.mask_BT], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(greedy(params, config, layout, golden)[0], golden.responses_BR)


def test_two_processes() -> None:
    """Every one of them over tensor beyond the key-value heads, and over stages."""
    run_processes("tests.parity.run_layouts", 2, seconds=600)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    params = load_params(DATA / name, config)
    save_params(params, config, tmp_path / "new" / "folder", dtype="float32", end_id=3, pad_id=0)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert read_config(folder) == config
    fields, original = (json.loads((path / "config.json").read_text()) for path in (folder, DATA / name))
    assert (fields["architectures"], fields["model_type"]) == (original["architectures"], original["model_type"])
    assert (fields["torch_dtype"], fields["eos_token_id"], fields["pad_token_id"]) == ("float32", 3, 0)
    chex.assert_trees_all_equal(load_params(folder, config), params)
    chex.assert_trees_all_equal(load_file(folder / "model.safetensors"), load_file(DATA / name / "model.safetensors"))


def test_round_trip_from_stacked_shards_over_an_older_checkpoint(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    params = load_params(DATA / "qwen3", config)
    save_params(jax.tree.map(jnp.zeros_like, params), config, tmp_path, dtype="float32")
    layout = Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2))
    stacked = jax.device_put(with_layers(params, stacked=True), param_shardings(config, layout, stacked=True))
    save_params(stacked, config, tmp_path, dtype="float32")
    chex.assert_trees_all_equal(load_params(tmp_path, config), params)


def test_bfloat16(tmp_path: Path) -> None:
    """Rounded when saved, exactly the rounded numbers in float32 when loaded."""
    params = init_params(SMALL, jax.random.key(0))
    save_params(params, SMALL, tmp_path, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    loaded = load_params(tmp_path, SMALL)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params))


@pytest.mark.parametrize("tied", [False, True])
def test_scalar_head(tied: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    language_model = init_params(config, jax.random.key(0))
    save_params(language_model, config, tmp_path, dtype="float32")
    scalar = read_config(tmp_path, head="scalar")
    params = load_params(tmp_path, scalar)
    assert "lm_head" not in params
    chex.assert_trees_all_equal(params["layers"], language_model["layers"])
    np.testing.assert_array_equal(np.asarray(params["value_head"]), np.zeros((8, 1)))

    trained = {**params, "value_head": jax.random.normal(jax.random.key(1), (8, 1))}
    save_params(trained, scalar, tmp_path, dtype="float32")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape == (1, 8)
    assert read_config(tmp_path, head="scalar") == scalar
    chex.assert_trees_all_equal(load_params(tmp_path, scalar), trained)
    with pytest.raises(ValueError, match=r"architectures: a language-model head .* 'LlamaForSequenceClassification'"):
        read_config(tmp_path)


CAME = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "pad_token_id": None,
    "rope_theta": 10000.0,
    "attention_dropout": 0.1,
    "transformers_version": "4.50.0",
}
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.6}


@pytest.mark.parametrize(
    ("head", "end_id", "changed", "generation"),
    [
        ("lm", 7, {"pad_token_id": 9}, GENERATION),
        ("lm", 5, {"pad_token_id": 9, "eos_token_id": [5, 2, 7]}, GENERATION | {"eos_token_id": [5, 2, 7]}),
        (
            "scalar",
            7,
            {
                "pad_token_id": 9,
                "architectures": ["MistralForSequenceClassification"],
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            },
            None,
        ),
    ],
)
def test_what_came_with_a_folder_goes_out(
    head: Any, end_id: int, changed: dict[str, Any], generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    """But for what is other now: the head, and a token that ends texts."""
    config = dataclasses.replace(SMALL, attention_bias=False, head=head)
    origin = Origin(CAME, GENERATION, "bfloat16")
    params = init_params(config, jax.random.key(0))
    save_params(params, config, tmp_path, dtype="bfloat16", end_id=end_id, pad_id=9, origin=origin)
    assert json.loads((tmp_path / "config.json").read_text()) == CAME | changed
    written = tmp_path / "generation_config.json"
    assert (json.loads(written.read_text()) if written.exists() else None) == generation
    found = read_origin(tmp_path)
    assert (found.precision, found.generation) == ("bfloat16", generation or {})


def test_a_precision_that_is_not_stated_is_that_of_the_weights(tmp_path: Path) -> None:
    save_params(init_params(SMALL, jax.random.key(0)), SMALL, tmp_path, dtype="bfloat16")
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_origin(tmp_path).precision == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": "float16"}))
    assert read_origin(tmp_path).precision == "float16"


def test_several_weight_files(tmp_path: Path) -> None:
    save_params(init_params(SMALL, jax.random.key(0)), SMALL, tmp_path, dtype="float32")
    whole = load_params(tmp_path, SMALL)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for part in set(parts.values()):
        save_file({name: tensor for name, tensor in tensors.items() if parts[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    chex.assert_trees_all_equal(load_params(tmp_path, SMALL), whole)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: must be a whole safetensors file"):
        load_params(tmp_path, SMALL)


def test_weight_files_lie_in_their_folder_or_are_links_there(tmp_path: Path) -> None:
    """Links as in huggingface_hub's cache: snapshots/<commit>/model.safetensors -> ../../blobs/<checksum>."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    save_params(init_params(SMALL, jax.random.key(0)), SMALL, folder, dtype="float32")
    whole = load_params(folder, SMALL)
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "0a1b")
    (folder / "part.safetensors").symlink_to("../../blobs/0a1b")

    def list_weights(**weight_map: Any) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    list_weights(x="part.safetensors")
    chex.assert_trees_all_equal(load_params(folder, SMALL), whole)
    for path in ("../../blobs/0a1b", str(blobs / "0a1b"), "a/part.safetensors", "..", ""):
        list_weights(x="part.safetensors", y=path)
        message = rf"index.json: weight_map: must be a plain file name, such as .* Got {re.escape(repr(path))}"
        with pytest.raises(ValueError, match=message):
            load_params(folder, SMALL)
    list_weights(x=["part.safetensors"])
    with pytest.raises(ValueError, match=r"index.json: weight_map: must be tensors and their files. Got"):
        load_params(folder, SMALL)
