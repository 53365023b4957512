"""Every figure against full logits of transformers' own forward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from oomb_accel.evaluation.planting import plant
from oomb_accel.evaluation.statistics import mean_of
from oomb_accel.evaluation.windows import WHOLE, Text, default_contexts, within
from tests.evaluation.conftest import load, report_of, tokens_of


def token_losses(model: Any, ids: list[int]) -> Tensor:
    """Loss of each token but the first, from full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


def references(model_folder: Path, adapter_folder: Path) -> dict[str, Any]:
    return {"base": load(model_folder), "adapter": load(model_folder, adapter_folder)}


def test_loss_by_context(tmp_path: Path, model_folder: Path, adapter_folder: Path, text: Path) -> None:
    arguments = ["--parts", "context", "--contexts", "100,0,all"]
    report = report_of(tmp_path, model_folder, "--adapter", adapter_folder, "--data", text, *arguments)
    ids = tokens_of(model_folder, text)
    assert [(row["variant"], row["asked"], row["context"]) for row in report["context"]] == [
        (variant, *lengths) for variant in ("base", "adapter") for lengths in ((0, 0), (100, 100), (-1, 668))
    ]
    models = references(model_folder, adapter_folder)
    for row in report["context"]:
        expected = token_losses(models[row["variant"]], ids[-32 - row["context"] :])[-31:]
        assert row["num_tokens"] == 31 and row["mean"]["over"] == "blocks of 32 tokens"
        assert row["mean"]["value"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert row["documents"] == [{"name": str(text), "context": row["context"], "loss": row["mean"]["value"]}]


def test_loss_by_position(tmp_path: Path, model_folder: Path, adapter_folder: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[100:250])
    arguments = ["--parts", "position", "--first_bucket", "100", "--adapter", adapter_folder]
    report = report_of(tmp_path, model_folder, "--data", text, short, *arguments)
    models = references(model_folder, adapter_folder)
    documents = [tokens_of(model_folder, path) for path in (text, short)]
    edges = [(0, 100), (100, 200), (200, 400), (400, 700), (0, 700)]
    assert len(report["position"]) == 2 * len(edges)
    for variant, model in models.items():
        rows = [row for row in report["position"] if row["variant"] == variant]
        losses = [token_losses(model, ids) for ids in documents]
        for row, (first, end) in zip(rows, edges, strict=True):
            parts = [values[max(first - 1, 0) : end - 1] for values in losses]
            assert (row["first"], row["end"]) == (first, end)
            assert row["num_tokens"] == sum(map(len, parts))
            assert row["num_documents"] == sum(len(part) > 0 for part in parts)
            expected = float(torch.cat(parts).mean())
            assert row["loss"] == pytest.approx(expected, abs=1e-5)
            assert row["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert [row["num_tokens"] for row in rows] == [99 + 99, 100 + 50, 200, 300, 699 + 149]


@pytest.mark.parametrize("at_once", [1, 3])
def test_planted_facts(tmp_path: Path, model_folder: Path, adapter_folder: Path, text: Path, at_once: int) -> None:
    arguments = ["--parts", "facts", "--depths", "10,50,90", "--tokens", 500, "--contexts", "0,200,all"]
    arguments += ["--questions_per_pass", at_once, "--seed", 3, "--adapter", adapter_folder]
    report = report_of(tmp_path, model_folder, "--data", text, *arguments)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer(part)["input_ids"]
        return ids

    ids, plain = tokens_of(model_folder, text), text.read_text()
    made = plant(ids, plain, encode, num_tokens=500, depths=[0.1, 0.5, 0.9], per_depth=1, seed=[3, 0])
    facts = {fact.key: fact for fact in made.facts}
    models = references(model_folder, adapter_folder)
    assert len(report["facts"]) == 2 * 3 * 3
    questions: list[int] = []
    for number, row in enumerate(report["facts"]):
        fact, context = facts[row["key"]], row["context"]
        questions = [] if number % at_once == 0 else questions
        questions += fact.question + fact.answer
        kept = made.ids[len(made.ids) - context :]
        with torch.no_grad():
            logits = models[row["variant"]](input_ids=torch.tensor([kept + questions])).logits[0].double()
        logits, answer = logits[-len(fact.answer) - 1 : -1], torch.tensor(fact.answer)
        assert row["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, answer)), abs=1e-5)
        assert row["exact"] == bool((logits.argmax(-1) == answer).all())
        assert (row["start"], row["tokens_back"]) == (fact.start, 500 - fact.start)
        assert row["in_context"] == (context >= 500 - fact.start) and row["num_tokens"] == len(fact.answer)
        questions += fact.end


def test_an_answer_that_is_known_is_exact(tmp_path: Path, model_folder: Path, text: Path) -> None:
    """A head that says what follows each byte in one code, without any context."""
    common = ["--parts", "facts", "--depths", "50", "--tokens", "400", "--data", str(text), "--seed"]
    model, tokenizer = load(model_folder), AutoTokenizer.from_pretrained(model_folder)
    ids = tokens_of(model_folder, text)[:400]
    made = plant(
        ids, "", lambda part: tokenizer(part)["input_ids"], num_tokens=400, depths=[0.5], per_depth=1, seed=[9, 0]
    )
    code = f" {made.facts[0].code}"
    assert len(set("s" + code)) == 8, "every byte has one that follows it"
    with torch.no_grad():  # the blocks add nothing
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for before, after in zip("s" + code, code, strict=False):
            first, second = (tokenizer(letter)["input_ids"][0] for letter in (before, after))
            model.lm_head.weight[second] += 10 * model.model.embed_tokens.weight[first]
    model.save_pretrained(tmp_path / "knows")
    tokenizer.save_pretrained(tmp_path / "knows")
    for seed, exact in (("9", True), ("1", False)):
        (answer,) = report_of(tmp_path, tmp_path / "knows", *common, seed, "--contexts", "0")["facts"]
        assert answer["exact"] == exact and not answer["in_context"]


def test_sparse_attention_is_another_and_says_so(
    tmp_path: Path, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [model_folder, "--data", text, "--parts", "position,context", "--contexts", "0,all"]
    sparse = ["--attention", "sparse", "--top_k", "2", "--recent_pages", "1", "--q_block", "64"]
    dense, other = report_of(tmp_path, *common), report_of(tmp_path, *common, *sparse)
    printed = capsys.readouterr().out
    assert printed.count("dense attention, as served") == printed.count("SPARSE attention") == 3
    assert (dense["attention"], dense["as_served"], other["attention"], other["as_served"]) == (
        *("dense", True),
        *("sparse", False),
    )
    means = [[row["mean"]["value"] for row in found["context"]] for found in (dense, other)]
    assert means[1][0] == pytest.approx(means[0][0], rel=1e-6)  # nothing to leave out
    assert abs(means[1][1] - means[0][1]) > 1e-4
    everything = report_of(tmp_path, *common, *sparse[:2], "--top_k", "1000")
    assert everything["position"][-1]["loss"] == pytest.approx(dense["position"][-1]["loss"], rel=1e-6)


def test_every_cut_keeps_the_start_token() -> None:
    text = Text("a", torch.arange(100, 120), has_start=True)
    assert text.last(3).tolist() == [100, 117, 118, 119]
    assert text.last(19).tolist() == text.last(50).tolist() == list(range(100, 120))
    assert Text("a", torch.arange(5), has_start=False).last(2).tolist() == [3, 4]


def test_context_lengths() -> None:
    assert default_contexts(9000) == (0, 512, 2048, 8192, WHOLE)
    assert default_contexts(512) == (0, WHOLE)
    assert within([0, 512, WHOLE], 400) == [(0, 0), (WHOLE, 400)]


def test_intervals() -> None:
    rng = np.random.default_rng(0)
    several = [rng.normal(3.0 + shift, 0.1, 50) for shift in (-0.5, 0.0, 0.5)]
    mean = mean_of(several, 0)
    assert mean.value == pytest.approx(np.mean([part.mean() for part in several])) and mean.over == "documents"
    assert mean.low < mean.value < mean.high and several[0].mean() <= mean.low and mean.high <= several[2].mean()
    # Blocks of the same loss: their mean scatters by the standard error over blocks, not over tokens.
    blocks = np.repeat(rng.normal(2.0, 1.0, 100), 32)
    mean = mean_of([blocks], 0)
    assert mean.value == pytest.approx(blocks.mean()) and mean.over == "blocks of 32 tokens"
    assert (mean.high - mean.low) / 2 == pytest.approx(1.96 * blocks.std() / 10, rel=0.15)
    assert mean_of([np.full(70, 1.5)], 0).low == pytest.approx(1.5)
