"""Chats become the text that each family's template is known for; what is no chat says where it stands."""

import json
import re

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import decoders, models, pre_tokenizers

from jaxrlhf.data.chat import compile_template
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import PromptTable, load_prompts
from jaxrlhf.data.tokenizer import JSONTokenizer, TokenizerConfig

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
QUESTION = [{"role": "user", "content": " 1 < 2? "}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "1+1?"},
]


def render(template, messages, **special_tokens):
    compiled = compile_template(template, where="t", special_tokens=special_tokens, date="2024-07-26")
    return compiled.render(messages, source="x.jsonl:1")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            CHATML,
            QUESTION,
            "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n 1 < 2? <|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            CHATML,
            TALK,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
            "<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            QUESTION,
            "<s><|start_header_id|>user<|end_header_id|>\n\n1 < 2?<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\n",
        ),
        (
            LLAMA3,
            TALK,
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\n",
        ),
        (ZEPHYR, QUESTION, "<|user|>\n 1 < 2? </s>\n<|assistant|>\n"),
        (
            ZEPHYR,
            TALK,
            "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\n1+1?</s>\n"
            "<|assistant|>\n",
        ),
        (ALTERNATING, QUESTION, "<s>[INST]  1 < 2?  [/INST]"),
    ],
    ids=["chatml", "chatml-talk", "llama3", "llama3-talk", "zephyr", "zephyr-talk", "mistral"],
)
def test_well_known_templates(template, messages, expected):
    assert render(template, messages, bos_token="<s>", eos_token="</s>") == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}", "1 < 2?"),
        ("{%- if tools %}tools{% endif %}{{ missing }}none", "none"),
        ("{% if messages %}\n  {% set x = 1 %}\nx\n{% endif %}", "x\n"),
    ],
)
def test_what_templates_may_use(template, expected):
    assert render(template, QUESTION) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.append(1) }}", "x.jsonl:1: the chat template of t must take every conversation. Got access to"),
        ("{{ ''.__class__.__mro__ }}", "Got access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 / 0 }}", "Got division by zero for messages of user."),
        ("{{ messages[3].content.x }}", "has no element 3"),
        ("{{ raise_exception('No, thanks') }}", "Got No, thanks for messages of user."),
    ],
)
def test_what_templates_may_not_do(template, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render(template, QUESTION)


def test_a_template_that_is_no_jinja():
    with pytest.raises(ValueError, match=r"^t, line 2: must be a Jinja template\. Got Encountered unknown tag 'fro'"):
        render("\n{% fro x in messages %}", QUESTION)


# From files to tokens

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]


@pytest.fixture
def tokenizer(tmp_path):
    """Writes a byte-level tokenizer with special tokens, and what lies beside it; returns its config."""

    def make(chat_template=None, jinja=None, **settings):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        backend.add_special_tokens(SPECIAL)
        backend.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, **settings}
        config |= {"chat_template": chat_template} if chat_template is not None else {}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return TokenizerConfig(kind="file", path=str(tmp_path))

    return make


def load(tmp_path, tokenizer_config, *rows, **fields) -> PromptTable:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    fields = {"prompt_column": "messages", "chat": "messages", "eval_rows": 0, **fields}
    return load_prompts(DataConfig(path=str(path), **fields), tokenizer_config)


def test_special_tokens_of_a_chat_are_encoded_as_such_and_once(tmp_path, tokenizer):
    table = load(tmp_path, tokenizer("{{ bos_token }}" + CHATML), {"messages": [*TALK[:2]]})
    tokens = table.tokens[0].tolist()
    assert [t for t in tokens if t >= 256] == [256, 258, 259, 258, 259, 258]
    assert tokens[0] == 256 and table.tokenizer.decode(tokens).startswith("<s><|im_start|>system\nBe brief.")
    assert table.prompt(0).endswith("<|im_start|>assistant\n")
    assert table.columns(np.array([0])) == {"messages": [TALK[:2]]}


def test_the_last_message_of_the_assistant_is_the_completion(tmp_path, tokenizer):
    rows = [{"messages": TALK[:3]}, {"messages": TALK}, {"messages": TALK[:2], "completion": "Hey<|im_end|>"}]
    table = load(tmp_path, tokenizer(CHATML), *rows)
    assert table.prompt(0) == table.prompt(2) and table.prompt(1).count("<|im_start|>assistant") == 2
    ends = [None if tokens is None else table.tokenizer.decode(tokens) for tokens in table.completions]
    assert ends == ["Hello", None, "Hey"]
    assert [tokens.tolist().count(259) for tokens in table.completions if tokens is not None] == [1, 1]


def test_text_as_a_users_message_after_a_system_prompt(tmp_path, tokenizer):
    fields = {"chat": "user", "template": "{q}?", "system_prompt": "Be brief."}
    table = load(tmp_path, tokenizer(CHATML), {"q": "1+1"}, **fields)
    assert table.prompt(0) == render(CHATML, [TALK[0], {"role": "user", "content": "1+1?"}])
    same = load(tmp_path, tokenizer(CHATML), {"messages": TALK}, system_prompt="Be long.")
    assert same.prompt(0) == render(CHATML, TALK)


