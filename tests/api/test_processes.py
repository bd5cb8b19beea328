"""A run in Python in two processes: both do the same with it."""

import json
import os
import subprocess
import sys

from tests.subprocesses import ROOT, environment, free_port

SCRIPT = """
import json, os, sys, time
import jaxrlhf as rl
from jaxrlhf.testing import small_run

run = rl.Run(
    small_run("rloo", steps=3, num_layers=1), devices="cpu:2", plan={"default": "data 2"},
    output={"folder": "runs", "tensorboard": False}, evaluation={"num_prompts": 8},
)
found = {"first": run.step()["critic/score/mean"], "text": run.generate(["1+1="]), "evaluated": run.evaluate()}
found["saved"] = run.save().name
run.train()
found |= {"done": run.done, "rewards": run.rewards, "exported": run.export("model").name}
run.close()
print("FOUND", json.dumps(found))
sys.stdout.flush()
time.sleep(3 * int(os.environ["JAX_PROCESS_ID"]))  # the end of one is no failure of the other
"""


def test_both_processes_find_the_same(tmp_path):
    port, started = free_port(), []
    for index in range(2):
        own = environment(
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index),
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip
        command = [sys.executable, "-c", SCRIPT]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=own, text=True, stdout=subprocess.PIPE))
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    found = [json.loads(text.partition("FOUND ")[2]) for text in said]
    assert found[0] == found[1] and found[0]["done"] == 3 and len(found[0]["rewards"]) == 3
    assert found[0]["first"] == found[0]["rewards"][0] and found[0]["saved"] == "1"
    assert "Written to" in said[0] and "evaluation after" not in said[1], "the first process prints"
    assert (tmp_path / "model" / "model.safetensors").exists()
