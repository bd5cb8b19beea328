"""The tokenizer of a run whose roles start from folders."""

import json
import re
from pathlib import Path

import pytest
import tokenizers

from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.rows import load_tables
from jaxrlhf.configured.tokenizer import tokenizer_notes
from jaxrlhf.data.tokenizer import TokenizerConfig
from tests.small_run import write_run


@pytest.fixture(autouse=True)
def beside_a_run(tmp_path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def model_folder(name: str, *tokens: str, **settings: str) -> None:
    """A folder of a model, with a tokenizer of whole words where any are given."""
    Path(name).mkdir()
    (Path(name) / "config.json").write_text("{}")
    if tokens:
        words = tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
        tokenizers.Tokenizer(words).save(f"{name}/tokenizer.json")
        (Path(name) / "tokenizer_config.json").write_text(json.dumps(settings))


def tokenizer(*overrides: str):
    start = ["roles.actor={init: actor_folder, optimizer: {}}", *overrides]
    return load_tables(load_run("run.yaml", start)).main.tokenizer


JUDGE = "roles.judge={init: judge_folder, head: scalar}"


def test_it_is_that_of_the_folder_unless_the_config_names_another():
    model_folder("actor_folder", "<unk>", "</s>", "stop", eos_token="stop", chat_template="{{ messages }}")
    found = tokenizer()
    assert found.name == "actor_folder/tokenizer.json"
    assert (found.vocab_size, found.end_id, found.chat_templates["default"]) == (3, 2, "{{ messages }}")
    assert tokenizer("tokenizer.end_token=</s>").end_id == 1
    assert tokenizer("tokenizer.kind=bytes").name == "bytes"
    Path("other.json").write_bytes(Path("actor_folder/tokenizer.json").read_bytes())
    assert tokenizer("tokenizer={kind: file, path: other.json}").name == "other.json"


def test_without_a_folder_it_is_bytes():
    assert load_tables(load_run("run.yaml")).main.tokenizer.name == "bytes"
    with pytest.raises(ValueError, match=r"tokenizer\.end_token: only kind 'file' has one\. Got 'x' with kind 'bytes'"):
        load_tables(load_run("run.yaml", ["tokenizer.end_token=x"]))
    assert load_run("run.yaml").tokenizer == TokenizerConfig()


def test_a_folder_without_one_is_refused_unless_the_config_names_one():
    model_folder("actor_folder")
    message = (
        "roles.actor.init: the folder must have a tokenizer.json, since the config names no tokenizer. Got config.json "
        "in actor_folder. Add it (transformers makes one: AutoTokenizer.from_pretrained, then save_pretrained), set "
        "tokenizer to {kind: file, path: ...}, or to {kind: bytes} for a model of bytes."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer()
    assert tokenizer("tokenizer.kind=bytes").name == "bytes"


def test_folders_of_one_vocabulary_go_together():
    model_folder("actor_folder", "<unk>", "</s>", "a")
    model_folder("judge_folder", "<unk>", "</s>", "a", "added", chat_template="of its own")
    assert tokenizer(JUDGE).name == "actor_folder/tokenizer.json"


@pytest.mark.parametrize("overrides", [[], ["tokenizer={kind: file, path: actor_folder}"]], ids=["auto", "named"])
@pytest.mark.parametrize(
    ("tokens", "differs"),
    [
        (("<unk>", "</s>", "b"), "token 2, which is 'b' in judge_folder and 'a' in actor_folder"),
        (("</s>", "<unk>", "a"), "'(<unk>|</s>)', which is [01] in judge_folder and [01] in actor_folder"),
    ],
)
def test_roles_of_different_vocabularies_are_refused(overrides, tokens, differs):
    model_folder("actor_folder", "<unk>", "</s>", "a")
    model_folder("judge_folder", *tokens)
    message = (
        rf"roles\.judge\.init: all roles must share one vocabulary.* Got {differs}, where actor starts\. Let both start"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer("roles.judge={init: judge_folder}", *overrides)
    assert tokenizer(JUDGE, *overrides).name == "actor_folder/tokenizer.json", "a scorer reads its own tokens"


def test_a_damaged_one_is_named():
    model_folder("actor_folder", "<unk>", "</s>", "a")
    model_folder("judge_folder", "<unk>", "</s>", "a")
    Path("judge_folder/tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"judge_folder/tokenizer\.json: must be a readable tokenizer\.json\. Got: "):
        tokenizer(JUDGE)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_tokenizer_without_the_token_at_which_the_model_ends_a_text_is_of_another(file):
    model_folder("actor_folder", "<unk>", "</s>", "a", eos_token="</s>")
    Path(f"actor_folder/{file}").write_text('{"eos_token_id": [2, 1]}')
    assert tokenizer().end_id == 1
    Path(f"actor_folder/{file}").write_text('{"eos_token_id": [1, 128009]}')
    message = (
        f"actor_folder/{file}: eos_token_id: must be tokens of the tokenizer.json beside it. Got 128009, and 3 "
        "tokens up to 2. That file is of another model: download the folder again."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer()
    assert tokenizer("tokenizer.kind=bytes").name == "bytes"


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": null}', '{"eos_token_id": "x"}'])
def test_a_generation_config_that_says_nothing_of_ends(text):
    model_folder("actor_folder", "<unk>", "</s>", "a", eos_token="</s>")
    Path("actor_folder/generation_config.json").write_text(text)
    assert tokenizer().end_id == 1


def test_a_tokenizer_that_contradicts_the_weights_is_refused():
    model_folder("actor_folder", "<unk>", "</s>", "a")
    model_folder("other_folder", "<unk>", "</s>", "b")
    message = (
        r"tokenizer\.path: must have the vocabulary of the model.* Got token 2, which is 'b' in other_folder and 'a' "
        r"in actor_folder, where actor starts\. Leave tokenizer out"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer("tokenizer={kind: file, path: other_folder}")


def test_bytes_over_a_model_with_a_tokenizer_are_noted():
    model_folder("actor_folder", "<unk>", "</s>", "a")
    run = load_run("run.yaml", ["roles.actor={init: actor_folder, optimizer: {}}", "tokenizer.kind=bytes"])
    (note,) = tokenizer_notes(run)
    assert "tokenizer.kind is bytes, while actor_folder has a tokenizer of its own" in note
    assert tokenizer_notes(load_run("run.yaml", ["tokenizer.kind=bytes"])) == []


@pytest.mark.parametrize("override", ["model=nowhere", "roles.actor={init: nowhere}", "roles.actor={optimizer: {}}"])
def test_a_model_that_is_not_there_is_said_before_the_data_is_read(override):
    message = r"actor\.init: must be .* Got 'nowhere', which is no folder\. Download|roles\.actor: a role needs a model"
    with pytest.raises(ValueError, match=message):
        load_tables(load_run("run.yaml", ["roles.actor={}", "data={path: nothing.jsonl}", override]))
