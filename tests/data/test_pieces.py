"""A long text cut into pieces has the tokens of the whole text, on every kind of tokenizer, or is not cut."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from oomb_accel.data import pieces as pieces_module
from oomb_accel.data.examples import Example, Part, Ready
from oomb_accel.data.meter import Meter
from oomb_accel.data.pieces import can_cut, find_cut, pieces
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.store import StoreWriter, TokenStore, is_whole
from oomb_accel.data.tokenise import Named, TextEncoder, UnprovenCut
from oomb_accel.data.worker import Task, encode, make_tokenizer
from oomb_accel.data.workers import GROUP_TASKS, LEAST_GROUPS, encode_all
from tests.data.conftest import END, train_bpe

WORDS = ("fox", "the", "'s", "12", "3", ";", "==", "x", "ü", "u\u0308", "\u0301", "好", END, "<|im_start|>")
SPACES = (" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u2028", "\u3000", "\x0b")
TRICKY = st.lists(st.sampled_from(WORDS + SPACES), max_size=120).map("".join)
"""Everything that stands near borders of words."""


def description_of(tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
@given(text=TRICKY, size=st.integers(1, 12), blocks=st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(kind: str, text: str, size: int, blocks: int) -> None:
    tokenizer = TOKENIZERS[kind]
    chunks = [text[at : at + blocks] for at in range(0, len(text), blocks)]
    cut = list(pieces(chunks, size))
    assert "".join(piece for piece, _ in cut) == text
    done = [encode(tokenizer, Task(piece, behind)) for piece, behind in cut]
    if all(one.proven for one in done):
        joined = [token for one in done for token in one.ids.tolist()]
        assert joined == tokenizer.encode(text, add_special_tokens=False).ids


TOKENIZERS = {kind: make_tokenizer.__wrapped__(description_of(train_bpe(kind))) for kind in ("gpt2", "qwen")}


def test_nearly_all_cuts_are_proven() -> None:
    text = "\n".join(f"line {number}: the fox said 'it's {number * 37}';" for number in range(400))
    for tokenizer in TOKENIZERS.values():
        cut = list(pieces([text], 50))
        assert len(cut) > 100
        assert all(encode(tokenizer, Task(*piece)).proven for piece in cut)


def test_a_cut_inside_of_a_token_is_not_proven() -> None:
    tokenizer = TOKENIZERS["gpt2"]
    assert encode(tokenizer, Task("the quick", " fox")).proven
    assert not encode(tokenizer, Task("the qu", "ick fox")).proven
    assert not encode(tokenizer, Task("", "x")).proven


GPT2 = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}


def split(expression: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": False}


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, False),
        ({"normalizer": {"type": "Replace"}}, False),
        ({"pre_tokenizer": None}, False),
        ({"pre_tokenizer": {"type": "Metaspace"}}, False),
        ({"pre_tokenizer": GPT2 | {"add_prefix_space": True}}, False),
        ({"pre_tokenizer": GPT2 | {"use_regex": False}}, False),
        ({"pre_tokenizer": split(r"[^\r\n]\p{L}+|\s+(?!\S)|\s+")}, True),
        ({"pre_tokenizer": split(r"(?<=\n)\p{L}+|\s+")}, False),
        ({"pre_tokenizer": split(r"\p{L}+(?=.*end)|\s+")}, False),
        ({"pre_tokenizer": split(r"^\p{L}+|\s+")}, False),
        ({"pre_tokenizer": split(r"\s+", "MergedWithNext")}, False),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\s+"), GPT2 | {"use_regex": False}]}}, True),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}]}}, False),
        ({"model": {"type": "BPE", "dropout": 0.1}}, False),
        ({"added_tokens": [{"content": "<a>", "lstrip": False}]}, True),
        ({"added_tokens": [{"content": "<a>", "lstrip": True}]}, False),
        ({"added_tokens": [{"content": "a\nb", "lstrip": False}]}, False),
    ],
    ids=str,
)
def test_which_tokenizers_can_be_cut(change: dict[str, Any], fine: bool) -> None:
    whole: dict[str, Any] = {
        "model": {"type": "BPE", "dropout": None},
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": GPT2,
    }
    assert can_cut(json.dumps(whole | change)) is fine


@pytest.mark.parametrize(
    ("text", "start", "cut"),
    [
        ("ab\ncd", 0, 3),
        ("ab\ncd", 4, None),
        ("ab\n\ncd", 0, None),
        ("ab \ncd\nx", 0, 7),
        ("\nab", 0, None),
        ("ab\n", 0, None),
    ],
)
def test_where_a_text_is_cut(text: str, start: int, cut: int | None) -> None:
    assert find_cut(text, start, len(text)) == cut


def test_a_single_huge_line_is_one_piece() -> None:
    assert list(pieces(["a b" * 100] * 50, 64)) == [("a b" * 5000, None)]


def write(encoder: TextEncoder, folder: Path, *documents: Example, cut: bool = True) -> TokenStore:
    folder.mkdir()
    writer = StoreWriter(folder)
    named = [Named(0, f" {number}", parts) for number, parts in enumerate(documents)]
    encoder.write(named, writer, Meter(1), cut=cut)
    writer.close([])
    assert is_whole(folder)
    return TokenStore(folder, ["text"])


def part(text: str, targets: list[tuple[int, int]] | None = None, **changes: bool) -> Part:
    return Part(lambda: iter([text]), targets, **changes)


def test_targets_of_a_text_that_was_cut(
    any_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the offsets of the whole text: a token is a target where it has a character that is."""
    text = "\n".join(f"user {n} asks\nthe fox says {n * 7}" for n in range(60))
    ranges = [(at, at + 9) for at in range(5, len(text), 41)]
    whole = any_tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    wanted = [any(a < end and start < b for a, b in ranges) for start, end in whole["offset_mapping"]]
    monkeypatch.setattr(pieces_module.pieces, "__defaults__", (40,))
    encoder = TextEncoder(any_tokenizer)
    assert encoder.cuts
    store = write(encoder, tmp_path / "store", [part(text, ranges)], [part("fox", end=True)])
    first, second = store.offsets[1], store.offsets[2]
    assert store.tokens[:first].tolist() == whole["input_ids"]
    assert (store.labels(0, first) != -100).tolist() == wanted
    assert store.num_targets(0, first) == sum(wanted[1:])
    assert store.num_targets(first, second) == second - first - 1
    for start, end in ((3, 50), (0, 1), (17, 17), (20, first)):
        assert store.num_targets(start, end) == sum(wanted[start + 1 : end])


