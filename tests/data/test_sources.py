"""Every kind of file with the same rows gives the same documents; what cannot be read is refused in three lines."""

import csv
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oomb_accel.data.store import Corpus
from tests.data.conftest import Load

ROWS = [{"prompt": "the fox", "completion": " jumps"}, {"prompt": "Grüße\n", "completion": 'a "b", c\n好'}]


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_json_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


def as_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def as_tsv(path: Path, rows: list[dict[str, Any]]) -> None:
    as_csv(path, rows, "\t")


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def as_arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def as_arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def as_saved_dataset(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))


def as_saved_splits(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))


def as_folder_of_tables(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    (path / "README.md").write_text("about the data")
    for number, row in enumerate(rows):
        as_parquet(path / f"{number}.parquet", [row])


def contents(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    return [(one.input_ids.tolist(), one.labels.tolist()) for one in corpus.documents]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", as_jsonl),
        ("a.json", as_json_array),
        ("a.JSONL", as_jsonl),
        ("a.csv", as_csv),
        ("a.tsv", as_tsv),
        ("a.parquet", as_parquet),
        ("a.arrow", as_arrow_stream),
        ("a.arrow", as_arrow_file),
        ("saved", as_saved_dataset),
        ("splits", as_saved_splits),
        ("tables", as_folder_of_tables),
    ],
)
def test_tables(load_paths: Load, tmp_path: Path, name: str, write: Callable[[Path, Any], None]) -> None:
    as_jsonl(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / name, ROWS)
    corpus = load_paths(tmp_path / name)
    assert contents(corpus) == contents(load_paths(tmp_path / "rows.jsonl"))
    assert (
        "row 2" in corpus.documents[1].name or "line" in corpus.documents[1].name or "row 1" in corpus.documents[1].name
    )


