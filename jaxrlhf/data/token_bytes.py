"""The bytes that each token of a vocabulary stands for in a text, as the decoder of a tokenizer.json writes them."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from jaxrlhf.data.tokenizer_files import LETTER_OF_BYTE

_BYTE_OF_LETTER = {letter: byte for byte, letter in LETTER_OF_BYTE.items()}
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token of one byte in vocabularies of SentencePiece."""


def token_bytes(backend: tokenizers.Tokenizer, *, name: str) -> dict[int, bytes]:
    """Token -> its bytes within a text, for byte-level vocabularies and those of SentencePiece.

    Bytes, since a token may hold part of a character. A decoder that strips the first space of a text does not strip it
    here: a token is taken as it stands after others. Raises ValueError if the decoder writes a token in a way that
    depends on the tokens around it, or that is not known here.
    """
    steps = _steps(backend, name)

    def written(token: str) -> bytes:
        piece: str | bytes = token
        for step in steps:
            piece = step(piece) if isinstance(piece, str) else piece
        return piece if isinstance(piece, bytes) else piece.encode()

    return {number: written(token) for token, number in backend.get_vocab(with_added_tokens=True).items()}


def _steps(backend: tokenizers.Tokenizer, name: str) -> list[Callable[[str], str | bytes]]:
    """The steps in which the decoder turns a token into its bytes."""
    decoder = backend.decoder
    described = _parts(json.loads(decoder.__getstate__())) if decoder is not None else [{"type": "None"}]
    kinds = [part["type"] for part in described]
    steps: list[Callable[[str], str | bytes]] = []
    for i, part in enumerate(described):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_byte_fallback)
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if "Fuse" not in kinds[:i]:
                steps.append(lambda token, old=old, new=new: token.replace(old, new))
            case {"type": "Metaspace", "replacement": mark}:
                steps.append(lambda token, mark=mark: token.replace(mark, " "))
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip"} if "Fuse" in kinds[:i]:
                pass
            case _:
                raise ValueError(
                    f"sampling.stop_strings: need a tokenizer that is byte-level or SentencePiece's, each of whose "
                    f"tokens stands for certain bytes. Got {name}, with the decoder {' + '.join(kinds)}. Use stop_ids."
                )
    return steps


def _parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for each in decoder["decoders"] for part in _parts(each)]


def _byte_level(token: str) -> bytes:
    """The bytes that a token's letters stand for; of a token with other letters, such as an added one with a space, its
    own."""
    numbers = [_BYTE_OF_LETTER.get(letter) for letter in token]
    return token.encode() if None in numbers else bytes(number for number in numbers if number is not None)


def _byte_fallback(token: str) -> str | bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token
