"""The mutations of `mutation_check.py` still find their text, and their whole run is there to be asked for."""

from __future__ import annotations

import pytest

from tests.mutation_check import MUTATIONS, ROOT, Mutation, main


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_text_to_replace_is_there_once(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutation_is_noticed() -> None:
    assert main([]) == 0
