import os
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxrlhf.checkpoint.manifest import MANIFEST, find_damage
from jaxrlhf.checkpoint.store import CheckpointStore


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with CheckpointStore(folder) as store:
        for number in (1, 2):
            store.save(number, {"x": jnp.arange(1000.0)}, {"seed": number})
    assert find_damage(folder / "1") is None
    return folder / "2"


def files_of(checkpoint: Path) -> list[Path]:
    """All but an empty mark that Orbax adds at the end, and does not read."""
    return sorted(p for p in checkpoint.rglob("*") if p.is_file() and p != checkpoint / "commit_success.txt")


def test_any_damage_to_any_file_is_found(checkpoint: Path) -> None:
    assert find_damage(checkpoint) is None and len(files_of(checkpoint)) > 10
    for path in files_of(checkpoint):
        content, name = path.read_bytes(), path.name
        path.unlink()
        if name != MANIFEST:
            assert f"{path.relative_to(checkpoint)} is missing" == find_damage(checkpoint)
        if content:
            path.write_bytes(b"")
            assert find_damage(checkpoint) is not None, "truncated"
        if content and name not in (MANIFEST, "_CHECKPOINT_METADATA"):
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            assert f"{path.relative_to(checkpoint)} is garbled: its checksum differs" == find_damage(checkpoint)
        path.write_bytes(content)
    assert find_damage(checkpoint) is None


def test_a_checkpoint_of_before_there_were_manifests_counts_as_whole(checkpoint: Path) -> None:
    os.rename(checkpoint / MANIFEST, checkpoint.parent / MANIFEST)
    assert find_damage(checkpoint) is None
    with CheckpointStore(checkpoint.parent, read_only=True) as store:
        assert store.meta(2) == {"seed": 2}
    os.rename(checkpoint.parent / MANIFEST, checkpoint / MANIFEST)
