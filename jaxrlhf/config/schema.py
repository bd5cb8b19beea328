"""The config of a run as frozen dataclasses."""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flax.core import FrozenDict

from jaxrlhf import require as checks
from jaxrlhf.brief import brief, cut
from jaxrlhf.config.algorithm_loading import for_another_algorithm, load_algorithm
from jaxrlhf.config.expand import RANDOM, expand, in_full, stated_model
from jaxrlhf.config.plan_config import PlanConfig
from jaxrlhf.config.reading import FORM, ConfigError, Stated, apply_overrides, build, read_config, to_tree
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.retokenizing import OwnTokenizerConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.name_rules import check_name

MAX_VIRTUAL_DEVICES = 1024
"""The most virtual devices of a CPU that start in reasonable time."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a clipped gradient and a learning rate that warms up and decays.

    >>> OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_updates=20).moment_bytes
    8
    """

    learning_rate: float = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after warm-up: constant, or falling to `final_fraction` of itself at the last update."""
    warmup_updates: int = 0
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it. 0 never clips."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision in which both moments rest. In bfloat16 they take half of the memory and are rounded up or down at
    random, so that small changes are not lost on average."""

    def __post_init__(self) -> None:
        checks.require_fields(self, checks.require_positive, "learning_rate", "eps")
        checks.require_fields(self, checks.require_not_negative, "warmup_updates", "weight_decay", "max_grad_norm")
        checks.require_fields(self, checks.require_fraction, "final_fraction")
        checks.require_fields(self, checks.require_fraction_below_one, "beta1", "beta2")

    @property
    def moment_bytes(self) -> int:
        """Bytes of the two moments of a weight."""
        return 8 if self.state_dtype == "float32" else 4


@dataclasses.dataclass(frozen=True)
class AverageConfig:
    """An exponential moving average of weights: average = decay * average + (1 - decay) * weights.

    With a decay of 0, it is a copy of the weights at its last update.

    >>> RoleConfig(average=AverageConfig(of="actor", decay=0.9)).average
    AverageConfig(of='actor', decay=0.9, every=1)
    """

    of: str
    """The role whose weights it follows."""
    decay: float = 0.99
    every: int = 1
    """Train calls of that role between two updates of the average."""

    def __post_init__(self) -> None:
        checks.require_fraction_below_one(self.decay, "decay")
        checks.require_at_least_one(self.every, "every")


