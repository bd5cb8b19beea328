"""What a user can get wrong, case by case: each is said before anything runs, naming the key or the file and row."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxrlhf.config.schema import load_run
from jaxrlhf.experience import STOP, Rollout
from jaxrlhf.programs.roles import FunctionRole
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.assembly import assemble
from jaxrlhf.train import main
from tests.small_run import ROWS, write_run

CHATS = "data={path: chats.jsonl, prompt_column: messages, chat: messages, eval_rows: 0}"
CHAT = CHATS.replace("}", ", chat_template: '{{ messages }}'}")
MANY_WORDS = {f"word{i}": i for i in range(500)} | {"</s>": 500}
REFUSES = {"t.jinja": "{% if messages[0].content == 'b' %}{{ raise_exception('No b') }}{% endif %}x"}


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def chat(*messages: Any) -> dict[str, str]:
    return {"chats.jsonl": lines({"messages": [{"role": "user", "content": "a"}]}, {"messages": list(messages)})}


CASES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    # keys and types
    "unknown key": (["stepz=3"], {}, r"run\.yaml.*: unknown key 'stepz'\..*Did you mean 'steps'\?"),
    "misspelt key, deep": (["settings.kl.coeff=1"], {}, r"settings\.kl: unknown key 'coeff'.*Did you mean 'coef'\?"),
    "missing key": (["roles={}"], {}, r"roles: ppo needs a role 'actor'\. Got none"),
    "text for a number": (["steps=many"], {}, r"steps: expected an integer\. Got 'many'"),
    "infinity": (["roles.actor.optimizer.learning_rate=1e400"], {}, r"learning_rate: must be finite .* Got inf"),
    "an integer of 100 digits": (["steps=" + "9" * 100], {}, r"steps: expected an integer of 64 bits\. Got 9999"),
    "unquoted yes": (["output.timeline=yes"], {}, r"yes is ambiguous in YAML\. Write true or false"),
    # what a key may be
    "an unknown algorithm": (["algorithm=pppo"], {}, r"algorithm: must be one of ppo, .*, dpo, module:step .* 'ppo'\?"),
    "a probability of zero": (["settings.sampling.top_p=0"], {}, r"settings\.sampling\.top_p: must lie in \(0, 1\]\."),
    "an unknown preset": (["roles.actor.model={preset: tinny}"], {}, r"model\.preset: must be one of .* 'tiny'\?"),
    "heads and their groups": (["roles.actor.model.num_kv_heads=3"], {}, r"num_kv_heads: must divide num_heads=4"),
    "a negative width": (["roles.actor.model.head_dim=-2"], {}, r"roles\.actor\.model\.head_dim: must be positive"),
    "a negative base": (["roles.actor.model.rope_theta=-1"], {}, r"model\.rope_theta: must be finite and positive"),
    "a factor of zero": (["roles.actor.model.rope_scaling.factor=0"], {}, r"rope_scaling\.factor: must be finite and"),
    "attention without a GPU": (["roles.actor.model.attention=cudnn"], {}, r"attention: cudnn needs an NVIDIA GPU"),
    "a setting out of range": (["settings.gae_lambda=2"], {}, r"settings\.gae_lambda: must lie in \[0, 1\]\. Got 2"),
    "held-out rows of zero": (["evaluation.num_prompts=0"], {}, r"evaluation\.num_prompts: must be at least 1"),
    "a negative count": (["output.checkpoint_every=-3"], {}, r"output\.checkpoint_every: must be at least 0\. Got -3"),
    "a name with a slash": (["name=a/b"], {}, r"Name of the run: must be a plain file name"),
    "a file for a folder": (["output.folder=rows.jsonl"], {}, r"output\.folder: must be a folder that can be written"),
    "updates of a report": (["warm_start.updates_per_step=3"], {}, r"steps a multiple of updates_per_step"),
    "an unknown scorer": (["evaluation.scorers=[exac]"], {}, r"evaluation\.scorers: must be roles of the run\. Got"),
    # roles
    "an unknown role": (["roles.critic.init=actr"], {}, r"roles\.critic\.init: .* Got 'actr'.*Did you mean 'actor'"),
    "roles in a circle": (["roles.actor.init=critic"], {}, r"must not start from each other in a circle"),
    "no optimizer": (["roles.actor.optimizer=null"], {}, r"role 'actor' has no method 'train'.*It has no optimizer"),
    "two heads": (
        ["roles.reference={model: {preset: tiny, head: scalar}, head: lm}"],
        {},
        r"roles\.reference\.head: must be that of",
    ),
    # names that become folders, keys and tags
    "a role that leads elsewhere": (
        ["roles={'../../X': {init: actor}}", "output.export=['../../X']"],
        {},
        r"roles: a name must be of letters, digits, _ and -, at most 200 bytes\. Got '\.\./\.\./X'\. Write X, say",
    ),
    "a role with a dot": (["roles={actor.base: {init: actor}}"], {}, r"roles: a name .* Got 'actor\.base'"),
    "a role of the run's files": (["roles={config.yaml: {init: actor}}"], {}, r"roles: a name .* Got 'config\.yaml'"),
    "a role without a name": (["roles={'': {init: actor}}"], {}, r"roles: a name must .* Got ''\. Write actor, say"),
    "datasets elsewhere": (["datasets={../x: {task: arithmetic}}"], {}, r"datasets: a name must .* Got '\.\./x'"),
    "a role of the run's folders": (
        ["roles.Checkpoints={init: actor}", "output.export=[Checkpoints]"],
        {},
        r"output\.export: an exported role has a folder .* its own checkpoints, .* Got Checkpoints\. Rename the role",
    ),
    # sizes that no machine holds
    "a huge batch": (["batch_size=1000000000"], {}, r"batch_size: rows x \(prompt \+ response\) must be at most"),
    "huge responses": (["settings.sampling.max_new_tokens=2000000000"], {}, r"batch_size: rows x .* 2000000000\)\."),
    "a huge vocabulary": (["roles.actor.model.vocab_size=10000000000"], {}, r"model\.vocab_size: must be at most"),
    "a huge number of layers": (["roles.actor.model.num_layers=100000"], {}, r"model\.num_layers: must be at most"),
    "a huge model": (
        ["roles.actor.model={vocab_size: 2000000000, hidden_size: 2000000000, num_heads: 4}"],
        {},
        r"roles\.actor\.model: must have at most 100,000,000,000,000 parameters\. Got 40,000,",
    ),
    "a huge number of devices": (["devices=cpu:99999999"], {}, r"devices: must be auto or cpu:<number>.* at most 1024"),
    # degrees and devices
    "tensor and heads": (["plan.calls.actor.generate={tensor: 3}"], {}, r"generate\.tensor: 3 does not divide num_"),
    "mini-batches and batch": (
        ["settings.actor_update.mini_batches=3"],
        {},
        r"plan\.calls\.actor\.train, in the step: mini_batches must divide the rows of the batch\. Got 3 for 8 rows\. "
        r"Use 1, 2, 4 or 8 for settings\.actor_update\.mini_batches, or another batch_size\.",
    ),
    "mini-batches and demonstrations": (
        ["algorithm=ppo_ptx", "settings.pretraining={batch_size: 6}", "settings.actor_update.mini_batches=4"],
        {},
        r"Got 4 for 6 rows\. Use 1, 2, 3 or 6 for settings\.actor_update\.mini_batches, or another "
        r"settings\.pretraining\.batch_size\.",
    ),
    "devices and held-out rows": (
        ["evaluation.num_prompts=3"],
        {},
        r"plan\.calls\.actor\.generate, in the evaluation: .* must be at most 3 rows\. .* another "
        r"evaluation\.num_prompts\.",
    ),
    "devices and a batch of held-out rows": (
        ["evaluation.batch_size=2"],
        {},
        r"plan\.calls\.actor\.generate, in the evaluation: .* must be at most 2 rows\. .* another "
        r"evaluation\.batch_size\.",
    ),
    "devices and the warm start": (
        ["warm_start.batch_size=5"],
        {},
        r"plan\.calls\.actor\.train, in the warm start: .* a mini-batch of 5 rows .* another warm_start\.batch_size\.",
    ),
    "far more devices": (["plan.default.data=4000000000"], {}, r"devices: must be among the 8 devices"),
    "no positions of devices": (["plan.calls.critic.train.devices=²"], {}, r"calls\.critic\.train\.devices: must be"),
    "more virtual devices than before": (["devices=cpu:64"], {}, r"devices: must be those that JAX runs on already, 8"),
    "fewer virtual devices than before": (["devices=cpu:2"], {}, r"Got 2 virtual CPU devices.* or use devices: cpu:8"),
    "a size without a unit": (["devices_memory='20'"], {}, r"devices_memory\.device: must be a size: .* Got '20'"),
    "a number for a size": (["devices_memory=20"], {}, r"devices_memory: must be a size.* Got 20\. Write its unit"),
    "no memory at all": (["devices_memory={host: 0 GB}"], {}, r"devices_memory\.host: must be a size: a positive"),
    # data files
    "no data file": (["data.path=none.jsonl"], {}, r"data\.path: must be an existing file, .* Got 'none\.jsonl'"),
    "a line that is no UTF-8": ([], {"rows.jsonl": b'{"prompt": "\xff"}'}, r"rows\.jsonl:1: .*invalid start byte"),
    "a row without the column": ([], {"rows.jsonl": lines(*ROWS, {"promt": "a"})}, r"rows\.jsonl:13: must have the"),
    "a column that is measured": (
        ["roles.exact={function: 'mine.py:f'}"],
        {
            "rows.jsonl": lines(*ROWS, {"prompt": "a", "completion": "b", "num_tokens": 1}),
            "mine.py": "def f(completions, num_tokens): return num_tokens",
        },
        r"roles\.exact: Reward 'exact': an argument must have one meaning\. Got 'num_tokens', by which .*Rename",
    ),
    "a reward that yields": (
        ["roles.exact={function: 'yields.py:f'}"],
        {"yields.py": "async def f(completions):\n    yield 1.0"},
        r"roles\.exact: Reward 'exact': must return a list of scores\. Got a function that yields them\.",
    ),
    "a pattern of no file": (["data.path='rows-*.jsonl'"], {}, r"pattern must match at least one file\. Got 'rows-\*"),
    "too few held-out rows": (["evaluation.num_prompts=8"], {}, r"Evaluation: must ask for at most the 4 held-out"),
    # lengths and vocabularies
    "a prompt over the limit": (["data.max_prompt_tokens=3"], {}, r"rows\.jsonl:\d+: a prompt must fit into"),
    "longer than the model": (
        ["roles.actor.model.max_position_embeddings=9"],
        {},
        r"max_position_embeddings: must hold prompt and response, 6 \+ 6",
    ),
    "an evaluation longer than the model": (
        ["evaluation.sampling={max_new_tokens: 90}", "roles.actor.model.max_position_embeddings=64"],
        {},
        r"prompt and response, 6 \+ 90 tokens in actor\.gen",
    ),
    "a completion over the limit": (["settings.sampling.max_new_tokens=2"], {}, r"rows\.jsonl:\d+: a completion with"),
    "a tokenizer over the model's vocabulary": (
        ["tokenizer={kind: file, path: words.json}"],
        {"words.json": MANY_WORDS},
        r"roles\.actor\.model\.vocab_size: must hold the tokenizer's vocabulary, 501 \(words\.json\)\. Got 264",
    ),
    "no tokenizer": (["tokenizer={kind: file, path: x.json}"], {}, r"tokenizer\.path: must be an existing file\. Got"),
    "a stop token that there is not": (["settings.sampling.stop_ids=[-1]"], {}, r"stop_ids: must be tokens of the"),
    # chats
    "a template that refuses": (
        [CHAT, "data.chat_template=t.jinja"],
        chat({"role": "user", "content": "b"}) | REFUSES,
        r"chats\.jsonl:2: the chat template of t\.jinja must take every conversation\. Got No b for messages of user",
    ),
    # rewards
    "an unknown reward": (["roles.exact.function=exact_anser"], {}, r"roles\.exact: Reward: must be .* Did you mean"),
    "a column that no row has": (["roles.exact.options.answer_column=b"], {}, r"roles\.exact: .*needs a column 'b'"),
    "a module that does not import": (["roles.exact={function: 'no_such:f'}"], {}, r"roles\.exact: .*its module must"),
    "a module that leaves": (
        ["roles.exact={function: 'leaves.py:reward'}"],
        {"leaves.py": "import sys\nsys.exit(2)\n"},
        r"its module must import\. Got SystemExit: 2, at .*leaves\.py:2",
    ),
    "a function of nothing": (["roles.exact={function: 'gc:collect'}"], {}, r"must take prompts and completions"),
    "a head that cannot do it": (["roles.critic.head=lm"], {}, r"role 'critic' has no method 'values'.* set"),
}  # fmt: skip
"""What is wrong -> changes to the config, files (text, bytes or a vocabulary), and what the message says."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


