"""Names that are taken as they are, and names that would lead elsewhere or be taken apart."""

import re

import pytest

from jaxrlhf.name_rules import MAX_BYTES, check_file_name, check_metric_name, check_name

LONG = "x" * (MAX_BYTES + 1)


@pytest.mark.parametrize("name", ["actor", "reward_model-2", "_x", "7b", "r\u00e9compense", "x" * MAX_BYTES])
def test_names_of_roles(name):
    check_name(name, "roles")


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("../../X", "X"),
        ("/etc/passwd", "etc_passwd"),
        ("actor.base", "actor_base"),
        ("a#2", "a_2"),
        ("a\n", "a"),
        ("-x", "x"),
        ("..", "actor"),
        ("", "actor"),
        ("\ud800", "actor"),
        (LONG, "x" * 40),
    ],
)
def test_what_is_no_name_of_a_role(name, usable):
    with pytest.raises(ValueError, match=rf"^roles: a name must be of letters, .* Got .*\. Write {usable}, say\.$"):
        check_name(name, "roles")


@pytest.mark.parametrize("name", ["ppo math (2)", "model-00001-of-00002.safetensors", "a..b"])
def test_names_of_files(name):
    check_file_name(name, "here", example="x")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "a/b", "/a", "a\\b", "c:x", "a\0", "a\n", "\ud800", LONG])
def test_what_is_no_name_of_a_file(name):
    with pytest.raises(ValueError, match=r"^here: must be a plain file name, such as 'x'\. Got "):
        check_file_name(name, "here", example="x")


@pytest.mark.parametrize("name", ["loss", "actor/loss", "perf/actor.train#2", "eval/pass@4", "a: b [c] (-1)"])
def test_names_of_metrics(name):
    check_metric_name(name)


@pytest.mark.parametrize(
    "name", ["", "/loss", "a//b", "a/", "../loss", "a/../b", "a/.", "a\\b", "a\nb", "\ud800", LONG]
)
def test_what_is_no_name_of_a_metric(name):
    with pytest.raises(ValueError, match=rf"^Metric {re.escape(repr(name)[:9])}.*: a name must be group/name"):
        check_metric_name(name)
