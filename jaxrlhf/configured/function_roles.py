"""Work of roles on the host: Python functions get the text of responses and the columns of their rows, scorers with
their own tokenizer get sequences in its tokens."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RoleConfig, RunConfig
from jaxrlhf.configured.tokenizer import own_tokenizers
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.data.retokenizing import OwnTokenizerConfig, Retokenizer
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.experience import STOP, Rollout
from jaxrlhf.programs.roles import FunctionRole, HostScores, HostSequences, OwnTokens
from jaxrlhf.require import errors_as
from jaxrlhf.rewards import functions
from jaxrlhf.rewards.built_in import VERIFIERS
from jaxrlhf.rewards.verifiers import RewardFunction
from jaxrlhf.rewards.workers import Workers


def function_role(name: str, role: RoleConfig, table: PromptTable) -> FunctionRole:
    """A function role of a config, with its function loaded and its arguments checked."""
    with errors_as(ConfigError, f"roles.{name}: "):
        function = functions.load_reward(role.function, role.options)
        functions.check_reward(function, [*table.other, "finished", "num_tokens"], name=name)
    _check_names(name, role, function, table)
    if role.function in VERIFIERS:  # options name their columns, so only a call shows whether every row has them
        rows = np.arange(len(table.prompts))
        columns = {**table.columns(rows), "finished": [True] * len(rows), "num_tokens": [1] * len(rows)}
        with errors_as(ConfigError, f"roles.{name}: ", functions.RewardError):
            functions.call_reward(function, list(table.prompts), [""] * len(rows), columns, name=name)

    def asked_of(rollout: Rollout) -> tuple[Any, list[str], list[str], dict[str, list[Any]]]:
        rows = np.asarray(rollout.row)
        columns = table.columns(rows) | {
            "finished": [bool(x) for x in np.asarray(rollout.finish) == STOP],
            "num_tokens": [int(x) for x in np.asarray(rollout.lengths)],
        }
        return function, [table.prompts[int(row)] for row in rows], decode_responses(rollout, table), columns

    limit, instead = role.sample_timeout_seconds, role.timeout_score
    workers = Workers(name, role.workers, sample_timeout_seconds=limit, timeout_score=instead) if role.workers else None
    settings: dict[str, Any] = {"name": name, "timeout_seconds": role.timeout_seconds, "workers": workers}

    def scored(scores: np.ndarray, late: list[int]) -> HostScores:
        return HostScores(scores, None if instead is None else len(late))

    def score(rollout: Rollout) -> HostScores:
        late: list[int] = []
        return scored(functions.call_reward(*asked_of(rollout), **settings, late=late), late)

    def score_tokens(rollout: Rollout) -> HostScores:
        late: list[int] = []
        rewards = functions.call_token_reward(*asked_of(rollout), **settings, late=late)
        scores_BR = np.zeros(rollout.response.shape, np.float32)
        scores_BR[np.asarray(rollout.response)] = np.concatenate(rewards)
        return scored(scores_BR, late)

    return FunctionRole(score, score_tokens)


def retokenizers(config: RunConfig, table: PromptTable) -> dict[str, Retokenizer]:
    """Scorers with their own tokenizer -> what brings rollouts into its tokens."""
    found = {}
    for name, folder in own_tokenizers(config).items():
        with errors_as(ConfigError, f"roles.{name}: "):
            settings = config.roles[name].own_tokenizer or OwnTokenizerConfig()
            found[name] = Retokenizer(name, Tokenizer.from_file(folder), table, settings)
            found[name].columns(1)  # encodes the prompts
    return found


def retokenizer_notes(made: Mapping[str, Retokenizer]) -> list[str]:
    """What scorers with their own tokenizer read, in words."""
    notes = []
    for name, each in made.items():
        chats = each.table.config.chat != "none"
        how = "its own chat template" if each.renders_chats else "the text of the prompt"
        why = " as the actor's chat template writes it, since it has none" if chats and not each.renders_chats else ""
        notes.append(f"{name} reads rollouts in the tokens of {each.tokenizer.name}, after {how}{why}.")
    return notes


def own_tokens(retokenizer: Retokenizer) -> OwnTokens:
    """How a role reads rollouts."""

    def encode(rollout: Rollout) -> HostSequences:
        with errors_as(functions.RewardError):
            return HostSequences(*retokenizer(rollout))

    return OwnTokens(retokenizer.columns, encode)


def _check_names(name: str, role: RoleConfig, function: RewardFunction, table: PromptTable) -> None:
    """Checks that no argument of a user's function is the name of both a column and a measured value."""
    for column in table.withheld:
        measured = column in inspect.signature(function).parameters and column not in functions.ROW_ARGUMENTS
        if measured and role.function not in VERIFIERS and column not in role.options:
            raise ConfigError(
                f"roles.{name}: Reward {brief(name)}: an argument must have one meaning. Got {brief(column)}, by which "
                "functions get what was measured of completions, and a column of that name. Rename the column."
            )


def decode_responses(rollout: Rollout, table: PromptTable) -> list[str]:
    """The text of every response."""
    R = rollout.response.shape[1]
    tokens_BR, response_BR = np.asarray(rollout.tokens)[:, -R:], np.asarray(rollout.response)
    return [table.tokenizer.decode(tokens[real].tolist()) for tokens, real in zip(tokens_BR, response_BR, strict=True)]
