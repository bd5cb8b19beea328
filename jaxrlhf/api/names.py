"""All public names of the package, imported: `jaxrlhf.__getattr__` looks them up here when they are first used."""

# ruff: noqa: F401

from jaxrlhf.algorithms.algorithm import Algorithm, Rows, demonstrations, preferences, prompts
from jaxrlhf.algorithms.dapo import DAPOConfig
from jaxrlhf.algorithms.dpo import DPOConfig
from jaxrlhf.algorithms.group import group_advantages, leave_one_out
from jaxrlhf.algorithms.grpo import DrGRPOConfig, GRPOConfig
from jaxrlhf.algorithms.gspo import GSPOConfig
from jaxrlhf.algorithms.kl import KLPenalty, KLTerm
from jaxrlhf.algorithms.masked import masked_count, masked_mean, masked_sum, whiten
from jaxrlhf.algorithms.policy import PolicyUpdate, ReinforceUpdate, ppo_policy_loss, reinforce_policy_loss
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, value_loss
from jaxrlhf.algorithms.ppo_ptx import PPOPtxConfig
from jaxrlhf.algorithms.ppo_shared import PPOSharedConfig
from jaxrlhf.algorithms.reinforce_plus_plus import ReinforcePlusPlusConfig
from jaxrlhf.algorithms.remax import ReMaxConfig
from jaxrlhf.algorithms.reported import rollout_metrics, score_metrics, summary
from jaxrlhf.algorithms.returns import gae
from jaxrlhf.algorithms.reward_model import RewardModelConfig
from jaxrlhf.algorithms.rloo import RLOOConfig
from jaxrlhf.algorithms.safe_rlhf import SafeRLHFConfig
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_loss
from jaxrlhf.api.charts import BarsDisplay, CurvesDisplay, bars, curves
from jaxrlhf.api.configs import read_config, write_config
from jaxrlhf.api.displays import GraphDisplay, PlanDisplay, TimelineDisplay
from jaxrlhf.api.planning import Forecast, forecast
from jaxrlhf.api.run import Run, RunEndedError
from jaxrlhf.api.starting import resume, train
from jaxrlhf.checkpoint.store import CheckpointError
from jaxrlhf.config.plan_config import Placement, PlanConfig, ResponseLengths, Tail
from jaxrlhf.config.schema import (
    AverageConfig,
    MemoryLimits,
    MlflowConfig,
    OptimizerConfig,
    OutputConfig,
    RoleConfig,
    RunConfig,
    StalenessConfig,
    WandbConfig,
    WarmStartConfig,
)
from jaxrlhf.config.schema import EvaluationRunConfig as EvaluationConfig
from jaxrlhf.data.arithmetic import ArithmeticConfig
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.retokenizing import OwnTokenizerConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.experience import (
    Max,
    PolicyAndValues,
    PolicyOutputs,
    Preferences,
    Prompts,
    Rollout,
    Sampling,
    Sequences,
    Term,
)
from jaxrlhf.models.config import ModelConfig, RopeScaling
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.observe.metrics import TrainingError
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.checked_run import InputError
from jaxrlhf.run.interruption import RunStopped
from jaxrlhf.run.memory_remedies import OutOfMemoryError
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import RoleHandle, Roles, compute
from jaxrlhf.writing import UnwritableError
