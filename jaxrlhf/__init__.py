"""jaxrlhf: reinforcement learning from feedback for language models, planned and run as one JAX program.

import jaxrlhf as rl

run = rl.Run("grpo_arithmetic", steps=20)
for metrics in run:
    print(metrics["critic/score/mean"])
run.folder, run.metrics, run.generate(["17+85="])
"""

import sys
from typing import TYPE_CHECKING, Any

from jaxrlhf.huge_pages import restart_with_huge_pages

if TYPE_CHECKING:
    from jaxrlhf.api.names import (
        Algorithm,
        ArithmeticConfig,
        AverageConfig,
        BarsDisplay,
        CheckpointError,
        CurvesDisplay,
        DAPOConfig,
        DataConfig,
        DPOConfig,
        DrGRPOConfig,
        EvaluationConfig,
        Forecast,
        GraphDisplay,
        GRPOConfig,
        GSPOConfig,
        InputError,
        KLPenalty,
        KLTerm,
        LoRAConfig,
        Max,
        MemoryLimits,
        MlflowConfig,
        ModelConfig,
        OptimizerConfig,
        OutOfMemoryError,
        OutputConfig,
        OwnTokenizerConfig,
        Placement,
        PlanConfig,
        PlanDisplay,
        PolicyAndValues,
        PolicyOutputs,
        PolicyUpdate,
        PPOConfig,
        PPOPtxConfig,
        PPOSharedConfig,
        Preferences,
        Prompts,
        ReinforcePlusPlusConfig,
        ReinforceUpdate,
        ReMaxConfig,
        ResponseLengths,
        RewardError,
        RewardModelConfig,
        RLOOConfig,
        RoleConfig,
        RoleHandle,
        Roles,
        Rollout,
        RopeScaling,
        Rows,
        Run,
        RunConfig,
        RunEndedError,
        RunStopped,
        SafeRLHFConfig,
        Sampling,
        Sequences,
        SFTConfig,
        StalenessConfig,
        Strategy,
        SupervisedUpdate,
        Tail,
        Term,
        TimelineDisplay,
        TokenizerConfig,
        TrainingError,
        UnwritableError,
        ValueUpdate,
        WandbConfig,
        WarmStartConfig,
        bars,
        compute,
        curves,
        demonstrations,
        forecast,
        gae,
        group_advantages,
        leave_one_out,
        masked_count,
        masked_mean,
        masked_sum,
        ppo_policy_loss,
        preferences,
        prompts,
        read_config,
        reinforce_policy_loss,
        resume,
        rollout_metrics,
        score_metrics,
        sft_loss,
        summary,
        train,
        value_loss,
        whiten,
        write_config,
    )

if sys.argv[:1] == ["-m"]:  # Python is about to run a command of this package
    restart_with_huge_pages()

__version__ = "0.1.0"
__all__ = [
    # runs
    "Run", "train", "resume", "read_config", "write_config", "forecast", "Forecast",
    "PlanDisplay", "GraphDisplay", "TimelineDisplay", "CurvesDisplay", "curves",
    "BarsDisplay", "bars",
    # errors
    "InputError", "RewardError", "TrainingError", "CheckpointError", "UnwritableError", "OutOfMemoryError",
    "RunStopped", "RunEndedError",
    # sections of a config
    "RunConfig", "RoleConfig", "ModelConfig", "RopeScaling", "OptimizerConfig", "LoRAConfig", "AverageConfig",
    "OwnTokenizerConfig", "DataConfig", "ArithmeticConfig", "TokenizerConfig", "Sampling", "WarmStartConfig",
    "EvaluationConfig", "OutputConfig", "WandbConfig", "MlflowConfig", "MemoryLimits", "StalenessConfig",
    "PlanConfig", "Placement", "Strategy", "Tail", "ResponseLengths",
    # settings of algorithms
    "PPOConfig", "PPOPtxConfig", "PPOSharedConfig", "SafeRLHFConfig", "ReMaxConfig", "RLOOConfig", "GRPOConfig",
    "DrGRPOConfig", "DAPOConfig", "GSPOConfig", "ReinforcePlusPlusConfig", "DPOConfig", "RewardModelConfig",
    "SFTConfig", "PolicyUpdate", "ReinforceUpdate", "ValueUpdate", "SupervisedUpdate", "KLPenalty",
    # algorithms of one's own
    "Algorithm", "Rows", "prompts", "demonstrations", "preferences", "compute", "Roles", "RoleHandle",
    "Prompts", "Sequences", "Rollout", "Preferences", "PolicyOutputs", "PolicyAndValues", "Term", "Max", "KLTerm",
    "ppo_policy_loss", "reinforce_policy_loss", "value_loss", "sft_loss", "gae", "group_advantages", "leave_one_out",
    "masked_count", "masked_mean", "masked_sum", "whiten", "summary", "score_metrics", "rollout_metrics",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: JAX can be configured before its import."""
    if name not in __all__:
        raise AttributeError(f"module 'jaxrlhf' has no attribute {name!r}")
    import jaxrlhf.api.names

    return getattr(jaxrlhf.api.names, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
