"""A run with other sizes than those of its data, by `--prompt-tokens`, `--response-tokens` and `--lengths`, to plan
without data."""

import dataclasses
from typing import Any

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.configured.rows import Tables
from jaxrlhf.configured.sampling import map_settings, without_tokens
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.experience import Sampling
from jaxrlhf.planner.plans.config_keys import paths_of
from jaxrlhf.require import errors_as


def with_response_tokens(config: RunConfig, count: int) -> RunConfig:
    """The run with responses of `count` tokens. Raises ConfigError if its algorithm has no length of responses."""
    if count < 1:
        raise ConfigError(f"--response-tokens: must be at least 1. Got {count}.")
    keys = paths_of(config.settings, lambda value: type(value) is int)
    if not any(key.endswith(".max_new_tokens") for key in keys):
        raise ConfigError(
            f"--response-tokens: is for algorithms whose settings have max_new_tokens. Got {config.algorithm}."
        )

    def with_count(part: Any) -> Any:
        if isinstance(part, Sampling):
            return dataclasses.replace(part, max_new_tokens=count, min_new_tokens=min(part.min_new_tokens, count))
        return dataclasses.replace(part, max_new_tokens=count) if hasattr(part, "max_new_tokens") else part

    return dataclasses.replace(config, settings=map_settings(with_count, config.settings))


def with_lengths(config: RunConfig, text: str) -> RunConfig:
    """The run with other lengths of responses in its forecasts.

    `text` is `33,150`, mean and 99th percentile of their tokens, or the folder of a run that recorded them.
    """
    mean, comma, p99 = (part.strip() for part in text.partition(","))
    lengths = ResponseLengths(run=text)
    if comma and mean.replace(".", "", 1).isdecimal() and p99.isdecimal():
        with errors_as(ConfigError, "--lengths: "):
            lengths = ResponseLengths(mean=float(mean), p99=int(p99))
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, lengths=lengths))


def with_synthetic_prompts(config: RunConfig, tokens: int) -> tuple[RunConfig, Tables]:
    """The run with synthetic rows, whose prompts have `tokens` tokens, in place of its data and tokenizer."""
    if tokens < 1:
        raise ConfigError(f"--prompt-tokens: must be at least 1. Got {tokens}.")
    made_up = DataConfig(task="arithmetic", overlong="drop")
    table = load_prompts(made_up, TokenizerConfig(kind="bytes"))
    table = dataclasses.replace(table, prompt_length=tokens, tokens=[each[-tokens:] for each in table.tokens])
    settings = without_tokens(config.settings)
    config = dataclasses.replace(
        config, data=made_up, datasets=dict.fromkeys(config.datasets, made_up), settings=settings,
        tokenizer=TokenizerConfig(kind="bytes"), evaluation=None, warm_start=None,
    )  # fmt: skip
    return config, Tables(table, dict.fromkeys(config.datasets, table))
