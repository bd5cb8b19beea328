"""The chain of supervised fine-tuning, reward model and PPO: its commands, its errors, and all on a small file."""

import argparse
import gzip
import itertools
import json
from pathlib import Path

import pytest

from scripts import sft_rm_ppo as chain
from tests.subprocesses import environment

MODEL = "{vocab_size: 512, hidden_size: 16, intermediate_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2}"


def overrides(command: list[str]) -> list[str]:
    return [value for key, value in itertools.pairwise(command) if key == "--set"]


def test_every_stage_begins_with_what_those_before_it_left():
    given = argparse.Namespace(data=Path("a.jsonl"), eval=Path("b.jsonl"), out=Path("o"), set=[], resume=True)
    sft, reward_model, ppo = (chain.command(stage, given) for stage in chain.STAGES)
    common = ['data.path="a.jsonl"', 'data.eval_path="b.jsonl"']
    actor = '"o/sft/latest/actor"'
    assert sorted(overrides(sft)) == sorted([*common, 'output.folder="o/sft"'])
    assert sorted(overrides(reward_model)) == sorted(
        [*common, 'output.folder="o/reward_model"', f"tokenizer.path={actor}", f"roles.reward.init={actor}"]
    )
    assert sorted(overrides(ppo)) == sorted(
        [
            *common,
            'output.folder="o/ppo"',
            f"tokenizer.path={actor}",
            f"roles.actor.init={actor}",
            'roles.reward.init="o/reward_model/latest/reward"',
        ]
    )
    assert sft[-2:] == ["--resume", "auto"] and sft[3:5] == ["--config", "sft_hh"]


def test_what_the_user_sets_reaches_its_stage_last():
    sets = ["ppo.steps=3", "sft.steps=2", "ppo.data.path=c.jsonl"]
    given = argparse.Namespace(data=Path("a.jsonl"), eval=None, out=Path("o"), set=sets, resume=False)
    assert overrides(chain.command("ppo", given))[-2:] == ["steps=3", "data.path=c.jsonl"]
    assert overrides(chain.command("reward_model", given))[-1].startswith("roles.reward.init=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "steps=3"], "--set: must begin with a stage (sft, reward_model, ppo). Got 'steps=3'."),
        (["--eval", "nowhere.jsonl"], "--data and --eval: must be existing files. Got 'nowhere.jsonl'."),
    ],
)
def test_what_a_user_gets_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit):
        chain.main(["--data", __file__, *arguments])
    assert message in capsys.readouterr().err


def test_a_stage_that_fails_ends_the_chain(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}')
    assert (
        chain.main(["--data", "pairs.jsonl", "--set", "sft.data.malformed=error", "--set", "sft.data.eval_rows=0"]) == 1
    )
    err = " ".join(capfd.readouterr().err.split())
    assert "chosen must have a reply" in err and "sft ended with status 1: the stages after it did not run." in err


def test_the_whole_chain_on_a_small_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    start = "\n\nHuman: Say {i}.\n\nAssistant:"
    rows = [{"chosen": f"{start.format(i=i)} {i}", "rejected": f"{start.format(i=i)} no, {i}"} for i in range(48)]
    Path("pairs.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    sets = {f"{stage}.{key}": value for stage in chain.STAGES for key, value in {
        "steps": "1", "batch_size": "8", "data.eval_rows": "16", "data.max_prompt_tokens": "24",
        "evaluation.num_prompts": "8", "evaluation.batch_size": "8", "compilation_cache": "''",
        "output.timeline": "false", "devices": "cpu:1", "plan.default": "{data: 1}",
    }.items()}  # fmt: skip
    sets |= {
        "sft.roles.actor.model": MODEL,
        "sft.tokenizer.vocab_size": "280",
        "ppo.settings.sampling.max_new_tokens": "4",
    }
    sets |= {f"{stage}.settings.max_new_tokens": "12" for stage in ("sft", "reward_model")}
    sets |= {f"{stage}.settings.update.mini_batches": "1" for stage in ("sft", "reward_model")}
    sets |= {f"ppo.settings.{update}.mini_batches": "1" for update in ("actor_update", "critic_update")}
    given = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    assert chain.main(["--data", "pairs.jsonl.gz", "--out", "out", *given]) == 0
    out = capfd.readouterr().out
    table = out[out.index("On held-out rows") :].splitlines()
    assert [line.split(":")[0] for line in table[1:6]] == ["sft", "reward_model", "reward_model", "ppo", "ppo"]
    assert "preference accuracy" in table[2] and table[2].split()[-2] == "0.500"
    assert (tmp_path / "out" / "ppo" / "latest" / "actor" / "tokenizer.json").is_file()