def test_messages_of_parquet(tmp_path, tokenizer):
    messages = [{**message, "tool_calls": None} for message in TALK[:2]]
    rows = [{"messages": messages}, {"messages": [{**messages[1], "tool_calls": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    shows = "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}!{% endif %}{% endfor %}"
    config = DataConfig(path=str(tmp_path / "x.parquet"), prompt_column="messages", chat="messages", eval_rows=0)
    assert load_prompts(config, tokenizer(shows)).prompts == ["Be brief.Hi", "Hi!"]


def test_where_a_template_comes_from(tmp_path, tokenizer):
    def prompt(config, **fields):
        return load(tmp_path, config, {"messages": QUESTION}, **fields).prompt(0)

    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert prompt(tokenizer("text")) == "text"
    assert prompt(tokenizer(named)) == "D"
    assert prompt(tokenizer(named), chat_template="tool_use") == "T"
    (tmp_path / "mine.jinja").write_text("{{ messages[0].role }}")
    assert prompt(tokenizer(named), chat_template=str(tmp_path / "mine.jinja")) == "user"
    assert prompt(tokenizer(named), chat_template="{{ eos_token }}") == "<|im_end|>"
    assert prompt(TokenizerConfig(), chat_template="{{ messages[0].content }}") == " 1 < 2? "
    assert prompt(tokenizer("text", jinja="beside")) == "beside"
    assert prompt(tokenizer(named, jinja="beside"), chat_template="tool_use") == "T"
    assert prompt(tokenizer(named)) == "beside"


def test_a_chat_is_the_same_on_every_day(tmp_path, tokenizer):
    table = load(tmp_path, tokenizer("{{ strftime_now('%Y') }}"), {"messages": TALK}, chat_date="2030-01-02")
    assert table.prompt(0) == "2030"


def test_a_saved_tokenizer_keeps_its_end_and_its_template(tmp_path, tokenizer):
    given = JSONTokenizer.from_file(tokenizer(CHATML, pad_token="<pad>").path)
    (tmp_path / "saved").mkdir()
    given.save(tmp_path / "saved" / "tokenizer.json")
    again = JSONTokenizer.from_file(tmp_path / "saved")
    assert (again.end_id, again.pad_id) == (given.end_id, given.pad_id) == (259, 260)
    assert again.chat_templates == given.chat_templates == {"default": CHATML}
    assert again.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}


MESSAGES = "messages"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, "x.jsonl:1: must have the column 'messages'. Got other. Set data.prompt_column."),
        ({MESSAGES: "Hi"}, "x.jsonl:1: messages must be a list of messages, {role, content}. Got 'Hi'. Set data.chat"),
        ({MESSAGES: []}, "x.jsonl:1: messages must hold at least one message. Got []."),
        ({MESSAGES: ["Hi"]}, "x.jsonl:1: messages[0] must be a message, {role, content}. Got 'Hi'."),
        (
            {MESSAGES: [*QUESTION, {"role": "user"}]},
            "x.jsonl:1: messages[1] must have a content of text. Got only role.",
        ),
        ({MESSAGES: [{"content": "x"}]}, "x.jsonl:1: messages[0] must have a role of text. Got only content."),
        ({MESSAGES: [{}]}, "x.jsonl:1: messages[0] must have a role of text. Got only nothing."),
        ({MESSAGES: [{"role": 1, "content": "x"}]}, "x.jsonl:1: messages[0] must have a role of text. Got 1."),
        ({MESSAGES: [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0] must have a content of text. Got [{"),
        ({MESSAGES: TALK[2:3]}, "x.jsonl:1: messages must hold a message before the assistant's. Got only that."),
        ({MESSAGES: [{"role": "user", "content": "\ud800"}]}, "x.jsonl:1: messages[0] must be valid Unicode"),
        (
            {MESSAGES: TALK[:3], "completion": "x"},
            "x.jsonl:1: a completion is given once. Got an assistant's last message and the column 'completion'.",
        ),
        (
            {MESSAGES: TALK[1:2] * 2},
            "x.jsonl:1: the chat template of {tmp}/tokenizer.json must take every conversation. Got Conversation roles "
            "must alternate user/assistant/user/assistant/... for messages of user, user.",
        ),
    ],
)
def test_rows_that_are_no_chats(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=re.escape(message.replace("{tmp}", str(tmp_path)))):
        load(tmp_path, tokenizer(ALTERNATING), row)


def test_a_chat_that_renders_to_nothing(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"x\.jsonl:1: the rendered chat must not be empty\."):
        load(tmp_path, tokenizer(""), {"messages": QUESTION})


def test_no_template(tmp_path, tokenizer):
    row = {"messages": QUESTION}
    with pytest.raises(ValueError, match=r"data\.chat_template: a chat needs .* the tokenizer bytes has none\. Set"):
        load(tmp_path, TokenizerConfig(), row)
    named = [{"name": "tool_use", "template": "T"}]
    with pytest.raises(ValueError, match=r"data\.chat_template: a chat needs a template\. .* has only tool_use\."):
        load(tmp_path, tokenizer(named), row)
    with pytest.raises(ValueError, match=r"data\.chat_template: must be .* Got 'tol_use'\. Did you mean 'tool_use'\?"):
        load(tmp_path, tokenizer(named), row, chat_template="tol_use")
    with pytest.raises(ValueError, match=r"data\.chat_template, line 1: must be a Jinja template"):
        load(tmp_path, tokenizer(named), row, chat_template="{% if")
    for wrong in (3, [3], [{"name": "default"}], {"default": "x"}):
        with pytest.raises(ValueError, match=r"tokenizer_config\.json beside .*: chat_template must be text or a list"):
            load(tmp_path, tokenizer(wrong), row)


def test_messages_where_text_is_expected(tmp_path, tokenizer):
    with pytest.raises(
        ValueError, match=r"messages must be a string\. Got \[\{'role': .* Set data\.chat to 'messages'"
    ):
        load(tmp_path, tokenizer(CHATML), {"messages": QUESTION}, chat="none")