def test_a_tokenizer_without_words_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = train_bpe("joined")
    encoder = TextEncoder(joined)
    assert not encoder.cuts
    monkeypatch.setattr(pieces_module.pieces, "__defaults__", (8,))
    text = "class Model:\n\tpass\r\nx ==> y;\n" * 99
    assert write(encoder, tmp_path / "s", [part(text)]).tokens.tolist() == joined(text)["input_ids"]


def test_a_cut_that_is_not_proven_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the description of a tokenizer had promised too much."""
    encoder = TextEncoder(train_bpe("joined"))
    encoder.cuts = True
    monkeypatch.setattr(pieces_module.pieces, "__defaults__", (8,))
    text = "class Model:\npass\n" * 99
    with pytest.raises(UnprovenCut):
        write(encoder, tmp_path / "cut", [part(text)])
    assert len(write(encoder, tmp_path / "whole", [part(text)], cut=False).tokens)


class Slow:
    """A tokenizer with nothing but a call: no JSON, no offsets."""

    eos_token_id, chat_template, init_kwargs = 0, None, {"a": 1}
    special_tokens_map = "none"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97}


def test_slow_tokenizers(tmp_path: Path) -> None:
    encoder = TextEncoder(Slow())
    store = write(encoder, tmp_path / "s", [part("abcdef", [(1, 3), (5, 6)])], [part("xy", special=True, end=True)])
    assert bytes(store.tokens.astype(np.uint8)) == b"abcdefxy\0"
    assert store.labels(0, 6).tolist() == [-100, 98, 99, -100, -100, 102]
    assert store.num_targets(6, 9) == 2


class Prefixing(Slow):
    """Whose special tokens are no frame around a text."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) + add_special_tokens for letter in text]}


class Wordless(Slow):
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": []}


@pytest.mark.parametrize("tokenizer", [Prefixing(), Wordless()])
def test_tokenised_rows_ask_nothing_of_a_tokenizer(tokenizer: Slow, tmp_path: Path) -> None:
    ready = Ready(np.array([5, 6, 7], np.uint32), [(0, 3)])
    store = write(TextEncoder(tokenizer), tmp_path / "s", ready)
    assert store.tokens.tolist() == [5, 6, 7]


def test_special_tokens_that_change_a_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="changes a text when it adds special tokens"):
        write(TextEncoder(Prefixing()), tmp_path / "s", [part("xy", special=True)])
    assert len(write(TextEncoder(Wordless()), tmp_path / "w", [part("xy", special=True, end=True)]).tokens) == 1


def test_processes_give_the_same_in_order(any_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [f"text {number}: " + "the fox\n" * (number % 7) * 3000 for number in range(24)]
    description = description_of(any_tokenizer)
    alone = [done.ids.tolist() for done in encode_all(description, map(Task, texts), workers=1)]
    together = [done.ids.tolist() for done in encode_all(description, map(Task, texts), workers=2)]
    assert together == alone and len(alone) == 24


@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_are_read_as_they_are_needed(any_tokenizer: PreTrainedTokenizerFast, workers: int) -> None:
    read = Counter[str]()

    def tasks() -> Iterator[Task]:
        for _ in range(64 * GROUP_TASKS):
            read["tasks"] += 1
            yield Task("fox")

    done = encode_all(description_of(any_tokenizer), tasks(), workers=workers)
    next(done)
    assert read["tasks"] <= (LEAST_GROUPS + 2 * workers) * GROUP_TASKS
    done.close()


def test_a_process_that_was_killed(any_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomb_accel.data.workers.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"has ended.\n  Exit code 1 .*\n.*taskset"):
        list(encode_all(description_of(any_tokenizer), map(Task, ["x" * 300_000] * 9), workers=2))


def test_progress_line() -> None:
    meter = Meter(1000)
    meter.add(250, 100)
    assert meter.text(10.0) == "tokenising | 25% | 100 tokens | 10 tok/s | 0:30 left"


def test_key_of_a_slow_tokenizer_follows_its_files(tmp_path: Path) -> None:
    from oomb_accel.data.load import read

    (tmp_path / "a.txt").write_text("abc")
    settings = DataSettings(paths=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache"))
    first, tokenizer = read(settings, Slow()).folder, Slow()
    assert read(settings, Slow()).folder == first
    tokenizer.init_kwargs = {"a": 2}
    assert read(settings, tokenizer).folder != first
    assert Counter(path.suffix for path in (tmp_path / "cache").iterdir()) == {"": 2, ".lock": 2}