def write(path: Path, content: Any) -> None:
    if isinstance(content, dict):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(content, unk_token="word0")).save(str(path))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said(case, folder, capsys):
    overrides, files, message = CASES[case]
    for name, content in files.items():
        write(folder / name, content)
    arguments = [x for override in overrides for x in ("--set", override)]
    assert main(["--config", "run.yaml", *arguments]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error
    assert "Traceback" not in error
    assert not (folder / "runs").exists()


LONG = "x" * 5000
KEYS_OF_TEXT = [
    "steps",
    "batch_size",
    "name",
    "algorithm",
    "devices",
    "resume",
    "data",
    "data.path",
    "data.task",
    "data.chat",
    "data.prompt_column",
    "data.overlong",
    "data.chat_date",
    "data.eval_path",
    "tokenizer.kind",
    "tokenizer.path",
    "roles",
    "roles.critic.init",
    "roles.critic.head",
    "roles.actor.model",
    "roles.actor.model.dtype",
    "roles.exact",
    "roles.exact.function",
    "roles.exact.options.answer_column",
    "roles.short.options.unit",
    "roles.reward.weighted_sum",
    "plan.calls.critic.train.devices",
    "plan.calls.critic.train.remat",
    "settings.sampling",
    "evaluation.best_by",
]
LONG_VALUES = [
    *(f"{key}={LONG}" for key in KEYS_OF_TEXT),
    LONG,
    f"{LONG}=1",
    f"roles.actor.{LONG}=1",
    f"roles.actor.model={{preset: [{LONG}]}}",
    f"roles.reward.weighted_sum={{{LONG}: 1}}",
    f"roles.exact.options={{{LONG}: 1}}",
    f"roles.exact.function={LONG}:f",
    f"roles.exact.function={LONG}.py:f",
    f"data.template={{{LONG}}}",
    f"evaluation.scorers=[{LONG}]",
    f"output.export=[{LONG}]",
    f"resume=runs/checkpoints/steps/{LONG}",
]


@pytest.mark.parametrize("override", LONG_VALUES, ids=lambda override: override.replace(LONG, "x"))
def test_a_long_value_is_not_echoed_whole(override, folder, capsys):
    assert main(["--config", "run.yaml", "--dry-run", "--set", override]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and len(error) < 1500
    assert "Traceback" not in error


def test_without_anything_wrong_it_passes(folder, capsys):
    assert main(["--config", "run.yaml", "--dry-run"]) == 0


# What only shows when a reward function is called


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"^Reward 'exact': must not raise\. Got ZeroDivisionError: division by zero, at"),
        ("return [1.0, float('nan')]", r"must return finite .* Got nan at index 1 for prompt '\d\+\d=', completion"),
        ("while True: pass", r"^Reward 'exact': must return within 0\.2 seconds for 2 completions\. .*timeout_seconds"),
    ],
    ids=["raises", "not a number", "hangs"],
)  # fmt: skip
def test_what_a_reward_function_gets_wrong(body, message, folder):
    stop_after = "import time; end = time.time() + 2\n    " if "while" in body else ""
    body = body.replace("while True: pass", "while time.time() < end: pass")
    (folder / "mine.py").write_text(f"def reward(prompts, completions):\n    {stop_after}{body}\n")
    overrides = ["roles.exact={function: 'mine.py:reward', timeout_seconds: 0.2}"]
    role = assemble(load_run("run.yaml", overrides), 8).train.roles["exact"]
    assert isinstance(role, FunctionRole)
    tokens = np.array([[0, *b">2"], [0, *b">4"]], np.int32)
    response = np.ones((2, 2), bool)
    logprobs = np.zeros((2, 2), np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens, "mask": tokens > 0, "response": response, "logprobs": logprobs,
        "sampled_logprobs": logprobs, "finish": np.full(2, STOP), "row": np.arange(2), "id": np.arange(2),
    }  # fmt: skip
    with pytest.raises(RewardError, match=message):
        role.score(Rollout(**arrays))
