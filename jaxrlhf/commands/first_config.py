"""The text of a first config and of its reward function, for an algorithm, a model and data."""

import dataclasses
import json
from pathlib import Path

from jaxrlhf.data.config import DataConfig

SAMPLING = {
    "ppo": "the actor beside a critic that learns values",
    "grpo": "groups of responses judge one another, no critic",
    "dr_grpo": "GRPO without its two biases",
    "dapo": "GRPO with dynamic sampling and a higher clip",
    "gspo": "GRPO with a ratio for each sequence",
    "rloo": "the other responses to a prompt as the baseline",
    "remax": "the greedy response as the baseline",
    "reinforce_plus_plus": "returns normalized over the batch",
}
"""Algorithms that sample responses and have them scored -> what they are."""
OFFLINE = {
    "sft": "supervised fine-tuning on completions",
    "dpo": "direct preference optimization on pairs",
    "reward_model": "a reward model from pairs",
}
"""Algorithms that learn from what the rows hold -> what they are."""
ALGORITHMS = SAMPLING | OFFLINE
"""Those that need neither further data nor further roles."""
GROUPS = {"grpo": 8, "dr_grpo": 8, "dapo": 8, "gspo": 8, "rloo": 4}
"""Algorithm -> responses to a prompt."""
WITH_REFERENCE = ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "dpo")
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclasses.dataclass(frozen=True)
class First:
    """Choices that a first config is written for."""

    name: str
    algorithm: str
    model: str
    """A preset, or a folder in Hugging Face's format."""
    is_preset: bool
    devices: str
    reward: str
    """The file of the reward function, as a config names it."""
    data: DataConfig | None
    """Files of rows, with the columns that were recognized; None for the built-in task."""
    columns: str
    """These columns in words."""
    rows: int
    has_answer: bool
    has_completion: bool
    has_long_prompts: bool
    """Some have more than 512 bytes."""
    has_template: bool
    """The folder of the model brings a chat template."""

    @property
    def held_out(self) -> int:
        return min(64, self.rows // 4) or int(self.rows > 1)

    @property
    def evaluated(self) -> int:
        """Held-out prompts of an evaluation. Of many, half are enough, since too long ones are dropped."""
        return 128 if self.data is None else 32 if self.held_out == 64 else _power_of_two(self.held_out)

    @property
    def samples(self) -> int:
        return GROUPS.get(self.algorithm, 1)

    @property
    def batch_size(self) -> int:
        """A power of two that the rows are enough for."""
        most = max(1, min(32 if self.samples > 1 else 128, self.rows - self.held_out))
        return _power_of_two(most)

    @property
    def num_devices(self) -> int | None:
        """The number of virtual devices, None for those that are there."""
        number = self.devices.removeprefix("cpu:")
        return int(number) if number.isdecimal() else None

    @property
    def data_degree(self) -> int | None:
        """The devices that rows are split over, where they do not divide over all of them."""
        most = min(self.num_devices or 1, self.batch_size, self.evaluated)
        return None if self.num_devices in (None, _power_of_two(most)) else _power_of_two(most)

    @property
    def mini_batches(self) -> int:
        enough = self.batch_size * self.samples >= 2 * max(8, self.num_devices or 1)
        return 2 if enough and self.algorithm != "remax" else 1

    @property
    def max_new_tokens(self) -> int:
        if self.data is None:
            return 10 if self.is_preset else 32
        return 64 if self.is_preset else 256

    @property
    def is_scored(self) -> bool:
        """Responses are sampled and scored by the reward function, if only in evaluations."""
        has_prompts = self.data is None or not self.data.text_column
        return self.algorithm in SAMPLING or (self.algorithm in ("sft", "dpo") and has_prompts)


def _power_of_two(most: int) -> int:
    """The largest power of two up to a number."""
    return 1 << max(0, most.bit_length() - 1)


def config_text(first: First, path: str) -> str:
    """The config, which will be at `path`."""
    command = f"jaxrlhf train --config {path}"
    head = [
        f"# {first.algorithm}: {ALGORITHMS[first.algorithm]}.",
        "# Written by `jaxrlhf init`; docs/configuration.md of jaxrlhf describes every key.",
        "#",
        f"#   {command} --dry-run      # checks everything, prints plan and memory",
        f"#   {command} --preview 3    # rows as the model will see them",
        f"#   {command}",
        "#",
        "# Relative paths start at the folder in which a command is started.",
        f"name: {json.dumps(first.name)}",
        f"algorithm: {first.algorithm}",
        "seed: 0",
        _noted(f"devices: {first.devices}", "auto: all that JAX sees; cpu:8: the CPU as 8 devices"),
        "",
        "steps: 200",
        _noted(f"batch_size: {first.batch_size}", _rows_in_words(first)),
    ]
    if not first.is_preset:
        head += ["", _noted(f"model: {json.dumps(first.model)}", "every role without `init` starts from this folder")]
    parts = [head, _data(first), _roles(first), _warm_start(first), _settings(first), _end(first)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _noted(text: str, note: str) -> str:
    return f"{text:<32}  # {note}"


def _rows_in_words(first: First) -> str:
    if first.algorithm in OFFLINE:
        return "rows in a step"
    return "prompts in a step" + (f", with {first.samples} responses each" if first.samples > 1 else "")


def _data(first: First) -> list[str]:
    if first.data is None:
        return ["data:", _noted("  task: arithmetic", "built in; with a file of your own, `path: prompts.jsonl`")]
    data = first.data
    lines = ["data:", f"  path: {json.dumps(data.path)}", f"  # {first.columns}"]
    for what in ("prompt", "completion", "answer", "chosen", "rejected", "text"):
        column = getattr(data, f"{what}_column")
        if column and f"'{column}'" in first.columns:
            lines.append(f"  {what}_column: {json.dumps(column)}")
    is_chat = data.chat != "none"
    if is_chat or (first.has_template and not data.text_column):
        chat = data.chat if is_chat else "user"
        meaning = "lists of {role, content}" if chat == "messages" else "a prompt becomes a user's message"
        lines.append(_noted(f"  chat: {chat}", meaning))
        if not first.has_template:
            lines.append(f'  chat_template: "{_TEMPLATE}"')
    lines.append(_noted(f"  eval_rows: {first.held_out}", "held out of the file"))
    if first.has_long_prompts:
        lines.append("  max_prompt_tokens: 512")
    return [*lines, _noted("  overlong: drop", "or error; dropped rows are counted")]


def _roles(first: First) -> list[str]:
    sizes = f"{{preset: {first.model}, head: scalar}}" if first.algorithm == "reward_model" else first.model
    model = [_noted(f"    model: {sizes}", "random weights; or `model: FOLDER` at the top")] if first.is_preset else []
    if first.algorithm == "reward_model":
        head = [] if first.is_preset else ["    head: scalar"]
        return ["roles:", "  reward:", *model, *head, _optimizer("5.0e-4" if first.is_preset else "1.0e-5")]
    has_lora = not first.is_preset and first.algorithm != "ppo"
    lora = [_noted("    lora: {rank: 16}", "adapters; without, all weights: try a rate of 1.0e-6")] if has_lora else []
    rate = "5.0e-4" if first.is_preset else "1.0e-4" if has_lora else "1.0e-6"
    lines = ["roles:", "  actor:", *model, *lora, _optimizer(rate)]
    if first.algorithm == "ppo":
        init = ["    init: actor"] if first.is_preset else []
        lines += ["  critic:", *init, "    head: scalar", _optimizer("5.0e-4" if first.is_preset else "1.0e-5")]
    if first.algorithm in WITH_REFERENCE:
        lines += ["  reference:", _noted("    init: actor", "the actor's first weights, which it stays near")]
    if first.is_scored:
        lines += ["  reward:", f"    function: {json.dumps(first.reward + ':score')}"]
    return lines


def _optimizer(rate: str) -> str:
    return f"    optimizer: {{learning_rate: {rate}, warmup_updates: 10}}"


def _warm_start(first: First) -> list[str]:
    """Random weights sample noise, which no reward can improve."""
    if not first.is_preset or first.algorithm not in (*SAMPLING, "dpo") or not first.has_completion:
        return []
    built_in = first.data is None
    return [
        _noted("warm_start:", "supervised, on the rows' completions, since the weights are random"),
        "  steps: 100",
        f"  batch_size: {256 if built_in else min(128, first.batch_size)}",
        "  updates_per_step: 50" if built_in else "  overlong: drop",
        "  optimizer: {learning_rate: 2.0e-3, warmup_updates: 20}",
    ]


def _settings(first: First) -> list[str]:
    updates = f"{{mini_batches: {first.mini_batches}}}"
    if first.algorithm in OFFLINE:
        length = _noted(f"  max_new_tokens: {first.max_new_tokens}", "of a completion; longer ones are dropped")
        return ["settings:", length, f"  update: {updates}"]
    several = f", num_samples: {first.samples}" if first.samples > 1 else ""
    lines = ["settings:", f"  sampling: {{max_new_tokens: {first.max_new_tokens}{several}}}"]
    lines.append(_noted(f"  actor_update: {updates}", "updates from one rollout"))
    lines += [f"  critic_update: {updates}"] if first.algorithm == "ppo" else []
    lines += ["  oversampling: 1"] if first.algorithm == "dapo" and first.batch_size < 2 else []
    return lines


def _end(first: First) -> list[str]:
    plan = [] if first.is_preset else [_noted("plan: auto", "the fastest plan for these devices"), ""]
    if first.data_degree is not None:
        note = f"so many of {first.devices}, since the rows do not divide over all"
        plan = [_noted(f"plan: {{default: {{data: {first.data_degree}}}}}", note), ""]
    scorers = [] if first.is_scored else ["  scorers: []"]
    evaluation = ["evaluation:", "  every: 20", f"  num_prompts: {first.evaluated}", *scorers]
    if not first.held_out:
        evaluation = ["# no evaluation: a file of one row has none to hold out"]
    role = "reward" if first.algorithm == "reward_model" else "actor"
    export = _noted(f"  export: [{role}]", "in Hugging Face's format, in the run's folder")
    return [*plan, *evaluation, "", "output:", export]


WITH_ANSWER = '''
NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def score(completions, answer, finished):
    return [float(done and is_right(text, str(right))) for text, right, done in zip(completions, answer, finished)]


def is_right(text, right):
    """The last number of both is the same; where the answer has none, the text contains it."""
    said, wanted = (NUMBER.findall(each) for each in (text, right))
    if not wanted:
        return right.strip().lower() in text.lower()
    return bool(said) and said[-1].replace(",", "") == wanted[-1].replace(",", "")
'''
WITHOUT_ANSWER = """

def score(completions, finished):
    # An example to replace: responses that end, and are not long.
    return [float(done) - 0.001 * len(text) for text, done in zip(completions, finished)]
"""


def reward_text(first: First, path: str) -> str:
    """The module with the reward function `score`."""
    head = [
        f'"""The reward of {Path(path).name}: one number for each completion, the higher the better.',
        "",
        "`score` is called with the arguments that it names: `prompts` and `completions`; `finished`, True where a",
        "completion ended by itself; `num_tokens`; and columns of the data, as lists. It may be slow or `async`.",
        '"""',
    ]
    body = "\nimport re\n" + WITH_ANSWER if first.has_answer else WITHOUT_ANSWER
    return "\n".join(head) + "\n" + body
