"""Chats become the text that each family's template is known for; what is no chat says where it stands."""

import codecs
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

from jaxrlhf.data import chat_process, chat_rendering
from jaxrlhf.data.chat_process import ChatTemplate, Conversation, render_chats
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import PromptTable, load_prompts
from jaxrlhf.data.tokenizer import Tokenizer, TokenizerConfig
from tests.data.test_control_tokens import byte_level

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
    """Renders messages in this process, as the rendering process does."""
    return chat_rendering.render(chat_rendering.compile_template(template, "2024-07-26"), messages, special_tokens)


def render_apart(template, *conversations):
    """In that process."""
    places = [Conversation(f"x.jsonl:{line}", messages) for line, messages in enumerate(conversations, start=1)]
    return render_chats(ChatTemplate("t", template, {}, "2024-07-26"), places)


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
        render_apart(template, QUESTION)


def test_a_template_that_is_no_jinja():
    with pytest.raises(ValueError, match=r"^t, line 2: must be a Jinja template\. Got Encountered unknown tag 'fro'"):
        render_apart("\n{% fro x in messages %}", QUESTION)


FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
IN_MEMORY = "x.jsonl:2: the chat template of t must make do with 512 MiB of memory. Got more. Set data.chat_template to"
IN_TIME = "must take at most 0.05 s of CPU time for a conversation, and 10.04 s for these 2. Got more."


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FOR_EVER, f"x.jsonl:2: the chat template of t {IN_TIME}"),
        ("{{ 10 ** (10 ** 8) }}", f"t: it {IN_TIME}"),  # folded, as a constant
        (DOUBLED, IN_MEMORY),
        ("{{ messages[0].content * 10 ** 10 }}", IN_MEMORY),
        ("{{ 'a' * 10 ** 10 }}", IN_MEMORY),
        ("{{ '%10000000000d' | format(1) }}", IN_MEMORY),
        (
            "{{ messages[0].content * 100000 }}",
            "must add at most 100000 characters to 10 times those of a conversation. Got a longer text.",
        ),
        ("{{ raise_exception(messages[0].content * 10 ** 6) }}", "Got  1 < 2?  1 < 2?"),
    ],
    ids=["loops", "a power", "doubles", "times", "constant", "format", "long", "long error"],
)
def test_a_template_without_bounds_ends_in_one_line(template, message, monkeypatch):
    if "CPU" in message:
        monkeypatch.setattr(chat_process, "SECONDS", 0.05)
    if not message.startswith("t: "):
        template = "{% if messages | length == 1 %}" + template + "{% endif %}"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        render_apart(template, TALK, QUESTION)
    assert len(str(caught.value)) < 600
    assert render_apart(CHATML, QUESTION) == [render(CHATML, QUESTION)]


def test_all_conversations_together_have_a_limit_too(monkeypatch):
    monkeypatch.setattr(chat_process, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(chat_process, "SECONDS_EACH", 0.0)
    some = "{% for i in range(20000) %}{% endfor %}"
    assert render_apart(some, QUESTION) == [""]
    with pytest.raises(ValueError, match=r"x\.jsonl:\d+: .* of CPU time for a conversation, and 0\.02 s for these 600"):
        render_apart(some, *[QUESTION] * 600)


def test_the_process_imports_nothing_heavy():
    imports = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", imports, chat_rendering.__file__], capture_output=True, text=True)
    assert "jinja2.sandbox" in done.stdout.split()
    assert not {"jax", "numpy", "jaxrlhf"}.intersection(done.stdout.split())


# From files to tokens

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]


@pytest.fixture
def tokenizer(tmp_path):
    """Writes a byte-level tokenizer with special tokens, and what lies beside it; returns its config."""

    def make(chat_template=None, jinja=None, **settings):
        backend = byte_level(SPECIAL)
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
    assert table.prompts[0].endswith("<|im_start|>assistant\n")
    assert table.columns(np.array([0])) == {"messages": [TALK[:2]]}


def test_the_last_message_of_the_assistant_is_the_completion(tmp_path, tokenizer):
    rows = [{"messages": TALK[:3]}, {"messages": TALK}, {"messages": TALK[:2], "completion": "Hey<|im_end|>"}]
    table = load(tmp_path, tokenizer(CHATML), *rows)
    assert table.prompts[0] == table.prompts[2] and table.prompts[1].count("<|im_start|>assistant") == 2
    ends = [None if tokens is None else table.tokenizer.decode(tokens) for tokens in table.completions]
    assert ends == ["Hello", None, "Hey"]
    assert [tokens.tolist().count(259) for tokens in table.completions if tokens is not None] == [1, 1]


def test_text_as_a_users_message_after_a_system_prompt(tmp_path, tokenizer):
    fields = {"chat": "user", "template": "{q}?", "system_prompt": "Be brief."}
    table = load(tmp_path, tokenizer(CHATML), {"q": "1+1"}, **fields)
    assert table.prompts[0] == render(CHATML, [TALK[0], {"role": "user", "content": "1+1?"}])
    same = load(tmp_path, tokenizer(CHATML), {"messages": TALK}, system_prompt="Be long.")
    assert same.prompts[0] == render(CHATML, TALK)


