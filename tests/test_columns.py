"""Rows of text side by side."""

from __future__ import annotations

from oomb_accel.columns import aligned


def test_words_go_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("name", "loss", "when"), ("a", "10.25", "now"), ("longer", "-", "")]
    assert aligned(rows, left=(0, 2)) == "name     loss  when\na       10.25  now\nlonger      -"
    assert aligned(rows[:2], left=()) == "name   loss  when\n   a  10.25   now"
