"""Stop strings, found in tokens as in the whole text; and the bytes of tokens, as decoders write them."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxrlhf.data import stop_strings
from jaxrlhf.data.stop_strings import stop_table
from jaxrlhf.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from jaxrlhf.experience import StopTable


def completing(table: StopTable, tokens: Sequence[int]) -> list[bool]:
    """Whether each token completes a stop string, as the automaton sees it."""
    found, state = [], 0
    for token in tokens:
        step = int(table.step_of_class[state, table.class_of_token[min(token, len(table.class_of_token) - 1)]])
        found.append(step < 0)
        state = -1 - step if step < 0 else step
    return found


def completing_by_search(strings: Sequence[str], pieces: Sequence[bytes]) -> list[bool]:
    """The same by looking for each string at each end in the whole text."""
    found, text = [], b""
    for piece in pieces:
        ends = range(len(text) + 1, len(text + piece) + 1)
        text += piece
        found.append(any(text[:end].endswith(string.encode()) for end in ends for string in strings))
    return found


LETTERS = st.text("abé", max_size=5)  # two letters share their first byte with none, the third has two bytes
PIECES = st.lists(st.binary(max_size=1) | LETTERS.map(str.encode) | st.sampled_from([b"\xc3", b"\xa9a"]), min_size=1)


@given(st.lists(LETTERS.filter(bool), min_size=1, max_size=4), PIECES, st.data())
def test_the_automaton_finds_what_a_search_finds(strings, vocabulary, data):
    table = stop_table(strings, vocabulary)
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) + 1), max_size=20))
    pieces = [vocabulary[token] if token < len(vocabulary) else "\ufffd".encode() for token in tokens]
    assert completing(table, tokens) == completing_by_search(strings, pieces)


def test_tokens_that_lead_to_the_same_states_are_one_class():
    """Those of a large vocabulary fall into few classes, also where they are read in several parts."""
    vocabulary = [str(number).encode() for number in range(3 * stop_strings._TOKENS_AT_A_TIME)]
    table = stop_table(["\n\nQ", "77"], vocabulary)
    assert table.num_states == 6
    assert table.step_of_class.shape[1] == 8, "how a token begins and ends, and whether it has 77 within"
    assert completing(table, [7, 7]) == [False, True]
    assert completing(table, [123, 1077, 177, 7]) == [False, True, True, True]


def test_long_strings_are_refused():
    with pytest.raises(
        ValueError, match=r"sampling\.stop_strings: must have at most 1024 bytes .* Got 1200\. Use fewer"
    ):
        stop_table(["a" * 600, "b" * 600], [b"a"])


def test_large_tables_are_refused(monkeypatch):
    """Of a vocabulary in which each token is another part of the string."""
    monkeypatch.setattr(stop_strings, "MAX_TABLE_BYTES", 2**20)
    string = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 600)))
    parts = [string[i : i + length].encode() for i in range(600) for length in (1, 2, 3)]
    message = (
        r"table of at most 1 MB over this vocabulary\. Got 601 states by 1\d+ or more classes of tokens\. Use fewer"
    )
    with pytest.raises(ValueError, match=message):
        stop_table([string], parts)


def sentencepiece() -> Tokenizer:
    """A vocabulary in the manner of Llama 2: spaces as a letter, and a token for each byte."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "\n", "▁▁", "b▁"]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>", "<|user|>"])
    backend.add_tokens(["two words"])
    return Tokenizer(backend, name="sentencepiece")


def byte_level() -> Tokenizer:
    tokenizer = train_bpe(["a bé\n\nc 日本 😀 the cat"] * 9, vocab_size=300)
    tokenizer._backend.add_special_tokens(["<|im_end|>"])
    tokenizer._backend.add_tokens(["two words"])
    return Tokenizer(tokenizer._backend, name="byte-level")


def metaspace() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(["</s>", "▁a", "b", "é", "▁"])}, []))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, name="metaspace")


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": byte_tokenizer(),
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": metaspace(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_bytes_of_tokens_are_what_they_are_decoded_to(name, data):
    """Beside the space that the decoders of SentencePiece strip off the beginning of a text."""
    tokenizer = TOKENIZERS[name]
    pieces = st.integers(0, tokenizer.vocab_size - 1).map(lambda number: [number])
    if name == "sentencepiece":  # whole characters: it replaces all bytes that stand beside a broken one
        words = st.integers(258, tokenizer.vocab_size - 1).map(lambda number: [number])
        pieces = words | st.characters(codec="utf-8").map(lambda letter: [2 + byte for byte in letter.encode()])
    ids = [number for piece in data.draw(st.lists(pieces, max_size=12)) for number in piece]
    text = b"".join(tokenizer.token_bytes[number] for number in ids).decode(errors="replace")
    decoded = tokenizer.decode(ids)
    assert decoded == text or (name in ("sentencepiece", "metaspace") and decoded == text.removeprefix(" "))


def test_special_tokens_have_their_names_and_the_end_of_text_nothing():
    tokenizer = TOKENIZERS["sentencepiece"]
    assert tokenizer.token_bytes[tokenizer.encode("<|user|>")[0]] == b"<|user|>"
    assert tokenizer.token_bytes[tokenizer.end_id] == b""


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip(" ", 1, 0), decoders.CTC()])
def test_other_decoders_are_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    kind = "None" if decoder is None else json.loads(decoder.__getstate__())["type"]
    with pytest.raises(ValueError, match=rf"byte-level or SentencePiece's.* Got words, with the decoder {kind}\. Use"):
        _ = Tokenizer(backend, name="words").token_bytes


def test_a_string_may_end_within_a_token_and_the_next_one_begin_there():
    table = stop_table(["ab"], [b"xaba", b"b", b"c"])
    assert completing(table, [0, 1, 1, 0, 2, 1]) == [True, True, False, True, False, False]
    assert np.issubdtype(table.step_of_class.dtype, np.int16)
