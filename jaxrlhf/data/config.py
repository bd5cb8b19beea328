"""The section `data` of a config, and the built-in tasks."""

import dataclasses
import datetime
import string
from collections.abc import Callable
from typing import Literal

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.data.arithmetic import ArithmeticConfig, arithmetic_rows
from jaxrlhf.require import require

AUTO = "auto"
"""A column that is recognized by its name (`jaxrlhf.data.columns`)."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Rows from a built-in task or from files; exactly one of the two is set.

    >>> DataConfig(path="rows.jsonl", eval_rows=64, chat="user").prompt_column
    'auto'
    """

    task: str = ""
    """The name of a built-in task."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """The options of task `arithmetic`."""
    path: str | tuple[str, ...] = ""
    """Rows for training: .jsonl, one object per line, or that as .jsonl.gz; .json, a list of objects; or .parquet. A
    file, a folder of them, a pattern, "data/*.parquet", or a list of these."""
    eval_path: str | tuple[str, ...] = ""
    """Files of held-out rows. Empty: `eval_rows` rows of `path`."""
    eval_rows: int = 512
    """The number of rows of `path` that are held out if `eval_path` is empty: the last ones of a fixed shuffle."""
    prompt_column: str = AUTO
    """The column of prompts: text or, in chats, lists of messages. `auto`, here and below: by its name. A name such as
    `extra_info.question` leads into nested columns."""
    completion_column: str = AUTO
    """The column of responses for supervised training: text or, in chats, lists of messages. Rows may lack it."""
    answer_column: str = AUTO
    """The column of right answers, which reward functions get as `answer`. Empty: there is none."""
    chosen_column: str = AUTO
    """The column of the preferred response, which is also the row's completion. In rows without it, the completion is
    the preferred response."""
    rejected_column: str = AUTO
    """The column of the other response. Rows may lack it."""
    text_column: str = AUTO
    """The column of texts that are learned from as a whole, by algorithms that take demonstrations. `auto`: `text`, in
    rows that have nothing else to learn from. Empty: there is none."""
    margin_column: str = ""
    """The column of the difference between the two, on the scale of a reward model's scores. Empty: there is none."""
    assistant_turns: Literal["last", "all"] = "last"
    """The assistant's messages of a chat that a demonstration is learned from: the last one, or all, with what stands
    between them as context. Of rows with a completion column of messages, `all` means those in it."""
    reply_marker: str = ""
    """If it is set, both columns hold whole dialogues: the prompt ends with the last marker, and the response follows
    it. "\\n\\nAssistant:" for HH-RLHF. In chats, the columns may hold lists of messages."""
    malformed: Literal["error", "drop"] = "error"
    """The treatment of pairs without two different replies to one prompt. Dropped rows are counted."""
    template: str = ""
    """A Python format string over the columns, "{question}\\nAnswer: ". Empty: the prompt column is used verbatim."""
    chat: Literal["auto", "none", "user", "messages"] = "auto"
    """`none`: a prompt is text. `user`: it is text that becomes a user's message, or a list of messages. `messages`: it
    is a list of {role, content}; where the last one is the assistant's, it is the row's completion. `auto`: `messages`
    if the prompts are lists, else `user` if completions are, else `none`."""
    chat_template: str = ""
    """Jinja text, a file of it, or the name of one of the tokenizer's. Empty: the tokenizer's default."""
    chat_date: str = "2024-07-26"
    """The date of `strftime_now` in chat templates, so that a run does not depend on the day."""
    system_prompt: str = ""
    """A system message for every row that does not begin with one."""
    tools_column: str = "tools"
    """The column with the functions that the assistant may call, for the chat template. Rows may lack it."""
    control_tokens: Literal["text", "allow"] = "text"
    """The encoding of control tokens of the tokenizer, such as <|im_end|>, in the text of a row. `text`: as the tokens
    that spell it. `allow`: as that control token. Templates always write control tokens."""
    max_prompt_tokens: int = 0
    """Columns of a prompt batch. 0: as many as the longest prompt has tokens."""
    overlong: Literal["error", "drop"] = "error"
    """The treatment of longer prompts, and of rows without completions that fit, if the algorithm needs completions.
    Dropped rows are counted."""

    def __post_init__(self) -> None:
        tasks = ", ".join(TASKS)
        if bool(self.task) == bool(self.path):
            raise ValueError(
                f"data: exactly one of task and path must be set. Got task={brief(self.task)} and "
                f"path={brief(self.path)}. Set data.task to a built-in task ({tasks}) or data.path to a JSONL or "
                "parquet file."
            )
        known = f"Known: {tasks}.{did_you_mean(self.task, TASKS)}"
        require(not self.task or self.task in TASKS, "data.task", "must be a built-in task", self.task, known)
        rule = "a built-in task holds out its own rows"
        require(not (self.task and self.eval_path), "data.eval_path", rule, self.eval_path, "Leave it out.")
        require(self.eval_rows >= 0, "data.eval_rows", "must not be negative", self.eval_rows)
        rule = "must be positive and below 2^31, or 0 for the longest prompt"
        require(0 <= self.max_prompt_tokens < 2**31, "data.max_prompt_tokens", rule, self.max_prompt_tokens)
        self._check_pairs()
        self._check_template()
        self._check_chat()
        self._check_text()

    def _check_text(self) -> None:
        if self.text_column in ("", AUTO):
            return
        plain = {"chat": "none", "chosen_column": "", "rejected_column": "", "completion_column": ""}
        plain |= dict.fromkeys(("template", "reply_marker", "prompt_column"), "")
        for field, value in plain.items():
            if getattr(self, field) not in (value, AUTO):
                raise ValueError(
                    f"data.text_column: rows of text have neither a prompt nor turns. Got {brief(self.text_column)} "
                    f"with data.{field}={brief(getattr(self, field))}. Leave one out."
                )

    def _check_pairs(self) -> None:
        columns = (self.completion_column, self.chosen_column, self.rejected_column)
        named = [name for name in columns if name not in ("", AUTO)]
        if len(set(named)) < len(named):
            raise ValueError(
                "data.completion_column, data.chosen_column, data.rejected_column: must be different columns. Got "
                f"{', '.join(map(brief, named))}. Set the one that there is not to ''."
            )
        rule = "must name the column of dialogues that data.reply_marker divides"
        require(bool(self.chosen_column or not self.reply_marker), "data.chosen_column", rule, self.chosen_column)
        if self.reply_marker and (self.template or self.chat not in ("auto", "none")):
            raise ValueError(
                f"data.reply_marker: dialogues that are text have no template. Got {brief(self.reply_marker)} with "
                f"data.template={brief(self.template)} and data.chat={self.chat!r}. Leave those out."
            )

    def _check_template(self) -> None:
        try:
            fields = template_fields(self.template)
        except ValueError as error:
            raise ValueError(
                f"data.template: must be a Python format string. Got {brief(self.template)}: {error}. Write a brace "
                "that is meant as such twice."
            ) from error
        names_columns = all(field and not field.isdigit() for field in fields) and bool(fields or not self.template)
        require(names_columns, "data.template", "must name columns, as in '{question}'", self.template)

    def _check_chat(self) -> None:
        remedy = "Set data.chat to 'messages', or leave it out."
        has_turns = self.assistant_turns == "last" or (self.chat != "none" and not self.reply_marker)
        require(has_turns, "data.assistant_turns", "only chats have several", self.assistant_turns, remedy)
        for field in ("chat_template", "system_prompt"):
            if self.chat == "none" and getattr(self, field):
                raise ValueError(
                    f"data.{field}: only chats have one. Got {brief(getattr(self, field))} with data.chat='none'. Set "
                    "data.chat to 'user' or 'messages', or leave it out."
                )
        remedy = "Leave it out, or set data.chat to 'user' to make a user's message of the filled template."
        is_plain = self.chat != "messages" or not self.template
        require(is_plain, "data.template", "a list of messages has none", self.template, remedy)
        try:
            datetime.date.fromisoformat(self.chat_date)
        except ValueError as error:
            raise ValueError(
                f"data.chat_date: must be a date such as '2024-07-26'. Got {brief(self.chat_date)}."
            ) from error


TASKS: dict[str, Callable[[DataConfig], tuple[list[dict[str, str]], list[dict[str, str]]]]] = {
    "arithmetic": lambda config: arithmetic_rows(config.arithmetic),
}
"""The built-in tasks: name -> (training rows, held-out rows)."""


def template_fields(template: str) -> list[str]:
    """The columns that a format string names. Raises ValueError if it is malformed."""
    return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