def test_several_paths_in_order(load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("\ufeffone\r\ntwo\rthree".encode())
    as_jsonl(tmp_path / "a.jsonl", [{"text": "four"}])
    corpus = load_paths(tmp_path / "b.txt", tmp_path / "a.jsonl", tmp_path / "b.txt")
    texts = [tokenizer.decode(one.input_ids[:-1]) for one in corpus.documents]
    assert texts == ["one\ntwo\nthree", "four", "one\ntwo\nthree"]


def test_empty_files_of_a_list_are_left_out(load_paths: Load, tmp_path: Path) -> None:
    contents = {"a.txt": b"", "b.txt": b"text", "c.txt": b"\xef\xbb\xbf \r\n", "d.json": b"", "e.csv": b"\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    corpus = load_paths(*paths)
    assert [one.name for one in corpus.documents] == [str(tmp_path / "b.txt")]
    assert corpus.notes == [f"skipped 4 (4 empty): {paths[0]}, {paths[2]}, {paths[3]}, ..."]
    with pytest.raises(ValueError, match=r"a\.txt is empty"):
        load_paths(paths[0], paths[2])


def test_a_newline_of_two_characters_across_blocks(
    load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomb_accel.data.text.BLOCK_BYTES", 3)
    (tmp_path / "a.txt").write_bytes("ab\r\nüü\r\r\n好\r".encode())
    (one,) = load_paths(tmp_path / "a.txt").documents
    assert tokenizer.decode(one.input_ids[:-1]) == "ab\nüü\n\n好\n"


def test_a_hub_dataset_without_network(load_paths: Load) -> None:
    with pytest.raises(ValueError, match=r"no data at 'nobody/nothing:all'.\n.*the hub has no such dataset"):
        load_paths("nobody/nothing:all")


def test_a_hub_dataset(load_paths: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for, and that its rows are read; the hub itself is out of reach here."""
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> Any:
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    as_jsonl(tmp_path / "rows.jsonl", ROWS)
    corpus = load_paths("owner/name:config", split="train[:2]")
    assert contents(corpus) == contents(load_paths(tmp_path / "rows.jsonl"))
    assert asked == [("owner/name", "config", "train[:2]")]
    assert corpus.documents[1].name == "owner/name:config row 2"


def test_without_the_extra(load_paths: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    as_parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow.\n.*\n.*oomb_accel\[data\]"):
        load_paths(tmp_path / "a.parquet")


BIG = b'{"text": "' + b"x" * 400_000 + b'"}\n'

BAD: list[tuple[str, bytes, str]] = [
    ("a.txt", "ab".encode("utf-16"), "begins as UTF-16 text.*iconv -f utf-16"),
    ("a.txt", "ab".encode("utf-32"), "begins as UTF-32LE text"),
    ("a.txt", "Grüße".encode("latin1"), "not UTF-8.*iconv -f latin1"),
    ("a.txt", b"ab\x00cd", "binary file.*zero byte at 2"),
    ("a.pdf", b"%PDF-1.4\nonly ASCII", "no plain text.*a PDF.*pdftotext"),
    ("a.docx", b"PK\x03\x04\x00", "no plain text.*zip archive.*pandoc"),
    ("a.jsonl.gz", b"\x1f\x8b\x08", "no plain text.*gzip.*gunzip"),
    ("a.txt", b"", "is empty"),
    ("a.txt", b"\xef\xbb\xbf \r\n", "is empty"),
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', "line 1 has the key 'text' twice"),
    ("a.jsonl", b'{"messages": [{"role": "user", "role": "x"}]}\n', "line 1 has the key 'role' twice"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "Gr\xfc"}\n', "line 2' is not UTF-8"),
    ("a.jsonl", b"\x00\x01\x02", "binary file"),
    ("a.jsonl", BIG + b"{", "line 2 is not valid JSON"),
    ("a.jsonl", b'{"text": "a"} {"text": "b"}\n', "line 1 is not valid JSON.*Extra data"),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1: text holds half of a character"),
    ("a.jsonl", b'{"text": null}\n', "line 1 has no field to train on.*an empty object"),
    ("a.jsonl", b'{"prompt": ["a"], "completion": "b"}\n', "prompt must be text"),
    ("a.jsonl", b"[" * 100_000 + b"\n", "nested too deeply"),
    ("a.jsonl", b'{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}\n', "labels do not repeat input_ids.*Position 0"),
    ("a.jsonl", b'{"input_ids": [1, -2]}\n', "no token id.*Got -2"),
    ("a.jsonl", b'{"input_ids": [[1], [2]]}\n', "list of whole numbers"),
    ("a.json", b'[{"text": "a"}, 3]', "row 2 is not an object"),
    ("a.json", b'[{"text": "a"', "not valid JSON"),
    ("a.json", b"", "not valid JSON"),
    ("a.csv", b"", "no usable first line"),
    ("a.csv", b"text,text\na,b\n", "no usable first line"),
    ("a.csv", b"text\n", "table without rows"),
    ("a.csv", b"prompt,completion\na,b\nc\n", "line 3 has 1 values.*2 columns: prompt, completion"),
    ("a.csv", b'text\n"a\n', "line 2 is not valid CSV"),
    ("a.csv", "text\nGrüße\n".encode("latin1"), "not UTF-8"),
    ("a.csv", b"body\na\n", "line 2 has no field to train on.*'body'"),
    ("a.parquet", b"PAR1 no", "no Parquet file"),
    ("a.arrow", b"ARROW1 no", "no Arrow file"),
    ("a.arrow", b"x", "no Arrow file"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[f"{name}-{words[:24]}" for name, _, words in BAD])
def test_bad_files(load_paths: Load, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){words}") as caught:
        load_paths(path)
    assert len(str(caught.value).splitlines()) == 3 and name in str(caught.value)
    assert not list((tmp_path / "cache").glob("*part*"))


def test_what_is_no_file(load_paths: Load, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_paths(tmp_path / "pipe")


def test_huge_single_lines(load_paths: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BIG)
    (tmp_path / "a.txt").write_bytes(b"x" * 400_000)
    first, second = load_paths(tmp_path / "a.jsonl", tmp_path / "a.txt").documents
    assert first.input_ids.tolist() == second.input_ids.tolist()


def test_rows_that_lack_a_column(load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Tables hold every column in every row; an empty one is not there."""
    rows = [{"text": "the fox", "prompt": None, "completion": None}, {"text": None, "prompt": "a", "completion": "b"}]
    as_parquet(tmp_path / "a.parquet", rows)
    corpus = load_paths(tmp_path / "a.parquet")
    assert [one.num_targets > 0 for one in corpus.documents] == [True, True]
    assert tokenizer.decode(corpus.documents[1].input_ids) == "ab<|end|>"


# Folders and checkouts.


def tree(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


MIXED: dict[str, str | bytes] = {
    "b__x_dot_py": "xx\r\n",
    "a_dot_md": "\ufeffaa",
    "c_dot_bin": b"\0\1",
    "d_dot_txt": "ü".encode("latin1"),
    "e_dot_js": "var a;" * 20_000,
    "f_dot_txt": " \n",
    "h_dot_pdf": "%PDF-1.4\nonly ASCII\n",
    "_dot_hidden__y_dot_py": "yy",
    "tests__t_dot_py": "tt",
}


def test_a_folder_is_one_document(load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = tree(tmp_path / "folder", **MIXED)
    corpus = load_paths(folder)
    (one,) = corpus.documents
    text = "==== a.md ====\naa\n==== b/x.py ====\nxx\n\n==== tests/t.py ====\ntt"
    assert tokenizer.decode(one.input_ids[:-1]) == text
    assert corpus.notes[0].startswith(f"{folder}: one document of 3 files; skipped 5 (")
    for reason in ("1 binary", "1 not UTF-8", "1 minified", "1 empty", "1 PDF"):
        assert reason in corpus.notes[0]


def test_a_folder_as_files(load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = tree(tmp_path / "folder", **MIXED, g_dot_jsonl='{"text": "row"}\n')
    corpus = load_paths(folder, folder_as="files", exclude=("*.js",))
    assert [tokenizer.decode(one.input_ids[:-1]) for one in corpus.documents] == ["aa", "xx\n", "row", "tt"]
    assert "4 files, each by itself; skipped 4 (" in corpus.notes[0]


@pytest.mark.parametrize(
    ("include", "exclude", "read"),
    [
        (["*.py"], [], ["b/x.py", "tests/t.py"]),
        (["*.py"], ["tests"], ["b/x.py"]),
        ([], ["tests/", "*.md"], ["b/x.py"]),
        (["b/*.py"], [], ["b/x.py"]),
        (["./b/"], [], ["b/x.py"]),
        (["t*"], ["x.py"], ["tests/t.py"]),
    ],
    ids=str,
)
def test_globs(
    load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, include: Any, exclude: Any, read: list[str]
) -> None:
    (one,) = load_paths(tree(tmp_path / "f", **MIXED), include=tuple(include), exclude=tuple(exclude)).documents
    lines = str(tokenizer.decode(one.input_ids)).splitlines()
    assert [line[5:-5] for line in lines if line.startswith("====")] == read


def test_nothing_fits_the_globs(load_paths: Load, tmp_path: Path) -> None:
    for folder_as in ("document", "files"):
        with pytest.raises(ValueError, match=r"holds no .*\n  Skipped"):
            load_paths(tree(tmp_path / "f", **MIXED), include=("*.rs",), folder_as=folder_as)


def test_a_checkout_of_tables_is_rows(load_paths: Load, tmp_path: Path) -> None:
    """As a clone of a hub dataset is."""
    folder = tmp_path / "clone"
    as_folder_of_tables(folder, ROWS)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs")
    git(folder, "init")
    git(folder, "add", "0.parquet", "README.md", ".gitattributes")
    corpus = load_paths(folder)
    assert [one.name for one in corpus.documents] == [f"{folder / '0.parquet'} row 1"]
    assert corpus.notes[0] == f"{folder}: 1 file, each by itself; only files tracked by Git"


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_a_checkout_is_its_tracked_files(
    load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path / "checkout", a_dot_py="a", sub__b_dot_py="b", junk_dot_py="j", _dot_github__c_dot_yml="c")
    (folder / "gone.py").write_text("g")
    (folder / "link.py").symlink_to("a.py")
    git(folder, "init")
    git(folder, "add", "a.py", "sub", ".github", "gone.py", "link.py")
    (folder / "gone.py").unlink()

    def read(path: Path) -> tuple[str, str]:
        corpus = load_paths(path)
        return str(tokenizer.decode(corpus.documents[0].input_ids[:-1])), corpus.notes[0]

    text, note = read(folder)
    assert text == "==== .github/c.yml ====\nc\n==== a.py ====\na\n==== sub/b.py ====\nb"
    assert "only files tracked by Git" in note and "1 unreadable" in note
    assert read(folder / "sub")[0] == "==== b.py ====\nb"
    monkeypatch.setenv("PATH", str(tmp_path))
    text, note = read(folder)
    assert "==== junk.py ====" in text and ".github" not in text
    assert "all files, not only tracked ones" in note


def test_tracked_files_that_are_not_there(load_paths: Load, tmp_path: Path) -> None:
    folder = tree(tmp_path / "checkout", a_dot_txt="a", gone_dot_txt="g")
    git(folder, "init")
    git(folder, "add", ".")
    (folder / "gone.txt").unlink()
    corpus = load_paths(folder, folder_as="files")
    assert [one.name for one in corpus.documents] == [str(folder / "a.txt")]
    assert "skipped 1 (1 unreadable)" in corpus.notes[0]
