"""The configs that docs/coming_from.md translates from other libraries: each passes all checks of a dry run."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from jaxrlhf.data.tokenizer import byte_tokenizer
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.train import main
from tests.random_weights import params_of

PAGE = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text()
CONFIGS = {yaml.safe_load(text)["name"]: text for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)}
FUNCTIONS = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.M | re.S)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
NAMES_OF_VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


ROWS: dict[str, dict[str, Any]] = {
    "train.jsonl": {"prompt": messages("2 + 2?"), "answer": "4"},
    "pairs.jsonl": {"chosen": messages("2 + 2?", "4"), "rejected": messages("2 + 2?", "5")},
    "held_out.jsonl": {"chosen": messages("3 + 2?", "5"), "rejected": messages("3 + 2?", "4")},
    "prompts.jsonl": {"context_messages": messages("Hello")},
    "gsm8k/train.parquet": {
        "data_source": "openai/gsm8k", "prompt": messages("2 + 2?"), "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 0},
    },
}  # fmt: skip
ROWS["gsm8k/test.parquet"] = ROWS["gsm8k/train.parquet"]


def write_model(folder: str, head: Head) -> None:
    tokenizer = byte_tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, head=head,
    )  # fmt: skip
    save_params(params_of(config), config, Path(folder), dtype="float32", end_id=tokenizer.end_id)
    tokenizer.save(Path(folder) / "tokenizer.json")
    settings = Path(folder) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))


def write_rows(path: Path, row: dict[str, Any], count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * count), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """Everything that the configs name, small and made up, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jaxrlhf.importing._files", {})  # later tests start processes, which import what is there
    for name, code in [*FUNCTIONS, ("my_reward.py", NAMES_OF_VERL)]:
        Path(name).write_text(code)
    folders = re.findall(r"(?:model|init): ([\w.]+-[\w.-]+)", "\n".join(CONFIGS.values()))
    for folder in set(folders):
        write_model(folder, "scalar" if "-rm-" in folder else "lm")
    for name, row in ROWS.items():
        write_rows(Path(name), row, 1100)


def test_there_is_a_config_for_every_library():
    assert set(CONFIGS) == {"grpo", "dpo", "ppo_gsm8k_verl", "ppo_reward_model", "grpo_gemma"}
    assert {name for name, _ in FUNCTIONS} == {"correct.py", "verl_reward.py"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_translated_config_is_a_run(name, in_a_folder, capsys):
    Path("run.yaml").write_text(CONFIGS[name])
    status = main(["--config", "run.yaml", "--dry-run", "--set", "devices_memory.may_exceed=true"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "Plan of the step" in printed.out
