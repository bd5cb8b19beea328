"""Make the files under tests/algorithms/data: losses and their gradients on random batches, by other libraries.

The committed ones were made on a CPU with Python 3.11, torch 2.13.0, trl 1.16.0, verl 0.9.1 and transformers 5.23.0, by

    python3 -m venv references && references/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0
    references/bin/pip install --no-deps verl==0.9.1
    references/bin/pip install ray tensordict hydra-core codetiming pandas orjson
    references/bin/python scripts/make_loss_references.py

What is run is the libraries' own code, on made-up log-probabilities, values and scores: verl's core_algos.py for PPO
(`compute_policy_loss` with its third clip out of reach, `compute_value_loss`, `compute_gae_advantage_return`) and for
GSPO, and the `_compute_loss` or `compute_loss` of TRL's GRPOTrainer, DPOTrainer and RewardTrainer, as methods of a
stand-in for the trainer that holds the settings which they read, with a stand-in for the model.

Each npz file has the inputs, and for each case its loss and the gradient with respect to what the model says. B, R and
the number of samples to a prompt are in the arrays' shapes.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from trl import DPOTrainer, GRPOTrainer, RewardTrainer  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

DATA = Path(__file__).parent.parent / "tests" / "algorithms" / "data"
B, R, NUM_SAMPLES = 6, 7, 3
OUT_OF_REACH = 1e9


def draw(seed: int, mean: float, std: float, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return mean + std * torch.randn(*shape, generator=generator)


def mask_of(*lengths: int) -> Any:
    return (torch.arange(R)[None] < torch.tensor(lengths)[:, None]).float()


def differentiated(loss: Callable[[Any], Any], at: Any) -> tuple[Any, Any]:
    """A loss and its gradient."""
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    return value.detach(), leaf.grad


def save(name: str, arrays: dict[str, Any]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{name}_references.npz"
    plain: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
    np.savez_compressed(path, **plain)
    print(f"{path}: {', '.join(arrays)}")


def make_ppo() -> None:
    """The clipped surrogate, the clipped value loss and GAE, by verl."""
    mask_BR = mask_of(7, 3, 5, 1, 6, 4)
    old_BR, rewards_BR, old_values_BR = draw(0, -2, 1, B, R), draw(1, 0, 1, B, R), draw(2, 0, 1, B, R)
    logprobs_BR, values_BR = old_BR + draw(3, 0, 0.3, B, R), old_values_BR + draw(4, 0, 0.5, B, R)
    advantages_BR, returns_BR = core_algos.compute_gae_advantage_return(
        token_level_rewards=rewards_BR, values=old_values_BR, response_mask=mask_BR, gamma=0.97, lam=0.9
    )
    arrays = {"mask": mask_BR, "old_logprobs": old_BR, "logprobs": logprobs_BR, "rewards": rewards_BR}
    arrays |= {"old_values": old_values_BR, "values": values_BR, "advantages": advantages_BR, "returns": returns_BR}
    aggregations = {"token": "token-mean", "sequence": "seq-mean-token-mean", "sum": "seq-mean-token-sum"}
    aggregations["constant"] = "seq-mean-token-sum-norm"
    for aggregation, mode in aggregations.items():
        for clips, (low, high) in {"even": (0.2, 0.2), "uneven": (0.2, 0.28)}.items():
            arrays[f"{aggregation}_{clips}_loss"], arrays[f"{aggregation}_{clips}_grad"] = differentiated(
                lambda x, low=low, high=high, mode=mode: core_algos.compute_policy_loss(
                    old_BR,
                    x,
                    advantages_BR,
                    mask_BR,
                    cliprange_low=low,
                    cliprange_high=high,
                    clip_ratio_c=OUT_OF_REACH,
                    loss_agg_mode=mode,
                )[0],
                logprobs_BR,
            )
    arrays["value_loss"], arrays["value_grad"] = differentiated(
        lambda x: core_algos.compute_value_loss(x, returns_BR, old_values_BR, mask_BR, cliprange_value=0.2)[0],
        values_BR,
    )
    config = ActorConfig(strategy="fsdp", rollout_n=1, clip_ratio_low=0.1, clip_ratio_high=0.15, use_dynamic_bsz=True)
    arrays["gspo_loss"], arrays["gspo_grad"] = differentiated(
        lambda x: core_algos.compute_policy_loss_gspo(
            old_BR, x, advantages_BR[:, :1].expand(B, R), mask_BR, "seq-mean-token-mean", config
        )[0],
        logprobs_BR,
    )
    save("ppo", arrays)


def make_grpo() -> None:
    """GRPO, its mean over tokens, Dr. GRPO and GSPO, by TRL; advantages by verl."""
    mask_BR, scores_B = mask_of(7, 3, 5, 1, 6, 4), draw(5, 0, 1, B)
    old_BR = draw(6, -2, 1, B, R)
    logprobs_BR, reference_BR = old_BR + draw(7, 0, 0.3, B, R), old_BR + draw(8, 0, 0.3, B, R)
    groups = np.repeat(np.arange(B // NUM_SAMPLES), NUM_SAMPLES)
    arrays = {"mask": mask_BR, "old_logprobs": old_BR, "logprobs": logprobs_BR, "reference": reference_BR}
    arrays |= {"scores": scores_B, "num_samples": NUM_SAMPLES}
    scores_BR = torch.zeros(B, R)
    scores_BR[:, 0] = scores_B
    for name, by_std in {"grpo": True, "dr_grpo": False}.items():
        advantages_BR, _ = core_algos.compute_grpo_outcome_advantage(
            scores_BR, mask_BR, index=groups, norm_adv_by_std_in_grpo=by_std
        )
        arrays[f"{name}_advantages"] = advantages_BR
    arrays["rloo_advantages"], _ = core_algos.compute_rloo_outcome_advantage(scores_BR, mask_BR, index=groups)

    def loss(x: Any, loss_type: str, level: str, beta: float) -> Any:
        trainer = MagicMock(loss_type=loss_type, importance_sampling_level=level, beta=beta)
        trainer.epsilon_low, trainer.epsilon_high, trainer.max_completion_length = 0.2, 0.2, R
        trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = trainer.use_vllm = trainer.model.training = False
        trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
        trainer.args.use_bias_correction_kl, trainer.args.delta = False, None
        trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
        trainer._get_per_token_logps_and_entropies.return_value = (x, torch.zeros(B, R), None)
        tokens = torch.zeros(B, R, dtype=torch.long)
        inputs = {"prompt_ids": tokens, "prompt_mask": tokens, "completion_ids": tokens, "completion_mask": mask_BR}
        name = "dr_grpo" if loss_type == "dr_grpo" else "grpo"
        inputs |= {"advantages": arrays[f"{name}_advantages"][:, 0], "old_per_token_logps": old_BR}
        inputs |= {"ref_per_token_logps": reference_BR, "num_items_in_batch": mask_BR.sum()}
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    cases = {"grpo_sequence": ("grpo", "token", 0.04), "grpo_token": ("bnpo", "token", 0.04)}
    cases |= {"dr_grpo": ("dr_grpo", "token", 0.0), "gspo": ("grpo", "sequence", 0.0)}
    for name, (loss_type, level, beta) in cases.items():
        arrays[f"{name}_loss"], arrays[f"{name}_grad"] = differentiated(
            lambda x, loss_type=loss_type, level=level, beta=beta: loss(x, loss_type, level, beta), logprobs_BR
        )
    save("grpo", arrays)


def make_dpo() -> None:
    """DPO, with label smoothing as in "robust", and IPO, by TRL. The first half of the rows was preferred.

    TRL divides what IPO compares by the number of tokens, which the paper does not: for IPO responses have one token.
    """
    mask_BR, one_token_BR = mask_of(7, 3, 5, 1, 6, 4), mask_of(1, 1, 1, 1, 1, 1)
    logprobs_BR, reference_BR = draw(9, -2, 1, B, R), draw(10, -2, 1, B, R)
    arrays = {
        "mask": mask_BR,
        "ipo_mask": one_token_BR,
        "logprobs": logprobs_BR,
        "reference": reference_BR,
        "beta": 0.1,
        "label_smoothing": 0.2,
    }

    def loss(x: Any, loss_type: str, label_smoothing: float) -> Any:
        mask_BR = arrays["ipo_mask" if loss_type == "ipo" else "mask"]
        chosen_B, rejected_B = (reference_BR * mask_BR).sum(dim=1).chunk(2)
        trainer = MagicMock(loss_types=[loss_type], loss_weights=[1.0], beta=0.1, label_smoothing=label_smoothing)
        trainer.accelerator.device, trainer.ld_alpha, trainer.f_divergence_type = "cpu", None, "reverse_kl"
        trainer.aux_loss_enabled = trainer.use_weighting = False
        trainer.precompute_ref_logps = True
        trainer.args.use_weighting = False
        trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda x: x
        before = torch.zeros(B, 1)  # the token before the first of a response
        inputs = {"input_ids": torch.zeros(B, R + 1, dtype=torch.long), "attention_mask": torch.ones(B, R + 1)}
        inputs |= {"completion_mask": torch.cat([before, mask_BR], dim=1)}
        inputs |= {"ref_chosen_logps": chosen_B, "ref_rejected_logps": rejected_B}
        said_of_nothing = {"entropy": torch.zeros(B, R), "mean_logits": torch.zeros(B, R)}
        outputs = MagicMock(log_probs=x * mask_BR, is_top1=torch.zeros(B, R, dtype=torch.bool), **said_of_nothing)
        return DPOTrainer._compute_loss(trainer, MagicMock(return_value=outputs), inputs, return_outputs=False)

    for name, (loss_type, smoothing) in {
        "sigmoid": ("sigmoid", 0.0),
        "ipo": ("ipo", 0.0),
        "robust": ("robust", 0.2),
    }.items():
        arrays[f"{name}_loss"], arrays[f"{name}_grad"] = differentiated(
            lambda x, loss_type=loss_type, smoothing=smoothing: loss(x, loss_type, smoothing), logprobs_BR
        )
    save("dpo", arrays)


def make_reward_model() -> None:
    """Bradley-Terry with and without margins, and with the term that centers scores, by TRL."""
    scores_2B, margin_B = draw(11, 0, 1, 2 * B, 1), draw(12, 0, 0.5, B)
    arrays = {"scores": scores_2B[:, 0], "margin": margin_B, "centering": 0.01}

    def loss(x: Any, margin: bool, centering: float | None) -> Any:
        trainer = MagicMock(_total_train_tokens=0)
        trainer.args.center_rewards_coefficient, trainer.model.training = centering, False
        trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda x: x
        inputs = {"margin": margin_B} if margin else {}
        return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=x), inputs)

    for name, (margin, centering) in {"plain": (False, None), "margin": (True, None), "centered": (True, 0.01)}.items():
        arrays[f"{name}_loss"], grads = differentiated(
            lambda x, margin=margin, centering=centering: loss(x, margin, centering), scores_2B
        )
        arrays[f"{name}_grad"] = grads[:, 0]
    save("reward_model", arrays)


if __name__ == "__main__":
    make_ppo()
    make_grpo()
    make_dpo()
    make_reward_model()
