"""Cells of CSV files that a spreadsheet would evaluate."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from secu.results.cells import disarm, rearm

TEXTS = st.text(st.sampled_from("'=+-@\t\r1.5eEab "), max_size=6)


@given(TEXTS)
@example("'=1")
@example("''-x")
@example("-5")
@example("'-5")
def test_every_text_is_restored(text):
    assert rearm(disarm(text)) == text


@given(TEXTS)
def test_no_formula_is_left(text):
    written = disarm(text)
    if written[:1] in tuple("=+-@\t\r"):
        float(written)  # a number, which is harmless


@pytest.mark.parametrize(
    "text", ["=1+1", "+a", "-2+3", "@SUM(A1)", "\tx", "\rx", "'=x", "''@", "-", "=", "+1 2", "-nan"]
)
def test_formulas_get_an_apostrophe(text):
    assert disarm(text) == f"'{text}"


@pytest.mark.parametrize("value", ["", "a=b", "'a", "-5", "+4.5e-3", "-.5", "3", -0.25, True, None, 7])
def test_everything_else_is_unchanged(value):
    assert disarm(value) is value