def test_messages_of_parquet(tmp_path, tokenizer):
    messages = [{**message, "tool_calls": None} for message in TALK[:2]]
    rows = [{"messages": messages}, {"messages": [{**messages[1], "tool_calls": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    shows = "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}!{% endif %}{% endfor %}"
    config = DataConfig(path=str(tmp_path / "x.parquet"), prompt_column="messages", chat="messages", eval_rows=0)
    assert load_prompts(config, tokenizer(shows)).prompts == ["Be brief.Hi", "Hi!"]


# Tools, and contents in parts

WITH_TOOLS = """{%- macro shown(tool) %}{{ tool | tojson(indent=4) }}{% endmacro %}
{%- if tools is not none %}
    {%- for tool in tools %}{{- shown(tool) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '<call>' + call.name + ' ' + (call.arguments | tojson) + '</call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<answer>' + message.content + ' of ' + message.name + '</answer>' }}
    {%- else %}
        {{- message.role + ': ' + message.content }}
    {%- endif %}
{%- endfor %}"""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?", "image_url": None}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
]
EXPECTED = '{\n    "name": "add"\n}user: 1+1?<call>add {"a": 1}</call><answer>2 of add</answer>'


def test_tools_and_their_calls_go_through_the_template(tmp_path, tokenizer):
    row = {"messages": CALLED, "tools": [{"name": "add"}]}
    assert load(tmp_path, tokenizer(WITH_TOOLS), row).prompts == [EXPECTED]
    assert load(tmp_path, tokenizer(WITH_TOOLS), {**row, "tools": '[{"name": "add"}]'}).prompts == [EXPECTED]
    renamed = {"messages": [*CALLED, {"role": "assistant", "content": ["It is ", "2."]}], "functions": row["tools"]}
    table = load(tmp_path, tokenizer(WITH_TOOLS), renamed, tools_column="functions")
    assert table.prompts == [EXPECTED] and table.completions[0] is not None
    assert table.tokenizer.decode(table.completions[0].tolist()) == "It is 2."
    assert load(tmp_path, tokenizer(CHATML), {"messages": CALLED[2:]}).prompts[0].count("tool\n2<|im_end|>") == 1


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (
            CHATML,
            {"messages": CALLED},
            "x.jsonl:1: the chat template of {tmp}/tokenizer.json must read tool_calls. Got tool_calls in message 1, "
            "which it would leave out. Set data.chat_template to one that knows tools",
        ),
        (CHATML, {"messages": QUESTION, "tools": [{}]}, "must read tools. Got tools, which it would leave out."),
        (
            ZEPHYR,
            {"messages": [*QUESTION, CALLED[2]]},
            "must write out messages of the role tool. Got one as message 1, which it leaves out. Set",
        ),
        (
            WITH_TOOLS,
            {"messages": CALLED[:2]},
            "x.jsonl:1: messages: an assistant's last message, which is the completion, must be text alone. Got",
        ),
        (
            WITH_TOOLS,
            {"messages": QUESTION, "tools": "add"},
            "x.jsonl:1: tools must be a list of JSON objects, each of which describes a function. Got 'add'. Set",
        ),
    ],
    ids=["calls", "tools", "answers", "completion", "no tools"],
)
def test_tools_that_would_be_lost_or_are_none(tmp_path, tokenizer, template, row, message):
    with pytest.raises(ValueError, match=re.escape(message.replace("{tmp}", str(tmp_path)))):
        load(tmp_path, tokenizer(template), row)


def test_where_a_template_comes_from(tmp_path, tokenizer):
    def prompt(config, **fields):
        return load(tmp_path, config, {"messages": QUESTION}, **fields).prompts[0]

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
    mark = codecs.BOM_UTF8
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(mark + (tmp_path / name).read_bytes())
    assert prompt(TokenizerConfig(kind="file", path=str(tmp_path))) == "beside"


def test_a_chat_is_the_same_on_every_day(tmp_path, tokenizer):
    table = load(tmp_path, tokenizer("{{ strftime_now('%Y') }}"), {"messages": TALK}, chat_date="2030-01-02")
    assert table.prompts[0] == "2030"


def test_a_saved_tokenizer_keeps_its_end_and_its_template(tmp_path, tokenizer):
    given = Tokenizer.from_file(tokenizer(CHATML, pad_token="<pad>").path)
    (tmp_path / "saved").mkdir()
    given.save(tmp_path / "saved" / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "saved")
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
        (
            {MESSAGES: [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            "x.jsonl:1: messages[0].content[1] must be text, {type: text, text: ...}. Got a part of type 'image_url'.",
        ),
        ({MESSAGES: [{"role": "user", "content": [{"text": 1}]}]}, "content[0] must be text, {type: text, text: ...}."),
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
