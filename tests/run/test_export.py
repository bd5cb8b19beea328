"""Exports of a run: at the end, between steps, after a resume, and when they are interrupted."""

import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jaxrlhf.commands.convert import main as convert
from jaxrlhf.run import export as exporting
from jaxrlhf.train import main
from jaxrlhf.writing import begin_folder, finish_folder, partial_folder
from tests.subprocesses import environment, free_port

MODEL = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs supervised training in a folder of its own, with some overrides."""
    monkeypatch.chdir(tmp_path)
    actor = {"model": {**MODEL, "scan_layers": True}, "optimizer": {"learning_rate": 1e-2}}
    config = {
        "name": "sft", "algorithm": "sft", "steps": 2, "batch_size": 8, "devices": "cpu:8",
        "data": {"task": "arithmetic"}, "roles": {"actor": actor}, "settings": {"max_new_tokens": 10},
        "plan": {"default": {"data": 2, "fsdp": 2, "tensor": 2}}, "compilation_cache": "",
        "output": {"export": ["actor"], "export_every": 1, "checkpoint_every": 1, "tensorboard": False},
    }  # fmt: skip
    Path("sft.yaml").write_text(yaml.safe_dump(config))

    def run(*overrides: str) -> int:
        return main(["--config", "sft.yaml", *(x for override in overrides for x in ("--set", override))])

    return run


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_between_steps_and_after_a_resume(train):
    assert train() == 0
    run = Path("runs/latest").resolve()
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["1", "2"]
    chex.assert_trees_all_equal(weights(run / "exports/2/actor"), weights(run / "actor"))
    first = weights(run / "exports/1/actor")
    assert all(np.any(first[name] != x) for name, x in weights(run / "actor").items())
    for name in ("tokenizer.json", "config.json"):
        assert (run / "exports/1/actor" / name).read_bytes() == (run / "actor" / name).read_bytes()

    assert train("steps=3", f"resume={run}") == 0
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["1", "2", "3"]
    chex.assert_trees_all_equal(weights(run / "exports/1/actor"), first)
    chex.assert_trees_all_equal(weights(run / "exports/3/actor"), weights(run / "actor"))
    assert not [path for path in run.rglob(".*") if path.is_dir()]

    # a run that ends where it begins turns a checkpoint into a folder
    assert train("steps=1", f"resume={run}/checkpoints/steps/2") == 1
    before = sorted(run.parent.iterdir())
    assert convert([f"{run}/checkpoints/steps/2", "folders/actor"]) == 0
    chex.assert_trees_all_equal(weights(Path("folders/actor")), weights(run / "exports/2/actor"))
    assert (Path("folders/actor/tokenizer.json")).is_file()
    assert sorted(run.parent.iterdir()) == before and [path.name for path in Path("folders").iterdir()] == ["actor"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["steps/2", "to"], "steps/2: must be RUN/checkpoints/steps/NUMBER, with a run's config.yaml in RUN. Got "),
        (["steps/2", "to", "--dtype", "bfloat16"], "--dtype: is for GGUF files. Got the folder steps/2."),
        (["model.gguf", "to", "--role", "critic"], "--role, --merge-adapters: are for checkpoints. Got the file"),
        (["run/checkpoints/steps/2", "steps"], "steps: must be new. Got a file or folder that is there."),
    ],
)
def test_checkpoints_that_cannot_be_converted(arguments, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("steps/2", "run/checkpoints/steps/2"):
        Path(folder).mkdir(parents=True)
    Path("run/config.yaml").touch()
    assert convert(arguments) == 1
    assert capsys.readouterr().err.startswith(f"Error: {error}")


def test_an_interrupted_export_leaves_no_folder_and_is_written_again(train, monkeypatch):
    original = exporting.save_params

    def killed(*arguments, **settings):
        original(*arguments, **settings)
        raise SystemError("killed")

    monkeypatch.setattr(exporting, "save_params", killed)
    with pytest.raises(SystemError, match="killed"):
        train("steps=1", "output.checkpoint_every=0")
    run = Path("runs/latest").resolve()
    assert [path.name for path in (run / "exports").iterdir()] == [".1.partial"]
    assert not (run / "actor").exists()
    monkeypatch.setattr(exporting, "save_params", original)
    assert train("steps=1", f"resume={run}", "output.checkpoint_every=0") == 0
    assert [path.name for path in (run / "exports").iterdir()] == ["1"]
    chex.assert_trees_all_equal(weights(run / "exports/1/actor"), weights(run / "actor"))


def test_roles_that_start_from_one_folder_each_read_it(train):
    """In the layouts and precisions of their own; what they hold is what is in the folder."""
    assert train("output.export_every=0") == 0
    start = Path("runs/latest/actor").resolve()
    roles = {
        "actor": {"init": str(start), "optimizer": {"learning_rate": 1e-20}},
        "critic": {"init": "actor", "head": "scalar", "optimizer": {"learning_rate": 1e-20}},
        "reference": {"init": "actor", "model": {"scan_layers": True}},
        "reward": {"init": str(start), "head": "scalar"},
    }
    config = {
        "name": "ppo", "algorithm": "ppo", "steps": 1, "batch_size": 8, "devices": "cpu:8",
        "data": {"task": "arithmetic"}, "roles": roles, "compilation_cache": "",
        "settings": {"sampling": {"max_new_tokens": 6}},
        "plan": {
            "default": {"data": 2},
            "calls": {"critic.train": {"pipeline": 2}, "reference.logprobs": {"tensor": 2}},
        },
        "output": {"export": ["actor", "critic", "reference", "reward"], "tensorboard": False},
    }  # fmt: skip
    Path("ppo.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", "ppo.yaml"]) == 0
    run, came = Path("runs/latest"), weights(start)
    lm_head, body = came["lm_head.weight"], {name: x for name, x in came.items() if name != "lm_head.weight"}
    for role in roles:
        found = weights(run / role)
        if role in ("actor", "reference"):
            np.testing.assert_array_equal(found.pop("lm_head.weight"), lm_head)
        else:
            is_random = np.abs(found.pop("score.weight")).max() > 1e-3
            assert is_random == (role == "reward"), "random where it is never trained"
        chex.assert_trees_all_equal(found, body)


@pytest.mark.timeout(300)
def test_two_processes_write_what_one_writes(train, tmp_path):
    unchanged = "roles.actor.optimizer.learning_rate=1e-20"  # so that rounding of updates does not show
    assert train(unchanged) == 0
    alone = Path("runs/latest").resolve()
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", "sft.yaml", "--set", unchanged, "--set", "name=both"]
    address = f"localhost:{free_port()}"
    processes = []
    for index in range(2):
        own = environment(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        processes.append(
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    both = Path("runs/latest").resolve()
    assert both.name.startswith("both")
    for folder in ("actor", "exports/1/actor", "exports/2/actor"):
        written = {path.name: path.read_bytes() for path in (both / folder).iterdir()}
        assert written == {path.name: path.read_bytes() for path in (alone / folder).iterdir()}


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "model"
    for content in ("old", "new"):
        begin_folder(target)
        (partial_folder(target) / "file").write_text(content)
        finish_folder(target)
        assert (target / "file").read_text() == content
    begin_folder(target)
    (partial_folder(target) / "left").write_text("by a writer that was killed")
    begin_folder(target)
    assert list(partial_folder(target).iterdir()) == [] and (target / "file").read_text() == "new"


def test_export_every_needs_roles(train, capsys):
    assert train("output.export=[]") == 1
    assert (
        "output.export_every: needs roles to be exported. Got 1. Set export to [actor], say." in capsys.readouterr().err
    )


def test_adapters_merged_into_a_whole_model(train):
    """The folder's weights are the base's plus the adapters', as PEFT adds them, and it needs no adapters to go on."""
    assert train("output.export_every=0") == 0
    start = Path("runs/latest/actor").resolve()
    adapted = (
        f"roles.actor={{init: {start}, lora: {{rank: 2, alpha: 6, targets: [query, down]}}, optimizer: "
        "{learning_rate: 1.0e-2}, model: {scan_layers: true}}",
        "output.export_every=0", "plan={default: {fsdp: 2, tensor: 2}, calls: {actor.train: {pipeline: 2}}}",
    )  # fmt: skip
    assert train(*adapted) == 0
    adapters = load_file(Path("runs/latest/actor/adapter_model.safetensors"))
    run = Path("runs/latest").resolve()
    assert convert([f"{run}/checkpoints/steps/2", "merged", "--merge-adapters"]) == 0
    assert train(*adapted, "output.merge_adapters=true") == 0
    merged, base = weights(Path("runs/latest/actor")), weights(start)
    chex.assert_trees_all_equal(weights(Path("merged")), merged)
    assert not Path("runs/latest/actor/adapter_config.json").exists()
    for name, weight in base.items():
        before, after = (f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight" for x in "AB")
        change = 3 * adapters[after] @ adapters[before] if before in adapters else np.zeros_like(weight)
        assert np.any(change) == (before in adapters)
        np.testing.assert_allclose(merged[name], weight + change, rtol=1e-5, atol=1e-6)
