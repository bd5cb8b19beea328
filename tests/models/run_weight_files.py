"""One of two processes that read a checkpoint and write it: run_weight_files.py COORDINATOR NUM_PROCESSES INDEX."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

coordinator, num_processes, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // num_processes)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes, index)

from jaxrlhf.execution.process_channel import Channel  # noqa: E402
from jaxrlhf.models import array_pieces  # noqa: E402
from jaxrlhf.models.config_json import read_config  # noqa: E402
from jaxrlhf.models.huggingface import load_params, save_params  # noqa: E402
from jaxrlhf.models.weight_files import StoredTensor  # noqa: E402
from jaxrlhf.sharding.layout import Layout  # noqa: E402
from jaxrlhf.sharding.strategy import Strategy  # noqa: E402

array_pieces.CHUNK_BYTES = 300
source, written = Path(os.environ["CHECKPOINT"]), Path(os.environ["WRITTEN"])
config, channel = read_config(source), Channel.open()
whole = jax.tree.leaves(load_params(source, config))
read: list[int] = []
original = StoredTensor.read_into


def counted(self: StoredTensor, target: np.ndarray, index: Any) -> None:
    read.append(target.nbytes)
    original(self, target, index)


StoredTensor.read_into = counted
layouts = {
    "split": Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2)),  # a copy in each process
    "stages": Layout.over(tuple(range(8)), Strategy(pipeline=2, fsdp=2, tensor=2)),  # a stage in each process
}
for name, layout in layouts.items():
    read.clear()
    params = load_params(source, config, layout)
    own = 0
    for array, want in zip(jax.tree.leaves(params), whole, strict=True):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(want)[shard.index])
        own += sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())
    assert sum(read) == own, "what its devices hold, each slice once"
    save_params(params, config, written / name, dtype="float32", processes=channel, shard_bytes=4000)

try:  # an error in the first process, where files are written, is one of both
    save_params(params, config, source / "config.json", dtype="float32", processes=channel)
except OSError as error:
    assert channel.is_shared(error)
else:
    raise AssertionError("a file is no folder")
channel.close()
