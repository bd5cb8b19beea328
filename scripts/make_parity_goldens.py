"""Make the tiny checkpoints under tests/parity/data and what transformers computes with them.

The committed ones were made on a CPU with Python 3.11, torch 2.13.0 (from `mistral` on 2.14.1), transformers 5.23.0 and
safetensors 0.8.0, by

    python3 -m venv goldens && goldens/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    goldens/bin/python scripts/make_parity_goldens.py

Each goldens.npz holds a batch of prompts padded on the left, the responses that greedy decoding gives, and at every
real token the logits and the hidden states: after each layer, then after the last norm. Every sequence is computed
alone and unpadded, so padding is no part of what is compared.

With --check, the other way round: models of other random weights, written by jaxrlhf, must load in transformers without
a missing or unexpected weight and give the same logits and scores; and adapters of random weights in PEFT, on such a
model. It needs jaxrlhf's packages beside those above, and peft==0.21.2.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

DATA = Path(__file__).parent.parent / "tests" / "parity" / "data"
PROMPT_LENGTHS = (2, 3, 4, 5)
NUM_NEW = 8
TOLERANCE = 1e-4

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# an epsilon large enough to be seen, and frequencies of which one is kept, one interpolated, two are stretched
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=40, rms_norm_eps=1e-2, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2": transformers.Qwen2Config(
        **SIZES,
        num_hidden_layers=3,
        intermediate_size=32,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": transformers.Qwen3Config(
        **SIZES,
        num_hidden_layers=2,
        intermediate_size=40,
        rms_norm_eps=1e-2,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
}
WINDOW = 4
CONFIGS |= {
    "mistral": transformers.MistralConfig(
        **SIZES,
        num_hidden_layers=2,
        intermediate_size=40,
        rms_norm_eps=1e-2,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "qwen2_windows": transformers.Qwen2Config(
        **SIZES,
        num_hidden_layers=3,
        intermediate_size=32,
        rms_norm_eps=1e-3,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "olmo2": transformers.Olmo2Config(
        **SIZES,
        num_hidden_layers=2,
        intermediate_size=40,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=3,
        intermediate_size=40,
        rms_norm_eps=1e-2,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}
AUTO_MODELS = {
    "lm": transformers.AutoModelForCausalLM,
    "scalar": transformers.AutoModelForSequenceClassification,
}
SEEDS = {"llama": 0, "qwen2": 44, "qwen3": 2, "mistral": 3, "qwen2_windows": 2, "olmo2": 0, "gemma3": 2}


def make(name: str, seed: int) -> None:
    """Write one checkpoint and its goldens."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    randomise(model)
    folder = DATA / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    P, T = max(PROMPT_LENGTHS), max(PROMPT_LENGTHS) + NUM_NEW
    B, L = len(PROMPT_LENGTHS), model.config.num_hidden_layers
    prompts_BP = np.zeros((B, P), np.int32)
    mask_BP = np.zeros((B, P), bool)
    responses_BR = np.zeros((B, NUM_NEW), np.int32)
    logits_BTV = np.zeros((B, T, model.config.vocab_size), np.float32)
    hidden_LBTD = np.zeros((L + 1, B, T, model.config.hidden_size), np.float32)
    for b, length in enumerate(PROMPT_LENGTHS):
        tokens = torch.randint(0, model.config.vocab_size, (1, length))
        prompts_BP[b, P - length :] = tokens[0]
        mask_BP[b, P - length :] = True
        for r in range(NUM_NEW):
            best = torch.topk(model(tokens).logits[0, -1], 2)
            assert best.values[0] - best.values[1] > 100 * TOLERANCE, "a near tie: choose another seed"
            responses_BR[b, r] = best.indices[0]
            tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
        logits_BTV[b, P - length :], hidden_LBTD[:, b, P - length :] = outputs(model, tokens)
    np.savez_compressed(
        folder / "goldens.npz",
        prompts=prompts_BP,
        mask=mask_BP,
        responses=responses_BR,
        logits=logits_BTV,
        hidden=hidden_LBTD,
    )
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes, responses\n{responses_BR}")


def randomise(model: Any) -> None:
    """Weights of which none is without effect: activations of size 1, norms and biases away from 1 and 0.

    A tied embedding is small, or every token would be followed by itself.
    The weights of Gemma's norms are added to one.
    """
    is_gemma = model.config.model_type == "gemma3_text"
    embedding_stddev = 0.11 if is_gemma else 0.25 if model.config.tie_word_embeddings else 1.0
    norms = 0.0 if is_gemma else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(0.5 * torch.randn(weight.shape) + (norms if "norm" in name else 0.0))
            else:
                stddev = embedding_stddev if "embed" in name else weight.shape[1] ** -0.5
                weight.copy_(stddev * torch.randn(weight.shape))


