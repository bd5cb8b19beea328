"""The sampling of a run: nested settings searched for it, checked against the tokenizer and completed by it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxrlhf.config.reading import ConfigError
from jaxrlhf.data.stop_strings import stop_table
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.experience import ResolvedSampling, Sampling, StopTable


def resolved(settings: Any, tokenizer: Tokenizer) -> Any:
    """Settings in which every `Sampling` has stop tokens, by default the end of text, and an automaton of its stop
    strings. Raises ConfigError or ValueError if one names tokens that there are not or leaves none to be drawn.
    """

    def of_tokenizer(part: Any) -> Any:
        if not isinstance(part, Sampling):
            return part
        sampling = part if part.stop_ids else dataclasses.replace(part, stop_ids=(tokenizer.end_id,))
        _check_tokens(sampling, tokenizer)
        if not sampling.stop_strings:
            return sampling
        fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(Sampling)}
        return ResolvedSampling(**fields, stop_table=_stop_table(sampling.stop_strings, tokenizer))

    return map_settings(of_tokenizer, settings)


@functools.lru_cache(maxsize=4)
def _stop_table(strings: tuple[str, ...], tokenizer: Tokenizer) -> StopTable:
    return stop_table(strings, tokenizer.token_bytes)


def map_settings(change: Callable[[Any], Any], settings: Any) -> Any:
    """Nested settings with `change` applied to every dataclass in them, from the innermost on."""
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return settings
    inner = {f.name: map_settings(change, getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}
    return change(dataclasses.replace(settings, **inner))


def samplings_of(settings: Any) -> list[Sampling]:
    """All `Sampling`s in nested settings."""
    if isinstance(settings, Sampling):
        return [settings]
    if dataclasses.is_dataclass(settings):
        settings = tuple(getattr(settings, field.name) for field in dataclasses.fields(settings))
    return [found for part in settings for found in samplings_of(part)] if isinstance(settings, tuple) else []


def without_tokens(settings: Any) -> Any:
    """Settings in which no `Sampling` names a token, since those are of another tokenizer."""
    none: dict[str, Any] = {"stop_ids": (), "logit_bias": {}, "allowed_tokens": (), "banned_tokens": ()}
    return map_settings(lambda x: dataclasses.replace(x, **none) if isinstance(x, Sampling) else x, settings)


def check_end(sampling: Sampling, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if a response may end early, but no drawable token and no stop string ends it."""
    most = sampling.max_new_tokens
    has_fixed_length = max(sampling.min_new_tokens, 1) == most
    if has_fixed_length or sampling.stop_strings or _drawable(sampling, tokenizer).intersection(sampling.stop_ids):
        return
    stop_ids = ", ".join(map(str, sampling.stop_ids[:8])) + (", ..." if len(sampling.stop_ids) > 8 else "")
    raise ConfigError(
        f"sampling.{_masked_by(sampling)}: must leave a token that ends a response, one of stop_ids "
        f"({stop_ids}). Got none. Allow one or set stop_strings; for responses of {most} tokens each "
        f"set min_new_tokens to {most}."
    )


def _check_tokens(sampling: Sampling, tokenizer: Tokenizer) -> None:
    """Checks that the tokens that a `Sampling` names are there, and that it leaves some to be drawn."""
    for name in ("stop_ids", "allowed_tokens", "banned_tokens", "logit_bias"):
        for token in getattr(sampling, name):
            if not 0 <= token < tokenizer.vocab_size:
                raise ConfigError(
                    f"sampling.{name}: must be tokens of the vocabulary ({tokenizer.name}), 0 to "
                    f"{tokenizer.vocab_size - 1}. Got {token}."
                )
    drawable = _drawable(sampling, tokenizer)
    if not drawable:
        raise ConfigError(
            f"sampling.banned_tokens: must leave a token to be drawn. Got all {tokenizer.vocab_size} of the vocabulary "
            f"({tokenizer.name}). Take some out."
        )
    if sampling.min_new_tokens and drawable.issubset(sampling.stop_ids):
        raise ConfigError(
            f"sampling.{_masked_by(sampling)}: must leave a token that does not end a response, since none that does "
            f"is drawn before min_new_tokens={sampling.min_new_tokens}. Got none. Allow one or set min_new_tokens to 0."
        )


def _drawable(sampling: Sampling, tokenizer: Tokenizer) -> set[int]:
    """Tokens that are not left out by `allowed_tokens` or `banned_tokens`."""
    return set(sampling.allowed_tokens or range(tokenizer.vocab_size)).difference(sampling.banned_tokens)


def _masked_by(sampling: Sampling) -> str:
    """The key that leaves tokens out, or `stop_ids` if none does."""
    masks = (name for name in ("allowed_tokens", "banned_tokens") if getattr(sampling, name))
    return next(masks, "stop_ids")
