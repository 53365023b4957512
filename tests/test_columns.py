"""Rows of text side by side."""

from __future__ import annotations

from oomb_accel.columns import aligned, folded


def test_words_go_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("name", "loss", "when"), ("a", "10.25", "now"), ("longer", "-", "")]
    assert aligned(rows, left=(0, 2)) == "name     loss  when\na       10.25  now\nlonger      -"
    assert aligned(rows[:2], left=()) == "name   loss  when\n   a  10.25   now"


def test_long_lines_are_folded_below_their_last_column() -> None:
    text = "short\n  --flag  a description of it\n  one note of many words"
    assert folded(text, 24) == "short\n  --flag  a description\n          of it\n  one note of many words"
    assert folded("  one note of many words", 16) == "  one note of\n    many words"
    assert folded("x" * 30, 10) == "x" * 30
