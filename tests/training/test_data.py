"""Data: every format, every policy for long documents, and what cannot be trained on."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from oomb_accel.config import OombConfig
from oomb_accel.data.store import StoredDocuments
from oomb_accel.training import train
from oomb_accel.training.data import (
    Corpus,
    Document,
    check_vocabulary,
    collate,
    last_tokens_batch,
    load_corpus,
)
from oomb_accel.training.dry_run import TrainingPlan, plan_training
from oomb_accel.training.recipe import Recipe
from oomb_accel.training.setup import prepare


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each document was read."""
    counts = Counter[int]()
    plain: Any = StoredDocuments.__getitem__

    def read(self: StoredDocuments, index: int) -> Any:
        found = plain(self, index)
        counts[index] += 1
        return found

    monkeypatch.setattr(StoredDocuments, "__getitem__", read)
    return counts


@pytest.mark.parametrize("begin", [plan_training, prepare])
def test_before_the_first_step_every_token_is_read_once(
    settings: dict[str, Any], tmp_path: Path, made: Counter[int], begin: Callable[[Recipe], Any]
) -> None:
    """Lengths and targets are known without."""
    data = rows(tmp_path / "a.jsonl", *({"text": "x" * length} for length in (40, 100, 300, 70)))
    oomb = OombConfig.from_dict(settings["oomb"] | {"beyond_trained_length": "error"})
    begun = begin(Recipe(**{**settings, "data_path": str(data), "oomb": oomb}))
    assert made == {number: 1 for number in range(4)}
    targets = begun.num_targets if isinstance(begun, TrainingPlan) else sum(begun.num_targets)
    assert targets == 40 + 100 + 300 + 70


@pytest.mark.parametrize("begin", [plan_training, prepare])
def test_ids_beyond_the_vocabulary_are_found_before_the_first_step(
    settings: dict[str, Any], tmp_path: Path, begin: Callable[[Recipe], Any]
) -> None:
    data = rows(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3]}, {"input_ids": [1, 70_000, 3]})
    oomb = OombConfig.from_dict(settings["oomb"])
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 has a token"):
        begin(Recipe(**{**settings, "data_path": str(data), "oomb": oomb}))


@pytest.fixture
def load(settings: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Any:
    def load_path(path: Path, **changes: Any) -> Corpus:
        values = settings | {"data_path": str(path), **changes}
        return load_corpus(Recipe(**{key: value for key, value in values.items() if key != "oomb"}), tokenizer)

    return load_path


def rows(path: Path, *objects: Any) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in objects) + "\n\n")
    return path


def text_of(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(document.input_ids))


