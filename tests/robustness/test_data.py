"""Data that cannot be read, or not be trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.robustness.bad_inputs import Bad, Place, check


def data(make: Callable[[Place], str], *flags: str, **changes: Any) -> Callable[[Place], list[str]]:
    return lambda place: ["train", place.recipe(data_path=make(place), **changes), *flags]


def rows(*rows: Any, **changes: Any) -> Callable[[Place], list[str]]:
    return data(lambda place: place.rows(*rows), **changes)


def file(name: str, content: str | bytes, *flags: str, **changes: Any) -> Callable[[Place], list[str]]:
    return data(lambda place: place.write(name, content), *flags, **changes)


def folder(**files: bytes) -> Callable[[Place], list[str]]:
    def make(place: Place) -> str:
        (place.folder / "data").mkdir()
        for name, content in files.items():
            place.write(f"data/{name.replace('_', '.')}", content)
        return str(place.folder / "data")

    return data(make)


GOOD = {"text": "a good row"}
LONG = '{"text": "' + "x" * 3_000_000

CASES = [
    Bad("no data", data(lambda _: "nowhere.jsonl"), ("no data", "nowhere.jsonl")),
    Bad("no hub", data(lambda _: "nobody/nothing"), ("nobody/nothing",)),
    Bad("a device", data(lambda _: "/dev/null"), ("/dev/null", "neither a file nor a folder")),
    Bad("empty text", file("a.txt", ""), ("a.txt", "empty")),
    Bad("white space", file("a.txt", " \n\t\n"), ("a.txt", "empty")),
    Bad("empty jsonl", file("a.jsonl", ""), ("a.jsonl",)),
    Bad("empty json", file("a.json", ""), ("a.json",)),
    Bad("empty csv", file("a.csv", ""), ("a.csv",)),
    Bad("empty parquet", file("a.parquet", ""), ("a.parquet",)),
    Bad("empty arrow", file("a.arrow", ""), ("a.arrow",)),
    Bad("binary text", file("a.txt", b"\x7fELF\0\0\1"), ("a.txt", "binary")),
    Bad("binary jsonl", file("a.jsonl", b"\x7fELF\0\0\1"), ("a.jsonl", "binary")),
    Bad("binary csv", file("a.csv", b"text\n\x7fELF\0\xff\1\n"), ("a.csv",)),
    Bad("binary parquet", file("a.parquet", b"\x7fELF\0\0\1" * 9), ("a.parquet", "Parquet")),
    Bad("cut off parquet", file("a.parquet", b"PAR1" + b"\0" * 40), ("a.parquet", "Parquet")),
    Bad("latin1 text", file("a.txt", b"gr\xfcn " * 9), ("a.txt", "UTF-8", "iconv")),
    Bad("UTF-16 text", file("a.txt", ("x" * 9).encode("utf-16")), ("a.txt", "UTF-16")),
    Bad("UTF-16 jsonl", file("a.jsonl", '{"text": "x"}'.encode("utf-16")), ("a.jsonl", "UTF-16")),
    Bad("UTF-16 csv", file("a.csv", "text\nx\n".encode("utf-16")), ("a.csv", "UTF-16")),
    Bad("latin1 on line 3", file("a.jsonl", b'{"text":"a"}\n{"text":"b"}\n{"text":"\xfc"}\n'), ("line 3", "UTF-8")),
    Bad("a huge line that is cut", file("a.jsonl", LONG), ("a.jsonl line 1", "JSON")),
    Bad("broken on line 2", rows(GOOD, '{"text": ', GOOD), ("line 2", "JSON", "Each line is one object")),
    Bad("a list on line 2", rows(GOOD, [1]), ("line 2", "list")),
    Bad("a key twice", rows('{"text": "a", "text": "b"}'), ("line 1", "'text' twice")),
    Bad("nested deeply", rows('{"text": ' + "[" * 100_000), ("line 1", "deeply")),
    Bad("digits without end", rows('{"text": %s}' % ("9" * 5000)), ("line 1", "digits")),
    Bad("a number for text", rows({"text": 3}), ("line 1", "must be text", "int")),
    Bad("NaN for text", rows('{"text": NaN}'), ("line 1", "must be text", "a number")),
    Bad("half a character", rows('{"text": "\\ud83d"}'), ("line 1", "half of a character")),
    Bad("no field", rows({"body": "x"}), ("line 1", "'body'", "text_field")),
    Bad("mixed rows", rows(GOOD, {"body": "x"}), ("line 2", "'body'")),
    Bad("prompt alone", rows({"prompt": "x"}), ("line 1", "'prompt'")),
    Bad("messages are text", rows({"messages": "hello"}), ("line 1", "messages")),
    Bad("a message without role", rows({"messages": [{"content": "x"}]}), ("line 1", "chat template")),
    Bad("chats without template", rows({"messages": [{"role": "user", "content": "x"}]}), ("template",)),
    Bad("ids out of the vocabulary", rows({"input_ids": [1, 2, 99999]}), ("99999", "260")),
    Bad("negative ids", rows({"input_ids": [1, -2]}), ("line 1", "-2")),
    Bad("ids beyond 64 bits", rows({"input_ids": [1, 2**70]}), ("line 1", str(2**70))),
    Bad("labels beyond 64 bits", rows({"input_ids": [1, 2], "labels": [1, 2**70]}), ("line 1", "labels")),
    Bad("labels of another length", rows({"input_ids": [1, 2], "labels": [1]}), ("1 labels for 2 ids",)),
    Bad("shifted labels", rows({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}), ("line 1", "Position 0")),
    Bad("ids are text", rows({"input_ids": "1 2 3"}), ("line 1", "list of whole numbers")),
    Bad("no targets", rows({"input_ids": [1, 2, 3], "labels": [-100] * 3}), ("nothing to train on",)),
    Bad("one token", rows({"input_ids": [1]}), ("nothing to train on",)),
    Bad("assistant of plain text", rows(GOOD, train_on="assistant"), ("plain text", "train_on")),
    Bad("too long", rows({"text": "x" * 500}, max_length=64), ("64", "truncation")),
    Bad("beyond the trained range", rows({"text": "x" * 900}), ("512", "901")),
    Bad("all dropped", rows({"text": "x" * 500}, max_length=64, truncation="drop"), ("nothing to train on",)),
    Bad("columns missing", file("a.csv", "text,other\nx\n"), ("line 2", "1 values")),
    Bad("columns twice", file("a.csv", "text,text\nx,y\n"), ("a.csv", "['text', 'text']")),
    Bad("a quote left open", file("a.csv", 'text\n"x\n'), ("a.csv", "quote")),
    Bad("a table without rows", file("a.csv", "text\n"), ("without rows",)),
    Bad("an empty folder", folder(), ("holds no text",)),
    Bad("a folder of binaries", folder(a_bin=b"\0\1", b_bin=b"\0\2"), ("holds no text", "2 binary")),
    Bad("a folder of bad tables", folder(a_jsonl=b'{"text": '), ("a.jsonl line 1", "JSON")),
    Bad("a dataset that is broken", folder(state_json=b"{"), ("cannot be loaded", "save_to_disk")),
    Bad(
        "one of several paths",
        lambda place: ["train", place.recipe(data_path=[place.rows(GOOD), "b.txt"])],
        ("'b.txt'",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Bad, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    check(case, place, capsys)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.txt", b"\xef\xbb\xbfa text with a byte order mark"),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "with a byte order mark"}\r\n'),
        ("line.jsonl", b'{"text": "' + b"x" * 400 + b'"}'),
        ("blank.jsonl", b'\n\n{"text": "between blank lines"}\n\n'),
    ],
)
def test_what_is_odd_and_fine(name: str, content: bytes, place: Place) -> None:
    from oomb_accel.cli import main

    assert main(["train", place.recipe(data_path=place.write(name, content)), "--dry_run"]) == 0
