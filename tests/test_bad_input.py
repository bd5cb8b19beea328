"""What a user can get wrong, case by case: each is said before anything runs, naming the key or the file and row."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

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
    "a fraction for an integer": (["steps=2.5"], {}, r"steps: expected an integer\. Got 2\.5"),
    "true for an integer": (["batch_size=true"], {}, r"batch_size: expected an integer\. Got True"),
    "an integer for true": (["output.timeline=1"], {}, r"output\.timeline: expected true or false\. Got 1"),
    "a list for a mapping": (["data=[1]"], {}, r"data: expected a mapping\. Got \[1\]"),
    "a number for text": (["name=3"], {}, r"name: expected text\. Got 3"),
    "null": (["steps=null"], {}, r"steps: expected an integer\. Got null"),
    "not a number": (["roles.actor.optimizer.learning_rate=.nan"], {}, r"learning_rate: expected a number\. Got nan"),
    "infinity": (["roles.actor.optimizer.learning_rate=1e400"], {}, r"learning_rate: must be finite .* Got inf"),
    "an integer of 100 digits": (["steps=" + "9" * 100], {}, r"steps: expected an integer of 64 bits\. Got 9999"),
    "unquoted yes": (["output.timeline=yes"], {}, r"yes is ambiguous in YAML\. Write true or false"),
    "no YAML": (["plan={"], {}, r"--set plan, line 1, column 2: expected"),
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
    "fsdp and width": (["plan.calls.actor.train={fsdp: 5, tensor: 1}"], {}, r"train\.fsdp: 5 does not divide"),
    "data and batch": (["plan.calls.actor.train={data: 3, fsdp: 1, tensor: 1}"], {}, r"divide a mini-batch of 4 rows"),
    "micro-batches and rows": (
        ["plan.calls.actor.generate={data: 3, micro_batches: 3}"],
        {},
        r"micro_batches x data x fsdp must be at most 8 rows\. Got 3 x 3 x 1 = 9\. Lower a degree, or use",
    ),
    "micro-batches and batch": (["plan.calls.actor.train.micro_batches=3"], {}, r"train, in the step: micro_batches"),
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
    "devices and degrees": (["plan.calls.actor.train.devices=0-2"], {}, r"number of devices, 3\. Got 1 x 1 x 2 x 2"),
    "more devices than there are": (["plan.calls.actor.train.data=16"], {}, r"actor\.train\.devices: must be among"),
    "far more devices": (["plan.default.data=4000000000"], {}, r"devices: must be among the 8 devices"),
    "a device twice": (["plan.calls.critic.train.devices='4,4'"], {}, r"critic\.train\.devices: each device must be"),
    "no positions of devices": (["plan.calls.critic.train.devices=²"], {}, r"calls\.critic\.train\.devices: must be"),
    "more virtual devices than before": (["devices=cpu:64"], {}, r"devices: must be those that JAX runs on already, 8"),
    "fewer virtual devices than before": (["devices=cpu:2"], {}, r"Got 2 virtual CPU devices.* or use devices: cpu:8"),
    "a size without a unit": (["devices_memory='20'"], {}, r"devices_memory\.device: must be a size: .* Got '20'"),
    "a number for a size": (["devices_memory=20"], {}, r"devices_memory: must be a size.* Got 20\. Write its unit"),
    "no memory at all": (["devices_memory={host: 0 GB}"], {}, r"devices_memory\.host: must be a size: a positive"),
    # data files
    "no data file": (["data.path=none.jsonl"], {}, r"data\.path: must be an existing file, .* Got 'none\.jsonl'"),
    "a data file of an unknown kind": (["data.path=run.yaml"], {}, r"data\.path: must be a file of a known kind ."),
    "an empty data file": ([], {"rows.jsonl": "\n"}, r"data\.path: must hold at least one row\. Got the empty file"),
    "a line that is no JSON": ([], {"rows.jsonl": lines(*ROWS, "{oops")}, r"rows\.jsonl:13: must be JSON in UTF-8\."),
    "a line that is no object": ([], {"rows.jsonl": lines(ROWS[0], "3")}, r"rows\.jsonl:2: must be a JSON object\."),
    "a line that is no UTF-8": ([], {"rows.jsonl": b'{"prompt": "\xff"}'}, r"rows\.jsonl:1: must be JSON in UTF-8\."),
    "a row without the column": ([], {"rows.jsonl": lines(*ROWS, {"promt": "a"})}, r"rows\.jsonl:13: must have the"),
    "a prompt of a wrong type": ([], {"rows.jsonl": lines(*ROWS, {"prompt": 3})}, r"rows\.jsonl:13: prompt must be a"),
    "a prompt that is empty": ([], {"rows.jsonl": lines(*ROWS, {"prompt": ""})}, r"rows\.jsonl:13: prompt must not"),
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
    "a template without bounds": (
        [CHAT, "data.chat_template='{{ messages[0].content * 10 ** 10 }}'"],
        chat({"role": "user", "content": "b"}),
        r"the chat template of data\.chat_template must make do with 512 MiB of memory\. Got more\.",
    ),
    "too few rows": (["data.eval_rows=12"], {}, r"data\.eval_rows: must leave rows for training out of the 12 of rows"),
    "too few held-out rows": (["evaluation.num_prompts=8"], {}, r"Evaluation: must ask for at most the 4 held-out"),
    "a parquet file that is none": (["data.path=x.parquet"], {"x.parquet": "PAR1"}, r"x\.parquet: must be a parquet"),
    "an empty table": (
        ["data.path=x.parquet"],
        {"x.parquet": pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})},
        r"data\.path: must hold at least one row\. Got the empty file 'x\.parquet'",
    ),
    "a column of a wrong type": (
        ["data.path=x.parquet", "data.eval_rows=0"],
        {"x.parquet": pyarrow.table({"prompt": [1, 2]})},
        r"x\.parquet: row 1: prompt must be a string\. Got 1\.",
    ),
    "a table without the column": (
        ["data.path=x.parquet"],
        {"x.parquet": pyarrow.table({"question": ["a"] * 9})},
        r"x\.parquet: row \d: must have the column 'prompt'\. Got question\.",
    ),
    # lengths and vocabularies
    "a prompt over the limit": (["data.max_prompt_tokens=3"], {}, r"rows\.jsonl:\d+: a prompt must fit into"),
    "longer than the model": (["roles.actor.model.max_position_embeddings=9"], {}, r"max_position_embeddings: must"),
    "a completion over the limit": (["settings.sampling.max_new_tokens=2"], {}, r"rows\.jsonl:\d+: a completion with"),
    "a tokenizer over the model's vocabulary": (
        ["tokenizer={kind: file, path: words.json}"],
        {"words.json": MANY_WORDS},
        r"roles\.actor\.model\.vocab_size: must hold the tokenizer's vocabulary, 501 \(words\.json\)\. Got 264",
    ),
    "no tokenizer": (["tokenizer={kind: file, path: x.json}"], {}, r"tokenizer\.path: must be an existing file\. Got"),
    "a stop token that there is not": (["settings.sampling.stop_ids=[-1]"], {}, r"stop_ids: must be tokens of the"),
    # chats
    "no chat template": (
        [CHATS],
        chat({"role": "user", "content": "b"}),
        r"data\.chat_template: a chat needs a template\. Got '', and the tokenizer bytes has none",
    ),
    "a template that is no Jinja": (
        [CHAT, "data.chat_template='{% fo %}'"],
        chat({"role": "user", "content": "b"}),
        r"data\.chat_template, line 1: must be a Jinja template\. Got Encountered unknown tag 'fo'",
    ),
    "a template that refuses": (
        [CHAT, "data.chat_template=t.jinja"],
        chat({"role": "user", "content": "b"}) | REFUSES,
        r"chats\.jsonl:2: the chat template of t\.jinja must take every conversation\. Got No b for messages of user",
    ),
    "text for messages": ([CHAT], {"chats.jsonl": lines({"messages": "a"})}, r"chats\.jsonl:1: messages must be a"),
    "no messages": ([CHAT], chat(), r"chats\.jsonl:2: messages must hold at least one message\. Got \[\]"),
    "a message that is none": ([CHAT], chat("b"), r"chats\.jsonl:2: messages\[0\] must be a message, \{role,"),
    "a message without a role": ([CHAT], chat({"content": "b"}), r"chats\.jsonl:2: messages\[0\] must have a role of"),
    "a message without content": ([CHAT], chat({"role": "user"}), r"chats\.jsonl:2: messages\[0\] must have a"),
    "an answer without a question": (
        [CHAT],
        chat({"role": "assistant", "content": "b"}),
        r"chats\.jsonl:2: messages must hold a message before the assistant's",
    ),
    # rewards
    "an unknown reward": (["roles.exact.function=exact_anser"], {}, r"roles\.exact: Reward: must be .* Did you mean"),
    "an unknown option": (["roles.exact.options.partial=1"], {}, r"roles\.exact: Reward 'exact_answer': options must"),
    "an option of a wrong type": (["roles.short.options.target=a"], {}, r"roles\.short: Reward .* target must be of"),
    "a column that no row has": (["roles.exact.options.answer_column=b"], {}, r"roles\.exact: .*needs a column 'b'"),
    "a module that does not import": (["roles.exact={function: 'no_such:f'}"], {}, r"roles\.exact: .*its module must"),
    "an unknown part of a sum": (["roles.reward.weighted_sum.shorter=1"], {}, r"roles\.reward\.weighted_sum: must be"),
    "a sum of nothing": (["roles.reward.weighted_sum={}"], {}, r"roles\.reward\.weighted_sum: must have at least one"),
    "a head that cannot do it": (["roles.critic.head=lm"], {}, r"role 'critic' has no method 'values'.* set"),
}  # fmt: skip
"""What is wrong -> changes to the config, files (text, bytes, a table, or a vocabulary), and what the message says."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


def write(path: Path, content: Any) -> None:
    if isinstance(content, pyarrow.Table):
        parquet.write_table(content, path)
    elif isinstance(content, dict):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(content, unk_token="word0")).save(str(path))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said(case, folder, capsys):
    overrides, files, message = CASES[case]
    for name, content in files.items():
        write(folder / name, content)
    arguments = [x for override in overrides for x in ("--set", override)]
    assert main(["--config", "run.yaml", "--dry-run", *arguments]) == 1
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
        ("return [1.0]", r"^Reward 'exact': must return one number for each of 2 completions\. Got 1\.$"),
        ("return None", r"^Reward 'exact': must return a list of 2 numbers\. Got None\.$"),
        ("return [1.0, float('nan')]", r"^Reward 'exact': must return finite numbers\. Got nan at index 1 for prompt"),
        ("return ['1', '2']", r"must return finite numbers\. Got '1' at index 0 for prompt '\d\+\d=', completion"),
        ("while True: pass", r"^Reward 'exact': must return within 0\.2 seconds for 2 completions\. .*timeout_seconds"),
    ],
    ids=["raises", "wrong count", "nothing", "not a number", "text", "hangs"],
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