@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """A role: a model, trained if it has an optimizer; a Python function of completions; or a sum of other roles.

    >>> actor = RoleConfig(model="tiny", optimizer=OptimizerConfig(learning_rate=1e-3))
    >>> actor.stated["num_layers"], RoleConfig(function="exact_answer", options={"partial_credit": 0.3}).workers
    (2, 0)
    """

    model: ModelConfig | Mapping[str, Any] | str | None = dataclasses.field(
        default=None, metadata={FORM: (Stated[ModelConfig] | None, lambda model: model, lambda model: to_tree(model))}
    )
    """The sizes and compute settings of the model: all of them with random weights; with `init`, the settings to
    override in the model of that role or folder. None means that model unchanged. Text is the name of a preset. See
    `stated`."""
    head: Head | None = None
    """None means the head of that model. A scalar head that the weights lack starts at zero if it is trained, and else
    at random."""
    init: str = RANDOM
    """The origin of its weights: `random`, the name of another role, or a folder in Hugging Face's format."""
    optimizer: OptimizerConfig | None = None
    lora: LoRAConfig | None = None
    """Train adapters instead of the weights, which stay frozen. A role without an optimizer that starts from this one
    then reads these weights without a copy."""
    shares: str = ""
    """The role whose weights it shares, with a head of its own: a critic on the actor's trunk. It is trained with that
    role."""
    average: AverageConfig | None = None
    """Makes its weights a moving average of another role's."""
    own_tokenizer: OwnTokenizerConfig | None = None
    """How a frozen scorer reads rollouts in the tokens of its own folder's tokenizer. None means the defaults where
    that has another vocabulary than the actor's, and else that it reads the actor's tokens."""
    function: str = ""
    """A built-in reward, `module:function` or `path/to/file.py:function`; instead of a model."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=FrozenDict)
    """Keyword arguments of the function."""
    timeout_seconds: float = 600.0
    """Time limit of the function for a batch. 0 means no limit."""
    workers: int = 0
    """The function is called for one completion at a time, with lists of one, in at most so many threads. 0 means one
    call for the whole batch."""
    sample_timeout_seconds: float = 0.0
    """Time limit of one such call, from its start. 0 means no limit."""
    timeout_score: float | None = None
    """The score of a completion whose call takes longer. None means that this is an error."""
    weighted_sum: Mapping[str, float] | None = None
    """Role -> weight: its scores are the weighted sum of the scores of these roles; instead of a model."""

    def __post_init__(self) -> None:
        count, seconds, score = self.workers, self.sample_timeout_seconds, self.timeout_score
        for key in ("timeout_seconds", "sample_timeout_seconds"):
            checks.require(0 <= getattr(self, key) <= 1e9, key, "must lie between 0 and 1e9", getattr(self, key))
        checks.require(0 <= count <= 1024, "workers", "must lie between 0 and 1024", count)
        rule = "needs a function, which workers call for one completion at a time"
        checks.require(bool(self.function) or not count, "workers", rule, count, "Remove it.")
        rule = "needs workers, which call the function for one completion at a time"
        checks.require(count > 0 or not seconds, "sample_timeout_seconds", rule, seconds, "Set workers to 16, say.")
        if score is not None:
            checks.require(abs(score) < 3.4e38, "timeout_score", "must be finite in float32", score)
            rule = "needs sample_timeout_seconds, after which a completion gets this score"
            checks.require(seconds > 0, "timeout_score", rule, score, "Set that to 60, say.")
        if self.model is not None:
            object.__setattr__(self, "model", stated_model(self.model))
        if self.model is not None and self.init == RANDOM:
            with checks.errors_as(ValueError, "model."):
                ModelConfig(**self.stated)
        if self.weighted_sum is not None and not self.weighted_sum:
            raise ValueError("weighted_sum: must have at least one part, as in {correct: 1.0}. Got {}.")
        for part, weight in (self.weighted_sum or {}).items():
            checks.require(math.isfinite(weight), f"weighted_sum.{cut(part)}", "must be finite", weight)

    @property
    def stated(self) -> dict[str, Any]:
        """The settings of the model that the config states; the others come from its origin."""
        return dict(self.model) if isinstance(self.model, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training of the actor on the rows' completions, before the run proper.

    >>> WarmStartConfig(steps=100, batch_size=256, optimizer=OptimizerConfig(2e-3), updates_per_step=50).overlong
    'error'
    """

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    updates_per_step: int = 1
    """Updates in one call of `train`, each on its own `batch_size` rows: fewer, longer programs."""
    overlong: Literal["error", "drop"] = "error"
    """The treatment of rows without a completion, or with one over `max_new_tokens`. Dropped rows are counted."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.updates_per_step < 1 or self.steps % self.updates_per_step:
            raise ValueError(
                "steps, batch_size, updates_per_step: must be at least 1, and steps a multiple of updates_per_step. "
                f"Got {self.steps}, {self.batch_size} and {self.updates_per_step}."
            )


@dataclasses.dataclass(frozen=True)
class EvaluationRunConfig:
    """The evaluation on held-out rows: scores of responses to their prompts, and the algorithm's own metrics.

    >>> EvaluationRunConfig(every=20, sampling=Sampling(num_samples=4), pass_at=(1, 4)).by_samples
    ('best@1', 'pass@1', 'best@4', 'pass@4')
    """

    every: int = 0
    """Steps between evaluations. 0 means only before the first step and after the last."""
    num_prompts: int = 128
    batch_size: int = 0
    """Rows at a time. 0 means all at once."""
    sampling: Sampling | None = None
    """None means the algorithm's sampling, but greedy."""
    scorers: tuple[str, ...] = ("reward",)
    """Roles whose mean scores are reported, as eval/<role>. Without any, nothing is sampled, and only the algorithm's
    own metrics on held-out rows are reported."""
    best_by: str = ""
    """The metric by which the best checkpoint is chosen: a scorer, or a metric of the algorithm. Losses are better if
    lower. Empty means the first scorer, or without scorers the algorithm's loss."""
    pass_at: tuple[int, ...] = ()
    """Numbers k of responses to a prompt: the expected best score of k of them, and the probability that one of them
    passes, as eval/<role>/best@<k> and eval/<role>/pass@<k>. Estimated from all `sampling.num_samples`."""
    pass_score: float = 1.0
    """The lowest score of a response that passes."""
    majority: Literal["none", "any", "boxed", "marker", "last"] = "none"
    """The place of the answers that responses vote for, as of `final_number`: the mean score of the answer that most
    responses to a prompt give, as eval/<role>/majority."""
    by: str = ""
    """A column of the rows: the mean score of the rows with each of its values, as eval/<role>/<column>/<value>."""

    def __post_init__(self) -> None:
        checks.require_fields(self, checks.require_at_least_zero, "every", "batch_size")
        checks.require_at_least_one(self.num_prompts, "num_prompts")
        samples = 1 if self.sampling is None else self.sampling.num_samples
        rule, remedy = f"must lie in [1, sampling.num_samples={samples}], each once", "Raise sampling.num_samples."
        fits = all(1 <= k <= samples for k in self.pass_at) and len(set(self.pass_at)) == len(self.pass_at)
        checks.require(fits, "pass_at", rule, list(self.pass_at), remedy)
        checks.require(math.isfinite(self.pass_score), "pass_score", "must be finite", self.pass_score)
        rule, remedy = "needs several responses to a prompt", "Set sampling.num_samples to 8, say."
        checks.require(self.majority == "none" or samples > 1, "majority", rule, samples, remedy)
        several = samples > 1 and (bool(self.pass_at) or self.majority != "none")
        if self.sampling is not None and several:
            rule, remedy = "must be above 0 where responses to a prompt are to differ", "Set it to 1, say."
            checks.require(
                self.sampling.temperature > 0, "sampling.temperature", rule, self.sampling.temperature, remedy
            )
        for key in ("pass_at", "by"):
            rule = "needs scorers, whose scores it is about"
            checks.require(bool(self.scorers) or not getattr(self, key), key, rule, getattr(self, key), "Remove it.")

    @property
    def by_samples(self) -> tuple[str, ...]:
        """Names of the measures over several responses to a prompt, for each scorer: best@4, pass@4, majority."""
        voted = () if self.majority == "none" else ("majority",)
        return (*(f"{what}@{k}" for k in self.pass_at for what in ("best", "pass")), *voted)


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """A run on Weights & Biases.

    >>> OutputConfig(wandb=WandbConfig(project="mine", mode="offline")).wandb.mode
    'offline'
    """

    project: str = "jaxrlhf"
    entity: str = ""
    """User or team. Empty means that of the login."""
    mode: Literal["online", "offline"] = "online"
    """`offline` needs no network: `wandb sync` sends the run later."""
    group: str = ""
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class MlflowConfig:
    """A run on MLflow.

    >>> MlflowConfig(experiment="sums").tracking_uri
    ''
    """

    experiment: str = "jaxrlhf"
    tracking_uri: str = ""
    """A server, or a folder, which needs none. Empty means MLFLOW_TRACKING_URI, else the folder `mlruns`."""


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """The files of a run and its trackers.

    >>> OutputConfig(folder="out", checkpoint_every=20, export=("actor",)).keep_checkpoints
    2
    """

    folder: str = "runs"
    """The parent of the folders of runs."""
    samples_every: int = 10
    """Steps between sampled completions written to samples.jsonl. 0 means never."""
    num_samples: int = 8
    timeline: bool = True
    part_tokens: int = 1024
    """Decoding steps after which a longer generation shows its progress, and begins another event of the timeline. 0
    means never: it is one program."""
    tensorboard: bool = True
    """Metrics and samples for TensorBoard, in the folder's tensorboard/."""
    wandb: WandbConfig | None = None
    """Metrics, samples and the config on Weights & Biases; needs `pip install 'jaxrlhf[wandb]'`."""
    mlflow: MlflowConfig | None = None
    """Metrics, samples and the config on MLflow; needs `pip install 'jaxrlhf[mlflow]'`."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0 means only by the clock and after the last step."""
    checkpoint_minutes: float = 15.0
    """Minutes after which a checkpoint is saved at any step. 0 means never by the clock."""
    keep_checkpoints: int = 2
    """The number of newest checkpoints to keep."""
    keep_best: bool = True
    """Save a checkpoint after each evaluation that is better than all before, and keep it beside the newest ones."""
    export: tuple[str, ...] = ()
    """Roles whose last weights are written in Hugging Face's format, to the folder of that name in the run's."""
    export_every: int = 0
    """Steps between exports of those roles that change, to exports/<steps>/<role>. 0 means only at the end."""
    merge_adapters: bool = False
    """Export the whole model with the adapters added in, in the compute precision, in place of the adapters alone."""

    def __post_init__(self) -> None:
        counts = ("samples_every", "num_samples", "part_tokens", "checkpoint_every", "checkpoint_minutes")
        checks.require_fields(self, checks.require_at_least_zero, *counts, "export_every")
        rule = "needs roles to be exported"
        checks.require(
            bool(self.export) or not self.export_every, "export_every", rule, self.export_every,
            "Set export to [actor], say.",
        )  # fmt: skip
        checks.require_at_least_one(self.keep_checkpoints, "keep_checkpoints")
        checks.require(
            math.isfinite(self.checkpoint_minutes), "checkpoint_minutes", "must be finite", self.checkpoint_minutes
        )


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """Limits to the memory that a plan may use: sizes such as `20 GB` or `24 GiB`; empty for no limit.

    >>> MemoryLimits(device="20 GB").device_bytes
    20000000000
    """

    device: str = ""
    """Limit of each device that has memory of its own."""
    host: str = ""
    """Limit of the host: for a whole run on virtual CPU devices, which share it; on GPUs, for offloaded roles."""
    may_exceed: bool = False
    """Start a run, with a note, although its forecast is more than there is."""

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            text = getattr(self, name)
            if text and not (_bytes_of(text) or 0) >= 1:
                raise ValueError(
                    f"{name}: must be a size: a positive number and one of {', '.join(_UNITS)}. Got {brief(text)}. "
                    "Write 20 GB, say."
                )

    @property
    def device_bytes(self) -> int | None:
        return _bytes_of(self.device)

    @property
    def host_bytes(self) -> int | None:
        return _bytes_of(self.host)


