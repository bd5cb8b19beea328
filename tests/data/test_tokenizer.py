"""Round trips, ids outside the vocabulary, special tokens, and every error of the tokenizers."""

import json
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from jaxrlhf.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, load_tokenizer, train_bpe


def word_tokenizer(path, *words):
    """A tokenizer.json with one token per word of `words`, numbered from 0."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(path))
    return str(path)


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and all(0 <= token < 256 for token in ids)
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(-5, 300)))
def test_bytes_decode_never_raises(ids):
    assert isinstance(byte_tokenizer().decode(ids), str)


def test_bytes_by_hand():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_id, tokenizer.name) == (258, 256, 257, "bytes")
    assert tokenizer.encode("é=") == [0xC3, 0xA9, 61]
    assert tokenizer.decode([256, 72, 105, 257, 256]) == "Hi"
    assert tokenizer.decode([72, 258, 105, -1]) == "H\ufffdi\ufffd"
    assert tokenizer.decode([0xC3, 61]) == "\ufffd="


def test_bpe_learns_merges_and_is_deterministic(tmp_path):
    texts = ["the cat and the hat"] * 20
    tokenizer = train_bpe(texts, vocab_size=266)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_id) == (266, 0, 1)
    assert len(tokenizer.encode("the cat")) < len("the cat")
    assert tokenizer.encode("the hat") == train_bpe(texts, vocab_size=266).encode("the hat")
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert (again.vocab_size, again.pad_id, again.end_id) == (266, 0, 1)
    assert again.encode("the cat") == tokenizer.encode("the cat")


@given(st.text(max_size=20).filter(lambda text: "<|" not in text))
def test_bpe_round_trips_text_it_never_saw(text):
    assert BPE.decode(BPE.encode(text)) == text


BPE = train_bpe(["some text"], vocab_size=262)


def test_bpe_decode_drops_special_tokens_and_marks_unknown_ids():
    hi = BPE.encode("Hi")
    assert BPE.decode([0, *hi, 1, 0]) == "Hi"
    assert BPE.decode([*hi, 262, *hi, -3, 10**12]) == "Hi\ufffdHi\ufffd\ufffd"


def test_encode_adds_nothing_and_never_truncates(tmp_path):
    path = word_tokenizer(tmp_path / "t.json", "<unk>", "</s>", "a", "b")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(path)
    assert Tokenizer.from_file(path).encode("a b a b") == [2, 3, 2, 3]


@pytest.mark.parametrize(
    ("words", "end", "pad"),
    [
        (("<unk>", "</s>", "a"), 1, 1),
        (("<unk>", "</s>", "<|endoftext|>", "[PAD]"), 2, 3),
        (("<unk>", "<|im_end|>", "<|eot_id|>", "[PAD]", "<pad>"), 2, 4),
        (("<unk>", "<eos>", "<|pad|>"), 1, 2),
    ],
)
def test_common_names(tmp_path, words, end, pad):
    tokenizer = Tokenizer.from_file(word_tokenizer(tmp_path / "t.json", *words))
    assert (tokenizer.end_id, tokenizer.pad_id, tokenizer.vocab_size) == (end, pad, len(words))


def test_given_names_win(tmp_path):
    path = word_tokenizer(tmp_path / "t.json", "<unk>", "</s>", "stop", "blank")
    config = TokenizerConfig(kind="file", path=path, end_token="stop", pad_token="blank")
    tokenizer = load_tokenizer(config, iter(()))
    assert (tokenizer.end_id, tokenizer.pad_id, tokenizer.name) == (2, 3, path)


def test_tokens_of_the_files_beside_a_tokenizer(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json", "<unk>", "</s>", "<pad>", "stop", "blank")

    def tokens(**settings):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.from_file(path)
        return tokenizer.end_id, tokenizer.pad_id

    assert tokens() == tokens(eos_token=None, add_eos_token=True) == (1, 2)
    assert tokens(eos_token="stop", pad_token="blank") == (3, 4)
    assert tokens(eos_token={"content": "stop"}, pad_token={"content": "blank", "special": True}) == (3, 4)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "blank", "pad_token": "stop"}')
    assert tokens(eos_token="stop") == (3, 3) and tokens() == (4, 3)
    assert Tokenizer.from_file(tmp_path, end_token="</s>").end_id == 1


def test_tokens_that_only_a_models_config_names(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json", "<unk>", "</s>", "<pad>", "stop", "blank")

    def tokens(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        tokenizer = Tokenizer.from_file(path)
        return tokenizer.end_id, tokenizer.pad_id, tokenizer.special_tokens.get("bos_token")

    assert tokens(eos_token_id=[3, 1], pad_token_id=4, bos_token_id=0) == (3, 4, "<unk>")
    assert tokens(eos_token_id=None, pad_token_id=99) == (1, 2, None)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "blank"}')
    assert tokens(eos_token_id=3) == (4, 2, None)


def test_what_came_with_a_tokenizer_goes_out(tmp_path):
    """Byte by byte, but for special tokens that the config names."""
    came, out, named = (tmp_path / name for name in ("came", "out", "named"))
    (came / "additional_chat_templates").mkdir(parents=True)
    word_tokenizer(came / "tokenizer.json", "<unk>", "</s>", "stop")
    files = {
        "tokenizer_config.json": '{"eos_token":  "</s>", "chat_template": "x", "model_max_length": 7}',
        "special_tokens_map.json": '{"eos_token": {"content": "</s>"}}',
        "merges.txt": "",
        "additional_chat_templates/tool.jinja": "y",
        "config.json": "{}",
    }
    for name, text in files.items():
        (came / name).write_text(text)
    Tokenizer.from_file(came).export(out)
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.*")}
    assert found == {name: (came / name).read_bytes() for name in ["tokenizer.json", *files] if name != "config.json"}

    Tokenizer.from_file(came, end_token="stop").export(named)
    assert Tokenizer.from_file(named).end_id == 2
    assert json.loads((named / "special_tokens_map.json").read_text()) == {"eos_token": "stop"}
    assert json.loads((named / "tokenizer_config.json").read_text())["model_max_length"] == 7


def test_a_tokenizer_that_came_from_no_file_is_written_whole(tmp_path):
    byte_tokenizer().export(tmp_path / "bytes")
    again = Tokenizer.from_file(tmp_path / "bytes")
    text = "".join(map(chr, range(0x180))) + " \u6f22 \n\n x"
    assert again.encode(text) == byte_tokenizer().encode(text) and again.decode(again.encode(text)) == text
    assert (again.vocab_size, again.pad_id, again.end_id) == (258, 256, 257)
    trained = train_bpe(["the cat sat"], vocab_size=262)
    trained.export(tmp_path / "trained")
    assert Tokenizer.from_file(tmp_path / "trained").encode("the cat") == trained.encode("the cat")


def test_errors_of_the_files_beside_a_tokenizer(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json", "<unk>", "</s>")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for content, message in {"{": "must be JSON in UTF-8", "[]": "must be a JSON object. Got list"}.items():
            (tmp_path / name).write_text(content)
            with pytest.raises(ValueError, match=f"{re.escape(name)}: {message}"):
                Tokenizer.from_file(path)
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</S>"}')
    message = r"tokenizer\.end_token: must be in .* Got '</S>'\..* It stands in the tokenizer_config\.json beside it"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_file(path)


def test_load_reads_texts_for_training_alone(tmp_path):
    def unread():
        raise AssertionError("read")
        yield ""

    path = word_tokenizer(tmp_path / "t.json", "<unk>", "</s>")
    assert load_tokenizer(TokenizerConfig(), unread()).name == "bytes"
    assert load_tokenizer(TokenizerConfig(kind="file", path=path), unread()).vocab_size == 2
    with pytest.raises(AssertionError, match="read"):
        load_tokenizer(TokenizerConfig(kind="train"), unread())
    assert load_tokenizer(TokenizerConfig(kind="train", vocab_size=260), ["aaaa aaaa aaaa"]).vocab_size == 260


def test_file_errors(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.path: must be an existing file\. Got '.*none\.json'\. Name"):
        Tokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.path: '.*bad\.json' is not a readable tokenizer\.json\. Got: "):
        Tokenizer.from_file(tmp_path / "bad.json")


def test_token_errors(tmp_path):
    path = word_tokenizer(tmp_path / "t.json", "<unk>", "<stop>", "a")
    with pytest.raises(ValueError, match=r"tokenizer\.end_token: .*t\.json has no token of a common name .*Set"):
        Tokenizer.from_file(path)
    with pytest.raises(ValueError, match=r"tokenizer\.end_token: must be in .*Got '<stopp>'\. Did you mean '<stop>'\?"):
        Tokenizer.from_file(path, end_token="<stopp>")
    with pytest.raises(ValueError, match=r"tokenizer\.pad_token: must be in the vocabulary .* Got 'qqq'\.$"):
        Tokenizer.from_file(path, end_token="<stop>", pad_token="qqq")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "file"}, "tokenizer.path: kind 'file' needs a path. Got ''. Name a tokenizer.json."),
        ({"path": "x.json"}, "tokenizer.path: only kind 'file' has one. Got 'x.json' with kind 'auto'. Leave it out"),
        (
            {"kind": "train", "end_token": "x"},
            "tokenizer.end_token: only kind 'file' has one. Got 'x' with kind 'train'.",
        ),
        (
            {"kind": "bytes", "pad_token": "x"},
            "tokenizer.pad_token: only kind 'file' has one. Got 'x' with kind 'bytes'.",
        ),
        ({"kind": "train", "vocab_size": 257}, "tokenizer.vocab_size: must be at least 258"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenizerConfig(**fields)


def test_train_bpe_needs_room_for_bytes():
    with pytest.raises(ValueError, match=r"train_bpe: vocab_size must be at least 258 .* Got 200\."):
        train_bpe(["a"], vocab_size=200)
