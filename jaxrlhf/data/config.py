"""What a user can say about data, and the built-in tasks."""

import dataclasses
import datetime
import string
from collections.abc import Callable
from typing import Literal

from jaxrlhf.brief import brief
from jaxrlhf.data.arithmetic import ArithmeticConfig, arithmetic_rows
from jaxrlhf.suggest import did_you_mean


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the rows come from: a built-in task or a file, exactly one of them."""

    task: str = ""
    """The name of a built-in task."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """The options of task `arithmetic`."""
    path: str | tuple[str, ...] = ""
    """Rows for training: .jsonl, one object per line, or that as .jsonl.gz; .json, a list of objects; or .parquet. A
    file, a folder of them, a pattern, "data/*.parquet", or a list of these."""
    eval_path: str | tuple[str, ...] = ""
    """Rows held out, in the same way. Empty: `eval_rows` rows of `path`."""
    eval_rows: int = 512
    """How many rows of `path` are held out where `eval_path` is empty: the last ones of a fixed shuffle."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    """The responses that supervised training learns from. Rows may lack it."""
    chosen_column: str = "chosen"
    """Of two responses the preferred one. It is the row's completion, too. Rows may lack it: then their completion is
    the preferred one."""
    rejected_column: str = "rejected"
    """The other one. Rows may lack it."""
    margin_column: str = ""
    """By how much the first was preferred, on the scale of a reward model's scores. Empty: nobody said."""
    reply_marker: str = ""
    """Where it is set, both columns hold whole dialogues, of which the prompt is what goes up to the last marker, with
    it, and the response what follows: "\\n\\nAssistant:" for HH-RLHF. In chats, they may hold lists of messages."""
    malformed: Literal["error", "drop"] = "error"
    """What is done about a pair without two different replies to one prompt. Dropped rows are counted."""
    template: str = ""
    """A Python format string over the columns, "{question}\\nAnswer: ". Empty: the prompt column as it is."""
    chat: Literal["none", "user", "messages"] = "none"
    """`none`: a prompt is text. `user`: it is text that becomes a user's message. `messages`: the prompt column holds
    a list of {role, content}; where the last one is the assistant's, it is the row's completion."""
    chat_template: str = ""
    """Jinja text, a file of it, or the name of one of the tokenizer's. Empty: the tokenizer's default."""
    chat_date: str = "2024-07-26"
    """What chat templates take for today (`strftime_now`), so that a run is the same on every day."""
    system_prompt: str = ""
    """A system message before the messages of every row that begins with none."""
    tools_column: str = "tools"
    """The column with the functions that the assistant may call, for the chat template. Rows may lack it."""
    control_tokens: Literal["text", "allow"] = "text"
    """How a control token of the tokenizer, such as <|im_end|>, is read in the text of a row. `text`: as the tokens
    that spell it. `allow`: as that control token. Those that templates write are control tokens in either case."""
    max_prompt_tokens: int = 0
    """Columns of a prompt batch. 0: as many as the longest prompt has tokens."""
    overlong: Literal["error", "drop"] = "error"
    """What is done about a longer prompt, and about a row without completions that fit, where the algorithm needs
    them. Dropped rows are counted."""

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.path):
            raise ValueError(
                f"data: exactly one of task and path must be set. Got task={brief(self.task)} and "
                f"path={brief(self.path)}. Set "
                f"data.task to a built-in task ({', '.join(TASKS)}) or data.path to a JSONL or parquet file."
            )
        if self.task and self.task not in TASKS:
            raise ValueError(
                f"data.task: must be a built-in task. Got {brief(self.task)}. Known: {', '.join(TASKS)}."
                f"{did_you_mean(self.task, TASKS)}"
            )
        if self.task and self.eval_path:
            raise ValueError(
                f"data.eval_path: a built-in task holds out its own rows. Got {brief(self.eval_path)} with "
                f"task={brief(self.task)}. Leave it out."
            )
        if self.eval_rows < 0:
            raise ValueError(f"data.eval_rows: must not be negative. Got {self.eval_rows}.")
        if not 0 <= self.max_prompt_tokens < 2**31:
            raise ValueError(
                "data.max_prompt_tokens: must be positive and below 2^31, or 0 for the longest prompt. Got "
                f"{self.max_prompt_tokens}."
            )
        for field in ("overlong", "malformed"):
            if getattr(self, field) not in ("error", "drop"):
                raise ValueError(f"data.{field}: must be 'error' or 'drop'. Got {brief(getattr(self, field))}.")
        if self.control_tokens not in ("text", "allow"):
            raise ValueError(f"data.control_tokens: must be 'text' or 'allow'. Got {brief(self.control_tokens)}.")
        self._check_pairs()
        self._check_template()
        self._check_chat()

    def _check_pairs(self) -> None:
        named = [name for name in (self.completion_column, self.chosen_column, self.rejected_column) if name]
        if len(set(named)) < len(named):
            raise ValueError(
                "data.completion_column, data.chosen_column, data.rejected_column: must be different columns. Got "
                f"{', '.join(map(brief, named))}. Set the one that there is not to ''."
            )
        if not self.reply_marker:
            return
        if not self.chosen_column:
            raise ValueError(
                "data.chosen_column: must name the column of dialogues that data.reply_marker divides. Got ''."
            )
        if self.template or self.chat != "none":
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
        if not all(fields) or any(field.isdigit() for field in fields) or (self.template and not fields):
            raise ValueError(f"data.template: must name columns, as in '{{question}}'. Got {brief(self.template)}.")

    def _check_chat(self) -> None:
        if self.chat not in ("none", "user", "messages"):
            raise ValueError(f"data.chat: must be 'none', 'user' or 'messages'. Got {brief(self.chat)}.")
        for field in ("chat_template", "system_prompt"):
            if self.chat == "none" and getattr(self, field):
                raise ValueError(
                    f"data.{field}: only chats have one. Got {brief(getattr(self, field))} with data.chat='none'. Set "
                    "data.chat to 'user' or 'messages', or leave it out."
                )
        if self.chat == "messages" and self.template:
            raise ValueError(
                f"data.template: a list of messages has none. Got {brief(self.template)} with data.chat='messages'. "
                "Leave it out, or set data.chat to 'user' to make a user's message of the filled template."
            )
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
    """The columns that a format string names. ValueError where it is malformed."""
    return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