_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes_of(text: str) -> int | None:
    """The bytes of a size; None if the text is not a size."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


@dataclasses.dataclass(frozen=True)
class StalenessConfig:
    """Generation with weights of earlier steps, so that it can run while others are trained.

    >>> StalenessConfig(steps=1).max_weight
    2.0
    """

    steps: int = 0
    """The steps by which the weights that generate are older than the current ones. 0 means none: a step waits for the
    training of the one before."""
    max_weight: float | None = 2.0
    """The bound at which importance weights of tokens, by which their advantages are multiplied, are truncated. None
    means no weights, and a ratio to the policy that drew the tokens."""

    def __post_init__(self) -> None:
        checks.require(0 <= self.steps <= 16, "steps", "must lie between 0 and 16", self.steps)
        if self.max_weight is not None:
            checks.require_positive(self.max_weight, "max_weight")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run, from data to checkpoints. All sizes are global.

    >>> load_run("ppo_arithmetic", ["steps=20"]).steps
    20
    """

    name: str
    steps: int
    batch_size: int
    """Prompts in a step."""
    roles: Mapping[str, RoleConfig]
    data: DataConfig
    datasets: Mapping[str, DataConfig] = dataclasses.field(default_factory=FrozenDict)
    """Further tables, by the names in an algorithm's `Rows`. All have the same tokenizer."""
    algorithm: str = "ppo"
    settings: Any = None
    """Settings of the algorithm, of its own type."""
    seed: int = 0
    staleness: StalenessConfig = StalenessConfig()
    """A number sets `steps`."""
    devices: str = "auto"
    """`auto` means all devices of JAX; `cpu:8` makes the CPU appear as 8 devices."""
    devices_memory: MemoryLimits = MemoryLimits()
    """`20 GB` sets both limits."""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    plan: PlanConfig = PlanConfig()
    warm_start: WarmStartConfig | None = None
    evaluation: EvaluationRunConfig | None = None
    resume: str = "never"
    """`never`; `auto`, the newest run of this config, if there is one; the folder of a run, to resume it from its
    newest checkpoint; or a checkpoint of a run, from which a new run starts."""
    output: OutputConfig = dataclasses.field(default_factory=OutputConfig)
    compilation_cache: str = "~/.cache/jaxrlhf/xla"
    """Folder of compiled programs for later runs. Empty means none."""
    notes: tuple[str, ...] = dataclasses.field(default=(), init=False, compare=False)
    """Notes for the user on the reading of the config. Not a key of it."""

    def __post_init__(self) -> None:
        for field in ("roles", "datasets"):
            for name in getattr(self, field):
                check_name(name, field)
        checks.require_at_least_zero(self.steps, "steps")
        checks.require_at_least_one(self.batch_size, "batch_size")
        checks.require(0 <= self.seed < 2**32, "seed", "must lie between 0 and 2^32 - 1", self.seed)
        if self.num_virtual_devices is None and self.devices != "auto":
            raise ValueError(
                f"devices: must be auto or cpu:<number>, such as cpu:8, with at most {MAX_VIRTUAL_DEVICES}. Got "
                f"{brief(self.devices)}."
            )

    @property
    def num_virtual_devices(self) -> int | None:
        """The number of virtual CPU devices; None to use the real devices."""
        platform, _, count = self.devices.partition(":")
        number = int(count) if platform == "cpu" and re.fullmatch("[0-9]{1,4}", count) else 0
        return number if 0 < number <= MAX_VIRTUAL_DEVICES else None


def load_run(name_or_path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a config file, or a shipped config, describes. Raises ConfigError, which names file and key."""
    notes: list[str] = []
    adapt = functools.partial(for_another_algorithm, notes=notes)
    tree, where = read_config(name_or_path, adapt=adapt)
    override = functools.partial(apply_overrides, overrides=overrides, in_full=in_full)
    tree = override(adapt(tree, override({}), where))
    if overrides:
        where = f"{where} with --set"
    return build_run(tree, where=where, notes=notes)


def build_run(tree: Mapping[str, Any], *, where: str, notes: Sequence[str] = ()) -> RunConfig:
    """The run that the tree of a config describes, which came from `where`; `notes` on it are kept for the user."""
    tree = copy.deepcopy(dict(tree))
    settings = tree.pop("settings", None) or {}
    expand(tree, where)
    run = build(RunConfig, tree, where)
    with checks.errors_as(ConfigError, f"{where}: "):
        algorithm = load_algorithm(run.algorithm)
    with checks.errors_as(ConfigError, f"{where}: ", TypeError):  # of a user's own dataclass
        built = build(algorithm.config, settings, where, "settings")
    run = dataclasses.replace(run, settings=built)
    object.__setattr__(run, "notes", tuple(notes))
    return run