def test_text_file_is_one_document(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Grüße\n\nund mehr")
    (document,) = load(path).documents
    assert text_of(document, tokenizer) == "Grüße\n\nund mehr<end>"
    assert torch.equal(document.input_ids, document.labels)


def test_rows_of_every_kind(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = rows(
        tmp_path / "a.jsonl",
        {"text": "hello"},
        {"prompt": "ab", "completion": "cd"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        {"input_ids": [5, 6, 7]},
    )
    text, pair, ready, plain = load(path).documents
    assert text_of(text, tokenizer) == "hello<end>"
    assert text_of(pair, tokenizer) == "abcd<end>"
    assert pair.labels.tolist() == [-100, -100, *pair.input_ids.tolist()[2:]]
    assert (ready.labels.tolist(), ready.num_targets) == ([-100, 6, -100], 1)
    assert plain.labels.tolist() == [5, 6, 7]
    assert plain.name == f"{path} line 4"


def test_other_text_field(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (document,) = load(rows(tmp_path / "a.jsonl", {"content": "hi"}), text_field="content").documents
    assert text_of(document, tokenizer) == "hi<end>"


PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text", "trained"), [(PLAIN_TEMPLATE, "uhiayo", "uhiayo"), (MARKED_TEMPLATE, "hiyo", "yo")]
)
def test_messages(
    load: Any,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    text: str,
    trained: str,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (document,) = load(rows(tmp_path / "a.jsonl", {"messages": messages})).documents
    assert text_of(document, tokenizer) == text
    assert tokenizer.decode(document.labels[document.labels != -100]) == trained


def test_folder_is_one_document(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "z.py").write_text("zz")
    (folder / "b" / "a.py").write_text("aa")
    (folder / "x.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "y.bin").write_bytes(b"a\x00b")
    corpus = load(folder)
    (document,) = corpus.documents
    assert text_of(document, tokenizer) == "==== b/a.py ====\naa\n==== z.py ====\nzz<end>"
    assert "2 files; skipped 2" in corpus.notes[0]


@pytest.mark.parametrize(("policy", "expected"), [("start", ["abcd"]), ("end", ["hij<end>"])])
def test_truncation(
    load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, policy: str, expected: list[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    corpus = load(path, max_length=4, truncation=policy)
    assert [text_of(document, tokenizer) for document in corpus.documents] == expected
    assert "4 of 11 tokens" in corpus.notes[0]


def test_split_keeps_everything_trainable(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"prompt": "abcde", "completion": "fghi"})
    corpus = load(path, max_length=3, truncation="split")
    # 10 tokens: abc (prompt only), def, ghi, and <end> alone, which has no target.
    assert [text_of(document, tokenizer) for document in corpus.documents] == ["def", "ghi"]
    assert "left out 2 documents without a target" in corpus.notes[-1]


def test_too_long_is_an_error(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    with pytest.raises(ValueError, match=r"a.txt is longer.*\n.*11 tokens; max_length is 10.\n.*max_length=11"):
        load(path, max_length=10)
    assert len(load(path, max_length=11).documents) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b" \n", "is empty"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.csv", b"a,b", "is a table"),
        ("a.jsonl", b"\n\n", "nothing to train on"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not valid JSON"),
        ("a.jsonl", b"[1]\n", "is not an object"),
        ("a.jsonl", b'{"body": "a"}\n', "'body'"),
        ("a.jsonl", b'{"text": 3}\n', "text must be text"),
        ("a.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', "differ in length"),
        ("a.jsonl", b'{"input_ids": [1, "2"]}\n', "whole numbers"),
        ("a.jsonl", b'{"input_ids": []}\n', r"line 1 has no tokens.\n.*\n  Remove the row"),
        ("a.jsonl", b'{"input_ids": [1, 2], "labels": []}\n', "differ in length"),
        ("a.jsonl", b'{"input_ids": [1, 2], "labels": [1, -100]}\n', "nothing to train on"),
        ("a.jsonl", b'{"messages": []}\n', "no chat template"),
    ],
)
def test_what_cannot_be_trained_on(load: Any, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load(path)


def test_missing_and_empty_folders(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no data"):
        load(tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        load(tmp_path / "empty")


def test_messages_that_the_template_refuses(
    load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    path = rows(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ValueError, match=r"line 1: the chat template.*\n.*roles must alternate"):
        load(path)


def document(*ids: int) -> Document:
    tensor = torch.tensor(ids)
    return Document("d", tensor, tensor)


def test_collate_pads_on_the_right() -> None:
    batch = collate([document(1, 2, 3), document(4)], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_last_tokens() -> None:
    source = document(1, 2, 3, 4)
    assert last_tokens_batch(source, 2)["labels"].tolist() == [[-100, -100, 3, 4]]
    assert last_tokens_batch(source, 99)["labels"].tolist() == [[1, 2, 3, 4]]
    assert source.labels.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [260, -1])
def test_unknown_ids(wrong: int) -> None:
    check_vocabulary([document(0, 259)], 260)
    with pytest.raises(ValueError, match=f"id {wrong};"):
        check_vocabulary([document(0, wrong)], 260)


def test_packed_documents_train_as_they_do_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    """The first loss of one packed step is that of the same documents in a padded batch, and the run can go on."""
    path = rows(tmp_path / "a.jsonl", *({"prompt": "ab" * n, "completion": "cd" * n} for n in (3, 9, 4, 12)))
    base: dict[str, Any] = settings | {"data_path": str(path), "oomb": OombConfig(chunk_tokens=16, page_tokens=4)}
    alone = train(Recipe(**base | {"output_dir": str(tmp_path / "alone"), "per_device_train_batch_size": 4}))
    packing = {"packing": True, "max_length": 60, "per_device_train_batch_size": 3, "eval_last_tokens": 4}
    packed = train(Recipe(**base | packing | {"output_dir": str(tmp_path / "packed"), "save_steps": 1}))
    assert (packed.trained_tokens, packed.tokens) == (alone.trained_tokens, alone.tokens)
    assert packed.first_loss == pytest.approx(alone.first_loss, rel=1e-5)
    changes = {"output_dir": str(tmp_path / "packed"), "resume_from_checkpoint": "latest", "max_steps": 5}
    assert train(Recipe(**base | packing | changes)).steps == 5
    with pytest.raises(ValueError, match="another data"):
        train(Recipe(**base | packing | changes | {"max_length": 50, "max_steps": 7}))
