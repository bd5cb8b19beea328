"""Stop strings as an automaton over tokens.

Letters: N states, C classes of tokens, V tokens of the vocabulary, T tokens at a time, L bytes of the longest of them.

A stop string may begin and end within tokens, and be cut into tokens in many ways. So the automaton of Aho and Corasick
reads bytes: each state is the longest end of the text that a stop string begins with. Fed with all bytes of a token, it
goes from state to state by tokens, which is all that a decoding step has to look up.

Most tokens lead from every state to the same one as many others do: those without a letter of any stop string, to the
first state. They are one class. The table of a class for each token and a next state for each state and class is much
smaller than one of states by tokens: 0.6 MB in place of 4 for one string of 12 bytes over a vocabulary of 152,000.

Reference:
    Aho and Corasick 1975, Communications of the ACM 18(6).
"""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxrlhf.experience import StopTable
from jaxrlhf.require import require

MAX_BYTES = 1024
"""The most bytes of all stop strings together, which bound the states of the automaton."""
MAX_TABLE_BYTES = 64 * 2**20
_TOKENS_AT_A_TIME = 4096
_REMEDY = "Use fewer or shorter ones, or stop_ids."
_BEYOND = "\ufffd".encode()
"""The text of a token beyond the vocabulary."""


def stop_table(strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopTable:
    """The automaton of some stop strings, over the tokens of a vocabulary, given as bytes.

    Raises ValueError if the strings are too long, or their table too large.
    """
    sought = [text.encode() for text in strings]
    size, rule = sum(map(len, sought)), f"must have at most {MAX_BYTES} bytes together"
    require(size <= MAX_BYTES, "sampling.stop_strings", rule, size, _REMEDY)
    after_byte_Nb, completes_N = _automaton(sought)
    tokens = [*token_bytes, _BEYOND]
    by_length = sorted(range(len(tokens)), key=lambda number: -len(tokens[number]))
    class_of_token = np.zeros(len(tokens), np.int32)
    columns: dict[bytes, int] = {}
    for first in range(0, len(tokens), _TOKENS_AT_A_TIME):
        chosen = by_length[first : first + _TOKENS_AT_A_TIME]
        step_TN = _steps([tokens[number] for number in chosen], after_byte_Nb, completes_N)
        for number, step_N in zip(chosen, step_TN, strict=True):
            class_of_token[number] = columns.setdefault(step_N.tobytes(), len(columns))
        if class_of_token.nbytes + len(columns) * step_TN.itemsize * len(completes_N) > MAX_TABLE_BYTES:
            raise ValueError(
                f"sampling.stop_strings: must have a table of at most {MAX_TABLE_BYTES >> 20} MB over this vocabulary. "
                f"Got {len(completes_N)} states by {len(columns)} or more classes of tokens. {_REMEDY}"
            )
    step_CN = np.frombuffer(b"".join(columns), np.int16).reshape(len(columns), -1)
    steps = np.ascontiguousarray(step_CN.T).tobytes()
    return StopTable(tuple(strings), len(completes_N), class_of_token.tobytes(), steps)


def _automaton(sought: Sequence[bytes]) -> tuple[Int[np.ndarray, "N b"], Bool[np.ndarray, " N"]]:
    """The next state of each state and byte, and the states in which a string is complete."""
    children: list[dict[int, int]] = [{}]
    completes = [False]
    for string in sought:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                completes.append(False)
            state = children[state][byte]
        completes[state] = True
    after_Nb = np.zeros((len(children), 256), np.int16)
    shorter = [0] * len(children)  # the state of the longest end of its text that is another state
    waiting = collections.deque([0])
    while waiting:  # from the shortest texts on
        state = waiting.popleft()
        completes[state] |= completes[shorter[state]]
        if state:
            after_Nb[state] = after_Nb[shorter[state]]
        for byte, child in children[state].items():
            shorter[child] = int(after_Nb[shorter[state], byte]) if state else 0
            after_Nb[state, byte] = child
            waiting.append(child)
    return after_Nb, np.array(completes)


def _steps(
    tokens: Sequence[bytes], after_Nb: Int[np.ndarray, "N b"], completes_N: Bool[np.ndarray, " N"]
) -> Int[np.ndarray, "T N"]:
    """The next state for each token, the longest first, and state; where it completes a string, -1 minus that state."""
    lengths = np.array([len(token) for token in tokens])
    state_TN = np.tile(np.arange(len(completes_N), dtype=np.int16), (len(tokens), 1))
    complete_TN = np.zeros(state_TN.shape, bool)
    bytes_TL = np.frombuffer(b"".join(token.ljust(lengths[0], b"\0") for token in tokens), np.uint8)
    bytes_TL = bytes_TL.reshape(len(tokens), lengths[0])
    for place in range(lengths[0]):
        going_on = int((lengths > place).sum())
        state_TN[:going_on] = after_Nb[state_TN[:going_on], bytes_TL[:going_on, place, None]]
        complete_TN[:going_on] |= completes_N[state_TN[:going_on]]
    return np.where(complete_TN, -1 - state_TN, state_TN)
