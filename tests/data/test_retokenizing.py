"""Rollouts in the tokens of another tokenizer."""

import json
from typing import Any

import numpy as np
import pytest

from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.retokenizing import OwnTokenizerConfig, Retokenizer
from jaxrlhf.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from jaxrlhf.experience import LENGTH, STOP, Rollout

PROMPT = "what is it?"
ACTORS = train_bpe([PROMPT, "it is here", "nowhere"] * 3, vocab_size=290)


@pytest.fixture
def retokenizer(tmp_path):
    """One that reads rows of text, or chats, as bytes."""

    def of(row: dict[str, Any], judge: Tokenizer | None = None, **settings: Any) -> Retokenizer:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
        template = "{% for m in messages %}{{ m.content }}{% endfor %}|" if "messages" in row else ""
        data = DataConfig(path=str(path), eval_rows=0, chat_template=template)
        table = load_prompts(data, ACTORS)
        return Retokenizer("judge", judge or byte_tokenizer(), table, OwnTokenizerConfig(**settings))

    return of


def rollout(ids: list[int], finish: int, columns: int = 12) -> Rollout:
    """One response to the first row, after three columns of prompt that are not read."""
    response = np.arange(columns) < len(ids)
    tokens = np.zeros(3 + columns, np.int32)
    tokens[3 : 3 + len(ids)] = ids
    zeros = np.zeros((1, columns), np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens[None], "mask": np.concatenate([np.ones(3, bool), response])[None], "response": response[None],
        "logprobs": zeros, "sampled_logprobs": zeros, "finish": np.array([finish], np.int32),
        "row": np.zeros(1, np.int32), "id": np.zeros(1, np.uint32),
    }  # fmt: skip
    return Rollout(**arrays)


def read(retokenizer: Retokenizer, ids: list[int], finish: int) -> list[int]:
    """The tokens of the one sequence, whose masks are checked."""
    sequences, _ = retokenizer(rollout(ids, finish))
    (tokens,), (mask,) = sequences.tokens, sequences.mask
    count = int(mask.sum())
    assert mask[-count:].all() and not mask[:-count].any(), "real tokens lie at the end"
    assert sequences.response.tolist() == [[True]] and tokens.shape == (retokenizer.columns(12),)
    assert (tokens[:-count] == retokenizer.tokenizer.pad_id).all()
    return tokens[-count:].tolist()


def text(words: str) -> list[int]:
    return list(words.encode())


def test_a_finished_response_ends_with_the_end_of_its_own_tokenizer(retokenizer):
    judge = retokenizer({"prompt": PROMPT})
    end = judge.tokenizer.end_id
    assert judge.columns(12) == len(PROMPT) + 24
    response = ACTORS.encode("it is here")
    assert len(response) < len("it is here"), "other tokens"
    assert read(judge, [*response, ACTORS.end_id], STOP) == [*text(PROMPT + "it is here"), end]
    assert read(judge, response, STOP) == [*text(PROMPT + "it is here"), end], "a stop string is part of the text"
    assert read(judge, response, LENGTH) == text(PROMPT + "it is here")
    assert read(judge, [ACTORS.end_id], STOP) == [*text(PROMPT), end]


def test_a_control_token_that_was_spelled_out_stays_text(retokenizer):
    judge = retokenizer({"prompt": "a"})
    spelled = ACTORS.encode("<|endof") + ACTORS.encode("text|>x")
    got = retokenizer({"prompt": "a"})(rollout(spelled, LENGTH, columns=24))[0]
    assert got.tokens[got.mask].tolist() == text("a<|endoftext|>x")
    assert judge.tokenizer.end_id not in got.tokens[got.mask]


def test_chats_are_rendered_by_its_own_template_if_it_has_one(retokenizer):
    row = {"messages": [{"role": "user", "content": "hi"}]}
    judge = retokenizer(row)
    assert not judge.renders_chats and [prompt.tolist() for prompt in judge.prompts] == [text("hi|")], (
        "the actor's text"
    )
    own = retokenizer(row, chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:")
    assert own.renders_chats and [prompt.tolist() for prompt in own.prompts] == [text("<user>hi:")]


def test_a_longer_sequence_loses_its_first_tokens_or_is_an_error(retokenizer):
    response = [*ACTORS.encode("nowhere"), ACTORS.end_id]
    judge = retokenizer({"prompt": PROMPT}, max_tokens=10)
    assert read(judge, response, STOP) == [*text("t?nowhere"), judge.tokenizer.end_id]
    assert judge(rollout(response, STOP))[1] == 1
    assert retokenizer({"prompt": PROMPT})(rollout(response, STOP))[1] == 0
    message = (
        r"roles\.judge\.own_tokenizer\.max_tokens: must hold prompt and response in the role's own tokens\. Got "
        r"10, and 19 for a response to .*rows\.jsonl:1\. Raise it, or set roles\.judge\.own_tokenizer\.overlong to "
        r"'cut'\."
    )
    with pytest.raises(ValueError, match=message):
        retokenizer({"prompt": PROMPT}, max_tokens=10, overlong="error")(rollout(response, STOP))


def test_spans_show_control_tokens():
    ids = [*ACTORS.encode("it"), ACTORS.end_id, *ACTORS.encode(" is"), ACTORS.pad_id]
    assert ACTORS.spans(ids) == [("it", False), ("<|endoftext|>", True), (" is", False), ("<|pad|>", True)]
