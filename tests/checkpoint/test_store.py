from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.checkpoint.store import CheckpointError, CheckpointStore, checkpoint_numbers
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.writing import UnwritableError

LAYOUT = Layout.over(tuple(range(8)), Strategy(data=8))
ELSEWHERE = Layout.over((2, 3), Strategy(data=2))


def random_arrays() -> dict[str, jax.Array]:
    noise = np.random.default_rng(0).normal(size=(8, 50_000)).astype(np.float32)
    return {
        "split": jax.device_put(noise, LAYOUT.rows),
        "everywhere": jax.device_put(noise[0], LAYOUT.replicated),
        "half": jax.device_put(noise.astype(jnp.bfloat16), LAYOUT.rows),
    }


def abstract(arrays: dict[str, jax.Array], layout: Layout = LAYOUT) -> dict[str, jax.ShapeDtypeStruct]:
    shardings = {"split": layout.rows, "everywhere": layout.replicated, "half": layout.rows}
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name]) for name, x in arrays.items()}


@pytest.mark.parametrize("layout", [LAYOUT, ELSEWHERE], ids=["the same layout", "another layout"])
def test_arrays_may_be_donated_as_soon_as_they_are_being_saved(tmp_path: Path, layout: Layout) -> None:
    arrays = random_arrays()
    wanted = jax.tree.map(np.array, arrays)
    spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with CheckpointStore(tmp_path) as store:
        store.save(3, arrays, {"versions": {"actor": 2}})
        jax.block_until_ready([spoil(x) for x in arrays.values()])
    with CheckpointStore(tmp_path, read_only=True) as store:
        restored, meta = store.restore(3, abstract(arrays, layout))
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)
    assert restored["split"].sharding == layout.rows and meta == {"versions": {"actor": 2}}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    arrays = {"x": jnp.ones(3)}
    with CheckpointStore(tmp_path, keep=2) as store:
        for number, value in enumerate([0.1, 0.9, None, 0.9, 0.3, None]):
            store.save(number, arrays, {}, value=value)
    assert checkpoint_numbers(tmp_path) == [1, 4, 5], "of equals the first"
    with CheckpointStore(tmp_path, keep=1) as store:  # values are read back
        store.save(6, arrays, {}, value=0.5)
    assert checkpoint_numbers(tmp_path) == [1, 6]


def test_what_a_kill_leaves_is_not_read_and_goes(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": jnp.ones(3)}, {})
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    with CheckpointStore(tmp_path, read_only=True) as store:
        assert store.meta(1) is not None and half.exists(), "who only reads changes nothing"
    assert checkpoint_numbers(tmp_path) == [1]
    with CheckpointStore(tmp_path) as store:
        store.save(2, {"x": jnp.zeros(3)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert checkpoint_numbers(tmp_path / "nowhere") == []


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays()
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays, {})
        store.wait()
        like = abstract(arrays)
        with pytest.raises(CheckpointError, match=r"has no complete checkpoint 2. Got 1."):
            store.restore(2, like)
        for wrong in ({**like, "more": like["half"]}, {k: v for k, v in like.items() if k != "half"}):
            with pytest.raises(CheckpointError, match=r"1 differ, first (more|half): Got .* Resume with the config"):
                store.check(1, wrong)
        shape = jax.ShapeDtypeStruct((8, 7), jnp.float32, sharding=LAYOUT.rows)
        with pytest.raises(CheckpointError, match=r"first split: Got float32\[8, 50000\] for float32\[8, 7\]"):
            store.restore(1, {**like, "split": shape})


def test_what_cannot_be_written_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointStore(tmp_path) as store:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store._manager, "save", full)
        with pytest.raises(UnwritableError, match=r"/1: must be writable. Got 'No space left on device'. Make room"):
            store.save(1, {"x": jnp.ones(3)}, {})


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    arrays = random_arrays()
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays, {})
    for path in tmp_path.rglob("manifest.ocdbt"):
        path.write_bytes(path.read_bytes()[:10])
    with (
        CheckpointStore(tmp_path, read_only=True) as store,
        pytest.raises(CheckpointError, match=r"/1: must be a whole checkpoint. Got .* Resume from another one"),
    ):
        store.check(1, abstract(arrays))
        store.restore(1, abstract(arrays))
