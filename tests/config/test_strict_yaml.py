"""YAML's traps are errors or absent, and what is written reads back."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrlhf.config.strict_yaml import ConfigError, parse, to_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e+3", 1000.0),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("1_000_000", 1_000_000),
        ("+2", 2),
        ("0", 0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("'1e-3'", "1e-3"),
        ("'off'", "off"),
        ("true", True),
        ("False", False),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("{a: [1, {b: c}]}", {"a": [1, {"b": "c"}]}),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
        ("!!str 5", "5"),
        ("{'<<': 1}", {"<<": 1}),
    ],
)
def test_values(text, value):
    parsed = parse(text, where="x.yaml")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 2\n  c: 3", r"x.yaml, line 4, column 3: key 'c' is given twice\. Remove one\."),
        ("a: off", r"x.yaml, line 1, column 4: off is ambiguous in YAML\. Write true or false, or 'off' in quotes for"),
        ("yes: 1", r"x.yaml, line 1, column 1: yes is ambiguous in YAML"),
        ("3: a", r"x.yaml, line 1, column 1: a key must be text\. Got 3\. Put it in quotes\."),
        ("? [a]\n: b", r"x.yaml, line 1, column 3: a key must be text\. Got \['a'\]"),
        ("a: [1", r"x.yaml, line 1, column 6: expected ',' or ']'"),
        ("a: b: c", r"x.yaml, line 1, column 5: mapping values are not allowed here\."),
        ("a: !!python/object:os.system x", r"x.yaml, line 1, column 4: could not determine a constructor"),
        ("a: !!timestamp x", r"x.yaml, line 1, column 4: could not determine a constructor"),
        ("a: !!map []", r"x.yaml, line 1, column 4: expected a mapping\."),
        ("a: !!bool maybe", r"x.yaml, line 1, column 4: maybe is ambiguous"),
        ("a: !!int x", r"x.yaml: not valid YAML: invalid literal for int"),
        ("a: &x [*x]", r"x.yaml, line 1, column 4: found unconstructable recursive node\."),
        ("--- 1\n--- 2", r"x.yaml, line 2, column 1: but found another document\."),
        ("a: \x01", r"x.yaml: not valid YAML: unacceptable character"),
        ("1" * 5000, r"x.yaml: not valid YAML: Exceeds the limit"),
        ("[" * 5000, r"x.yaml: nested too deeply\."),
    ],
)
def test_errors(text, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse(text, where="x.yaml")


def test_aliases_stand_for_so_much_and_no_more():
    rows = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "a0: &a0 [1]" for i in range(12)]
    assert len(parse("\n".join(rows[:5]), where="x.yaml")["a4"]) == 9
    with pytest.raises(
        ConfigError, match=r"^x\.yaml: must hold at most 100,000 keys and values, aliases .* Got [\d,]+\."
    ):
        parse("\n".join(rows), where="x.yaml")
    with pytest.raises(ConfigError, match=r"^x\.yaml: must hold at most 100,000 keys"):
        parse(f"[{'1, ' * 100_000}]", where="x.yaml")


@pytest.mark.parametrize(
    "text",
    ["{word}: 1\n{word}: 2", "[{word}]: 1", "!!bool {word}", "!!int {word}", "!!float {word}", "!{word} 1", "*{word}"],
)
def test_what_is_long_is_not_echoed_whole(text):
    with pytest.raises(ConfigError, match=r"^x\.yaml") as raised:
        parse(text.format(word="x" * 900), where="x.yaml")
    assert len(str(raised.value)) < 600


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["on", "no", "null", "~", "1e-3", "010", "1:30", "2024-01-01", ".inf", "<<", "=", "- a", "a: b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@hypothesis.given(TREES)
@hypothesis.example(["\x85", "\u2028", "\ud800", "é"])
def test_what_is_written_reads_back(tree):
    assert parse(to_text(tree), where="x.yaml") == tree


@hypothesis.given(st.text() | st.text("ab12.:-[]{}'\"#&*!|>?% \n\te"))
def test_any_text_is_a_value_or_a_config_error(text):
    try:
        parse(text, where="x.yaml")
    except ConfigError as error:
        assert str(error).startswith("x.yaml")
