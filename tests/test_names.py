"""The escape of names: reversible, different for different names, and nothing changes in ordinary ones."""

import os
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from secu.base.names import HANDLER, escape, escape_text, unescape

ANY = st.characters(codec=None, categories=None)  # lone surrogates, control characters and everything else
TRICKY = st.sampled_from(["\\", "x", "u", "U", "f", "0", "5c", "\udcff", "\\xff", "\\u200d", "\\U0001f600", "\n", "é"])
NAMES = st.lists(ANY | TRICKY, max_size=12).map("".join)


@given(NAMES)
@example("\\xff")
@example("\udcff")
@example("\\\\xff")
@example("\\\udcff")
@example("\x80\udc80")
def test_a_name_is_restored(name):
    for write in (escape, escape_text):
        assert unescape(write(name)) == name
        write(name).encode()
    assert escape(name).isprintable()


@given(NAMES, NAMES)
def test_different_names_are_written_differently(one, other):
    assert (escape(one) == escape(other)) == (one == other)


@given(st.binary(max_size=12))
def test_every_file_name_is_restored_to_its_bytes(content):
    assert os.fsencode(unescape(escape(os.fsdecode(content)))) == content


@given(st.text(st.sampled_from(string.printable[:95] + "éß猫😀"), max_size=20))
def test_ordinary_names_stay_as_they_are(name):
    plain = name.replace("\\", "/")
    assert escape(plain) == plain


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (os.fsdecode(b"a\xff.png"), "a\\xff.png"),
        ("a\\xff.png", "a\\x5cxff.png"),
        ("C:\\new\\table.png", "C:\\new\\table.png"),  # only what looks like an escape is changed
        ("\\xFF \\xg0 \\u12 \\U00110000", "\\xFF \\xg0 \\u12 \\U00110000"),
        ("a\nb\tc", "a\\x0ab\\x09c"),
        ("\x80\xa0\u202e\U000e0001", "\\u0080\\u00a0\\u202e\\U000e0001"),
    ],
)
def test_how_names_are_written(name, written):
    assert escape(name) == written
    assert unescape(written) == name


@given(NAMES)
def test_an_ascii_console_shows_the_same_escapes(name):
    shown = escape(name).encode("ascii", HANDLER).decode("ascii")
    assert unescape(shown) == name
