import warnings

from jaxrlhf.run.compilation_cache import complaints_said_once


def test_a_cache_that_cannot_be_written_is_said_once(recwarn) -> None:
    said: list[str] = []
    with warnings.catch_warnings(), complaints_said_once(said.append):
        warnings.simplefilter("always")
        for name in ("jit_a", "jit_b"):
            full = f"Error writing persistent compilation cache entry for '{name}': OSError: [Errno 28] No space left"
            warnings.warn(full, stacklevel=1)
        warnings.warn("Error reading persistent compilation cache entry for 'jit_c': garbled", stacklevel=1)
        assert len(said) == 2 and "writing the compilation cache failed" in said[0] and "No space left" in said[0]
        assert "reading the compilation cache failed" in said[1] and "(garbled)" in said[1]
        assert not recwarn.list
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in recwarn.list] == ["something else"]
