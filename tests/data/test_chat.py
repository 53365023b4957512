"""Which tokens of prompts and chats are trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import CHATML, Load

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "the dog "},
]
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "the fox?"},
    {"from": "gpt", "value": "jumps"},
    {"from": "human", "value": "and?"},
    {"from": "gpt", "value": "the dog "},
]
WHOLE = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe fox?<|im_end|>\n"
    "<|im_start|>assistant\njumps<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
    "<|im_start|>assistant\nthe dog <|im_end|>\n"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}|{% endif %}{% endfor %}"
)
PAIR = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]}
REPLIES, LAST = ["jumps<|im_end|>", "the dog <|im_end|>"], ["the dog <|im_end|>"]
COMPLETION = [WHOLE[WHOLE.index("jumps") : -1]]


@pytest.fixture
def trained(load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    """Text of the document, and of its runs of trained tokens."""

    def load_row(row: dict[str, Any], **changes: Any) -> tuple[str, list[str]]:
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (one,) = load_paths(tmp_path / "a.jsonl", **changes).documents
        runs: list[list[int]] = [[]]
        for token, label in zip(one.input_ids.tolist(), one.labels.tolist(), strict=True):
            if label == -100:
                runs.append([])
            else:
                runs[-1].append(token)
        return str(tokenizer.decode(one.input_ids)), [str(tokenizer.decode(run)) for run in runs if run]

    return load_row


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("key", ["messages", "conversations", "role and content in conversations"])
def test_assistant(
    trained: Any, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: str, key: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = {key.split()[-1]: SHAREGPT if key == "conversations" else MESSAGES}
    assert trained(row, train_on="assistant") == (WHOLE, REPLIES)


@pytest.mark.parametrize(
    ("row", "train_on", "runs"),
    [
        ({"messages": MESSAGES}, "auto", [WHOLE]),
        ({"messages": MESSAGES}, "all", [WHOLE]),
        ({"messages": MESSAGES}, "completions", LAST),
        (PAIR, "auto", COMPLETION),
        (PAIR, "completions", COMPLETION),
        (PAIR, "assistant", REPLIES),
        (PAIR, "all", [WHOLE]),
    ],
)
def test_what_is_trained_on(trained: Any, row: dict[str, Any], train_on: str, runs: list[str]) -> None:
    assert trained(row, train_on=train_on) == (WHOLE, runs)


@pytest.mark.parametrize(
    ("train_on", "run"),
    [
        ("auto", " jumps<|end|>"),
        ("completions", " jumps<|end|>"),
        ("assistant", " jumps<|end|>"),
        ("all", "the fox jumps<|end|>"),
    ],
)
def test_prompt_and_completion_of_text(trained: Any, train_on: str, run: str) -> None:
    row = {"prompt": "the fox", "completion": " jumps"}
    assert trained(row, train_on=train_on) == ("the fox jumps<|end|>", [run])


def test_auto_follows_the_marks_of_a_template_and_says_so_without(
    trained: Any, load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained({"messages": MESSAGES})
    assert "1 row: chats are trained on whole" in load_paths(tmp_path / "a.jsonl").notes[0]
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    assert trained({"messages": MESSAGES})[1] == REPLIES
    assert load_paths(tmp_path / "a.jsonl").notes == []


def test_the_mask_of_marks_is_that_of_transformers(
    load_paths: Load, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    (one,) = load_paths(tmp_path / "a.jsonl", train_on="assistant").documents
    wanted: Any = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    assert one.input_ids.tolist() == wanted["input_ids"]
    assert (one.labels != -100).int().tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize(
    ("row", "changes", "template", "words"),
    [
        ({"messages": MESSAGES}, {"train_on": "assistant"}, FORGETFUL, "does not show where message 3.*completions"),
        (PAIR, {}, "{{ messages | length }}", "does not show where message 2"),
        (
            {"messages": MESSAGES[:2]},
            {"train_on": "assistant"},
            CHATML,
            "nothing that the assistant says.*system, user",
        ),
        ({"text": "a fox"}, {"train_on": "assistant"}, CHATML, "plain text, which has no assistant"),
        ({"text": "a fox"}, {"train_on": "completions"}, CHATML, "plain text, which has no completion"),
        ({"messages": "hi"}, {}, CHATML, "must be a list of messages"),
        ({"messages": ["hi"]}, {}, CHATML, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, {}, CHATML, "does not take these messages"),
        ({"conversations": [{"from": "cat", "value": "x"}]}, {}, CHATML, "message 1 is from nobody.*'cat'"),
        ({"messages": MESSAGES}, {}, None, "no chat template"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, {}, CHATML, "half of a character"),
    ],
)
def test_bad_chats(
    trained: Any,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    changes: dict[str, Any],
    template: str | None,
    words: str,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=f"(?s){words}") as caught:
        trained(row, **changes)
    assert len(str(caught.value).splitlines()) == 3 and "line 1" in str(caught.value)