def outputs(model: Any, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    """The logits of one sequence, and what each layer and the last norm give out."""
    hidden = []

    def record(module: Any, inputs: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_hook(record) for module in (*model.model.layers, model.model.norm)]
    logits = model(tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.numpy(), torch.cat(hidden).numpy()


def check(name: str) -> None:
    """A model written by jaxrlhf computes the same in transformers."""
    import jax
    import jax.numpy as jnp

    from jaxrlhf.experience import Sequences
    from jaxrlhf.models import heads
    from jaxrlhf.models.config_json import read_config
    from jaxrlhf.models.huggingface import load_params, save_params
    from jaxrlhf.models.params import init_params
    from jaxrlhf.models.transformer import hidden_states
    from jaxrlhf.sharding.layout import Layout
    from jaxrlhf.sharding.strategy import Strategy

    layout = Layout.over((0,), Strategy())
    tokens_BT = np.random.default_rng(0).integers(1, 128, (3, 11))
    mask_BT = jnp.ones(tokens_BT.shape, bool)
    key = jax.random.key(1)
    for head in ("lm", "scalar"):
        config = read_config(DATA / name, head=head)
        params = jax.tree.map(lambda w: w + 0.3 * jax.random.normal(key, w.shape), init_params(config, key))
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                save_params(params, config, folder, dtype=dtype, pad_id=0)
                assert read_config(folder, head=head) == config
                loaded = load_params(folder, config)
                model, info = AUTO_MODELS[head].from_pretrained(folder, output_loading_info=True)
                # not `model.float()`, which keeps what Gemma has rounded beside its weights
                wide = AUTO_MODELS[head].from_pretrained(folder, dtype=torch.float32)
            problems = {kind: found for kind, found in info.items() if found}
            assert not problems, problems
            assert str(model.dtype) == f"torch.{dtype}" and type(model).__name__ in model.config.architectures
            with torch.no_grad():
                theirs = wide.eval()(torch.tensor(tokens_BT)).logits.numpy()
            if head == "lm":
                hidden_BTD = hidden_states(loaded, jnp.asarray(tokens_BT), mask_BT, config, layout)
                ours = np.asarray(heads.logits(loaded, hidden_BTD, config, layout))
            else:
                sequences = Sequences(tokens=jnp.asarray(tokens_BT), mask=mask_BT, response=mask_BT[:, 4:])
                ours = np.asarray(heads.scores(loaded, sequences, config, layout))[:, None]
            deviation = np.abs(ours - theirs).max()
            print(f"{name}, {head} head, {dtype}: {np.abs(theirs).max():.2f} at most, deviation {deviation:.1e}")
            assert deviation < TOLERANCE


def check_adapters(name: str) -> None:
    """Adapters written by jaxrlhf compute the same in PEFT, on a model written by jaxrlhf."""
    import jax
    import jax.numpy as jnp
    import peft  # pyright: ignore[reportMissingImports]

    from jaxrlhf.experience import Sequences
    from jaxrlhf.models import heads
    from jaxrlhf.models.adapter_files import load_adapters, save_adapters
    from jaxrlhf.models.config_json import read_config
    from jaxrlhf.models.huggingface import save_params
    from jaxrlhf.models.lora import LoRAConfig, adapt, init_adapters
    from jaxrlhf.models.params import init_params
    from jaxrlhf.models.transformer import hidden_states
    from jaxrlhf.sharding.layout import Layout
    from jaxrlhf.sharding.strategy import Strategy

    layout, lora = Layout.over((0,), Strategy()), LoRAConfig(rank=3, alpha=5.0)
    tokens_BT = np.random.default_rng(0).integers(1, 128, (3, 11))
    mask_BT = jnp.ones(tokens_BT.shape, bool)
    for head in ("lm", "scalar"):
        config = read_config(DATA / name, head=head)
        params, adapters = init_params(config, jax.random.key(1)), init_adapters(config, lora, jax.random.key(2))
        adapters = jax.tree.map(lambda w: w + 0.3 * jax.random.normal(jax.random.key(3), w.shape), adapters)
        with tempfile.TemporaryDirectory() as temporary:
            base, folder = Path(temporary) / "base", Path(temporary) / "adapters"
            save_params(params, config, base, dtype="float32", pad_id=0)
            save_adapters(adapters, config, lora, folder, base=str(base))
            loaded = adapt(params, load_adapters(folder, config, lora, layout), config, lora)
            model = peft.PeftModel.from_pretrained(AUTO_MODELS[head].from_pretrained(base), folder)
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(tokens_BT)).logits.numpy()
        if head == "lm":
            hidden_BTD = hidden_states(loaded, jnp.asarray(tokens_BT), mask_BT, config, layout)
            ours = np.asarray(heads.logits(loaded, hidden_BTD, config, layout))
        else:
            sequences = Sequences(tokens=jnp.asarray(tokens_BT), mask=mask_BT, response=mask_BT[:, 4:])
            ours = np.asarray(heads.scores(loaded, sequences, config, layout))[:, None]
        deviation = np.abs(ours - theirs).max()
        print(f"{name}, {head} head, adapters: {np.abs(theirs).max():.2f} at most, deviation {deviation:.1e}")
        assert deviation < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check that transformers reads what jaxrlhf writes")
    parser.add_argument("--only", nargs="*", default=list(SEEDS), choices=SEEDS, help="some of the checkpoints")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in given.only:
        if given.check:
            check(name)
            check_adapters(name)
        else:
            with torch.no_grad():
                make(name, SEEDS[name])


if __name__ == "__main__":
    main()
