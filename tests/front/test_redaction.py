"""Secrets are redacted in every encoding."""

import json
from urllib.parse import quote

import pytest

from operations.base.redaction import HIDDEN, Redactor

SECRET = 'p"ss/w rd\u00e9'


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        repr(SECRET),
        quote(SECRET),
        quote(SECRET, safe=""),
        f"https://user:{quote(SECRET, safe='')}@host/",
    ],
)
def test_a_secret_is_hidden_however_it_is_written(written: str) -> None:
    redacted = Redactor([SECRET]).redact(f"before {written} after")

    assert HIDDEN in redacted
    assert "ss/w" not in redacted
    assert "ss%2Fw" not in redacted
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")


@pytest.mark.requirement("R16")
def test_a_learned_token_is_hidden_without_its_scheme() -> None:
    redactor = Redactor()
    redactor.learn("Bearer abcdef")

    assert redactor.redact("token abcdef of Bearer") == "token *** of Bearer"
    assert redactor.redact_all({"abcdef": ["x abcdef", 1]}) == {"***": ["x ***", 1]}


def test_a_short_text_is_not_a_secret() -> None:
    assert Redactor(["abc", ""]).redact("abc") == "abc"
