"""Planted facts stand where they are said to stand, and nothing else in the text changes."""

from __future__ import annotations

from typing import Any

import pytest

from oomb_accel.evaluation.planting import FIRST_WORDS, SECOND_WORDS, ask, plant, training_row

WORDS = "a long text without any of the names . " * 60
TEXT = list(range(1000, 1600))
DEPTHS = (0.0, 0.15, 0.5, 0.52, 1.0)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def planted(**settings: Any) -> Any:
    values: dict[str, Any] = {"num_tokens": None, "depths": DEPTHS, "per_depth": 1, "seed": [0], **settings}
    return plant(values.pop("text", TEXT), values.pop("plain_text", WORDS), encode, **values)


@pytest.mark.parametrize("num_tokens", [None, 560, 577])
@pytest.mark.parametrize("first", [0, 3])
def test_facts_stand_at_their_depths_and_the_text_is_whole(num_tokens: int | None, first: int) -> None:
    made = planted(num_tokens=num_tokens, first=first)
    total = len(made.ids)
    assert total == (num_tokens or len(TEXT) + sum(len(fact.statement) for fact in made.facts))
    rest = list(made.ids)
    for fact in reversed(made.facts):
        assert tuple(rest[fact.start : fact.start + len(fact.statement)]) == fact.statement
        del rest[fact.start : fact.start + len(fact.statement)]
    assert rest == TEXT[: len(rest)] and made.ids[:first] == TEXT[:first]
    start, second, third, fourth, last = made.facts
    assert start.start == first and second.start == round(0.15 * total) and third.start == round(0.5 * total)
    assert fourth.start == third.start + len(third.statement)  # there is no room for it at 52 %
    assert last.start + len(last.statement) == total


def test_a_fact_is_the_sentence_that_is_asked_for() -> None:
    made = planted(per_depth=2)
    text = "".join(chr(token) for token in made.facts[3].statement)
    assert text == f"\n\nNote: the pass code of the {made.facts[3].key} is {made.facts[3].code}.\n\n"
    ids, places = ask(made.facts, [3, 0])
    assert [tuple(ids[first:end]) for first, end in places] == [made.facts[3].answer, made.facts[0].answer]
    assert tuple(ids) == made.facts[3].statement + made.facts[0].statement


def test_only_answers_are_targets_of_training() -> None:
    made = planted()
    row = training_row(made, [4, 1])
    ids, places = ask(made.facts, [4, 1])
    assert row["input_ids"] == made.ids + ids
    wanted = [token for first, end in places for token in ids[first:end]]
    assert [token for token in row["labels"] if token != -100] == wanted
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))


def test_keys_are_unique_and_not_in_the_text() -> None:
    used = [f"{first} {second}" for first in FIRST_WORDS for second in SECOND_WORDS][:-4]
    made = planted(depths=(0.2, 0.8), per_depth=2, plain_text=", ".join(used))
    keys = [fact.key for fact in made.facts]
    assert len(set(keys)) == 4 and not set(keys) & set(used)
    assert len({fact.code for fact in made.facts}) == 4
    with pytest.raises(ValueError, match=r"(?s)not so many names.*5 wanted, 4 names.*facts_per_depth 1"):
        planted(plain_text=", ".join(used))


def test_the_seed_decides() -> None:
    assert planted() == planted()
    assert {fact.code for fact in planted().facts} & {fact.code for fact in planted(seed=[1]).facts} == set()


def test_a_text_that_is_too_short_is_refused_with_a_length_that_works() -> None:
    with pytest.raises(ValueError, match="the document is too short for planted facts") as error:
        planted(num_tokens=900)
    works = int(str(error.value).split("--tokens ")[1].split(",")[0])
    assert len(planted(num_tokens=works).ids) == works
    with pytest.raises(ValueError, match="more than half of it") as error:
        planted(num_tokens=300)
    works = int(str(error.value).split("--tokens ")[1].split(",")[0])
    assert len(planted(num_tokens=works).ids) == works
