"""`oomb verify --attention sparse`: what sparsity costs, and that a machinery that is not exact is found out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oomb_accel import OombConfig, selected_part
from oomb_accel.cli import main, verify_sparse
from oomb_accel.integrations import masked_attention
from oomb_accel.integrations.masked_attention import attention_mass
from oomb_accel.integrations.selections import SelectionRecord, attended_keys
from oomb_accel.integrations.sparse_parity import check_sparse_parity_low_precision
from oomb_accel.integrations.sparsity_cost import gradient_costs, layer_attention, loss_costs, training_step
from oomb_accel.integrations.support import model_facts
from oomb_accel.schedule import Chunk
from oomb_accel.selection import PageSelector
from oomb_kernels import PageLists, page_attention_backward, page_attention_forward
from tests.harness.folders import save_tiny_model
from tests.harness.models import tiny_model
from tests.harness.parity import config

SIZES = ["--tokens", "400", "--chunk-tokens", "64", "--page-tokens", "8", "--device", "cpu"]
QUICK = ["--attention", "sparse", *SIZES, "--top-k", "4", "--q-block", "64", "--recent-pages", "1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(40, 300)), encoding="utf-8")
    return path


def quick(*arguments: str) -> list[str]:
    """Arguments over the quick ones: each option stands once."""
    pairs = list(zip(QUICK[::2], QUICK[1::2], strict=True))
    return [word for pair in pairs if pair[0] not in arguments for word in pair] + list(arguments)


def verify(folder: Path, *arguments: str) -> int:
    return main(["verify", str(folder), *quick(*arguments)])


def test_it_shows_the_cost_on_a_text_and_passes(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = save_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "report.json"
    assert verify(folder, "--text", str(text), "--layers", "0", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    assert "top_k=4" in printed and "PASSED" in printed and "NOTE" not in printed
    report = json.loads(path.read_text())
    assert report["document_tokens"] == [400] and report["settings"]["attention"] == "sparse"
    *buckets, whole = report["loss"]
    assert [(bucket["first"], bucket["end"]) for bucket in buckets] == [(0, 64), (64, 128), (128, 256), (256, 400)]
    # The first 10 pages are what one sink, one recent page and four selected ones leave nothing out of, with a chunk.
    assert abs(buckets[0]["difference"]) < 1e-6 and abs(buckets[-1]["difference"]) > 1e-5
    assert whole["num_tokens"] == 399 == sum(bucket["num_tokens"] for bucket in buckets)
    assert len(report["layers"]) == 3
    for layer in report["layers"]:
        assert 0.2 < layer["attended"] < 0.9 and layer["pages_per_list"] == 4 and 0.1 < layer["mass"] < 0.95
        assert 0.5 < layer["cosine"] < 0.9999 and 0.01 < layer["relative_error"] < 1
        assert 0 < layer["distinct_pages"] < 1
    assert all(row["passed"] for row in report["exactness"]["float64"])


def test_the_mass_of_a_long_text_is_that_of_some_queries(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = save_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "report.json"
    found = []
    for limit, step in ((400, 1), (150, 3)):
        monkeypatch.setattr(verify_sparse, "_MASS_QUERIES", limit)
        assert verify(folder, "--text", str(text), "--json", str(path)) == 0
        assert ("mass is that of one query in 3" in capsys.readouterr().out) == (step == 3)
        report = json.loads(path.read_text())
        assert report["mass_of_one_query_in"] == step
        found.append([layer["mass"] for layer in report["layers"]])
    assert found[1] == pytest.approx(found[0], rel=0.1) and found[0] != found[1]


def test_fresh_adapters_do_not_change_the_loss(tmp_path: Path, text: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    losses = []
    for extra in ([], ["--lora"]):
        path = tmp_path / "report.json"
        assert verify(folder, "--text", str(text), "--json", str(path), *extra) == 0
        losses.append([bucket["dense"] for bucket in json.loads(path.read_text())["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("qwen2", ["--lora"]),
        ("qwen3", ["--select-per", "layer", "--sink-pages", "0", "--recent-pages", "0"]),
        ("llama", ["--causal-selection", "--dense-layers", "-1"]),
        ("gemma2", ["--page-budget", "8"]),
        ("smollm3", ["--dtype", "bfloat16", "--dense-layers=0"]),
        ("qwen2", ["--dense_layers", "-1,0"]),
        ("qwen3_moe", ["--random-weights"]),
    ],
)
def test_every_kind_of_selection_is_exact(tmp_path: Path, text: Path, model_type: str, extra: list[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", model_type)
    assert verify(folder, "--text", str(text), "--text", str(text), *extra) == 0


def without_page_gradients(*args: Any, **kwargs: Any) -> Tensor:
    dout, q, out, lse, pool, slots, _, _, lists = args
    return page_attention_backward(dout, q, out, lse, pool, slots, None, None, lists, **kwargs)


def with_half_dq(*args: Any, dq_HTD: Tensor, **kwargs: Any) -> Tensor:
    both: Tensor = page_attention_backward(*args, dq_HTD=dq_HTD, **kwargs)
    return (both + dq_HTD) / 2


def without_last_page(q: Tensor, pool: Tensor, slots: Tensor, lists: PageLists, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return page_attention_forward(q, pool, slots, replace(lists, counts_GB=lists.counts_GB - 1), **kwargs)


def other_pages(self: PageSelector, layer: int, chunk: Chunk) -> PageLists:
    """The lists of another KV head, in the backward sweep alone."""
    lists = self._lists[chunk.index][layer]
    return replace(lists, pages_GBK=lists.pages_GBK.flip(0).contiguous())


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (selected_part, "page_attention_backward", without_page_gradients),
        (selected_part, "page_attention_backward", with_half_dq),
        (selected_part, "page_attention_forward", without_last_page),
        (PageSelector, "recorded", other_pages),
    ],
)
def test_what_is_not_exact_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: Any,
    name: str,
    broken: Callable[..., Any],
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    monkeypatch.setattr(place, name, broken)
    assert verify(folder) == 1
    assert "FAILED" in capsys.readouterr().out


def test_figures_that_mean_little_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", max_position_embeddings=2048)
    assert verify(folder, "--random-weights", "--layers", "2") == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("random tokens", "random weights", "first 2 of 3 layers"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (quick("--top-k", "60"), ("sparse is dense here", "48 pages", "make 62", "--tokens 568", "--top_k 11")),
        ([*SIZES, "--top-k", "4"], ("top_k has no meaning with dense attention", "attention='sparse'")),
        (quick("--q-block", "96"), ("q_block", "96", "64 or 128")),
        (quick("--dense-layers", "7"), ("dense_layers", "Got 7", "0 to 2")),
        (quick("--dense-layers", "0,1,2"), ("nothing to do",)),
        (quick("--page-budget", "3"), ("page_budget=3", "top_k=4")),
        (quick("--text", "nowhere.txt"), ("There is no data at 'nowhere.txt'",)),
    ],
)
def test_nonsense_gives_a_message(
    tmp_path: Path, arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    assert main(["verify", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and "Traceback" not in error, error


def test_what_a_report_covers_stands_in_it(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = save_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "report.json"
    assert verify(folder, "--text", str(text), "--layers", "0", "--json", str(path)) == 0
    assert "first 2 of 3 layers" in capsys.readouterr().out
    assert json.loads(path.read_text())["exact_layers"] == 2


@pytest.mark.parametrize("place", ["/proc/nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oomb_accel.cli.verify.load", lambda *_: pytest.fail("work was begun"))
    assert verify(tmp_path, "--text", str(text), "--json", place) == 2
    assert "The report cannot be written" in capsys.readouterr().err


def test_a_text_is_read_for_dense_attention_too(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = save_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "report.json"
    assert main(["verify", str(folder), *SIZES, "--text", str(text), "--json", str(path)]) == 0
    assert "documents of 400 tokens" in capsys.readouterr().out
    assert all(row["passed"] for row in json.loads(path.read_text())["exactness"])


def recorded(model: Any, documents: list[Tensor], **settings: Any) -> SelectionRecord:
    record = SelectionRecord()
    sparse = {"attention": "sparse", "top_k": 2, "sink_pages": 1, "recent_pages": 1, "q_block": 64, **settings}
    training_step(model, config(32, 4, **sparse), documents, on_selection=record)
    return record


DOCUMENTS = [torch.arange(90) * 7 % 128, torch.arange(75) * 11 % 128]


@pytest.mark.parametrize("every", [1, 3, 40])
def test_attention_mass_is_that_of_the_models_own_weights(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_attention, "_WEIGHTS_AT_ONCE", 90 * 7)  # few rows at once
    model = tiny_model("gemma2", query_pre_attn_scalar=16)
    record = recorded(model, DOCUMENTS)
    found = attention_mass(model, DOCUMENTS, record, 4, every=every)
    assert set(found) == {1}, "the other layers have windows and select nothing"
    mass, rows = 0.0, 0
    for number, ids in enumerate(DOCUMENTS):
        with torch.no_grad():
            weights_HTT = model(input_ids=ids[None], output_attentions=True).attentions[1][0]
        selections = record.of(1, number)
        everything = range(len(ids))
        seen_GTT = attended_keys(
            selections, everything, len(ids), num_groups=2, page_tokens=4, window=None, device=ids.device
        )
        first = min(selection.segment.past_tokens for selection in selections)
        covered_HT = (weights_HTT * seen_GTT.repeat_interleave(2, 0)).sum(-1)[:, first::every]
        mass, rows = mass + float(covered_HT.sum()), rows + covered_HT.numel()
    assert found[1] == pytest.approx(mass / rows, rel=1e-5) and found[1] < 0.99
    assert model.config._attn_implementation == "eager"


def test_pairs_that_are_left_out_are_counted() -> None:
    model = tiny_model("gemma2")
    record = recorded(model, DOCUMENTS)
    windows = model_facts(model).windows
    counted = layer_attention(record, windows, [len(ids) for ids in DOCUMENTS], 4)
    for layer, window in enumerate(windows):
        seen, full = 0.0, 0
        for number, ids in enumerate(DOCUMENTS):
            keys_GTT = attended_keys(
                record.of(layer, number),
                range(len(ids)),
                len(ids),
                num_groups=2,
                page_tokens=4,
                window=window,
                device=ids.device,
            )
            seen, full = seen + float(keys_GTT.sum()) / 2, full + len(ids) * (len(ids) + 1) // 2
        assert counted[layer].attended == pytest.approx(seen / full)
        assert math.isnan(counted[layer].pages_per_list) == (window is not None)
    assert counted[1].attended < 0.9


def test_losses_fall_into_their_buckets() -> None:
    dense = [torch.arange(9).double(), torch.arange(3).double()]
    sparse = [dense[0] + 0.5, dense[1]]
    costs = loss_costs(dense, sparse, 4)
    # A document of 10 tokens and one of 4: positions 1 to 3 of both, then 4 to 7 and 8 to 9 of the longer one.
    assert [(c.first, c.end, c.num_tokens) for c in costs] == [(0, 4, 6), (4, 8, 4), (8, 10, 2), (0, 10, 12)]
    assert costs[0].dense == 1.0 and costs[0].difference == pytest.approx(0.25)
    assert costs[1].dense == 4.5 and costs[1].difference == 0.5 and costs[1].standard_error == 0
    assert costs[3].difference == pytest.approx(9 * 0.5 / 12)
    assert costs[0].standard_error == pytest.approx(float(torch.tensor([0.5] * 3 + [0.0] * 3).std()) / math.sqrt(6))


def test_gradients_are_compared_by_layer() -> None:
    dense = {
        "model.layers.0.a": torch.tensor([3.0, 0.0]),
        "model.layers.0.b": torch.tensor([4.0]),
        "base.model.layers.10.c": torch.tensor([1.0]),
        "lm_head.weight": torch.tensor([2.0]),
    }
    sparse = {**dense, "model.layers.0.b": torch.tensor([0.0]), "base.model.layers.10.c": torch.tensor([-1.0])}
    costs = gradient_costs(dense, sparse)
    assert list(costs) == [0, 10, None]
    assert costs[0].cosine == pytest.approx(9 / (5 * 3)) and costs[0].relative_error == pytest.approx(4 / 5)
    assert costs[10].cosine == pytest.approx(-1) and costs[10].relative_error == pytest.approx(2)
    assert costs[None].relative_error == pytest.approx(math.sqrt((16 + 4) / (25 + 1 + 4)))


@pytest.mark.parametrize(
    ("settings", "chunk", "page"),
    [
        ({"q_block": 128, "top_k": 6}, 1024, 32),
        ({"q_block": 64, "top_k": 1, "recent_pages": 0}, 160, 48),
        ({"q_block": 128, "top_k": 5, "page_budget": 9, "sink_pages": 2}, 128, 128),
    ],
)
def test_the_proof_in_low_precision_has_the_pages_and_blocks_of_training(
    settings: dict[str, Any], chunk: int, page: int
) -> None:
    """Even where the text is no longer than what is refused otherwise."""
    asked = config(chunk, page, attention="sparse", **settings)
    shortest = (asked.sink_pages + asked.recent_pages + asked.top_k + 1) * page + chunk
    documents = [torch.arange(length) * 7 % 128 for length in (300, shortest)]
    verify_sparse._check_sparse(asked, documents)
    proof, short = verify_sparse.proof_case(asked, documents, as_trained=True)
    assert (proof.page_tokens, proof.q_block) == (page, asked.q_block)
    record = SelectionRecord()
    training_step(tiny_model(max_position_embeddings=4096), proof, short, on_selection=record)
    assert {selection.lists.block_tokens for selection in record.found.values()} == {asked.q_block}
    small, _ = verify_sparse.proof_case(asked, documents, as_trained=False)
    assert (small.page_tokens, small.q_block) == (16, 64)


def test_the_proof_in_low_precision_passes_at_the_sizes_of_training() -> None:
    asked = config(1024, 64, attention="sparse", recent_pages=1, q_block=128)
    proof, short = verify_sparse.proof_case(asked, [torch.arange(1500) * 7 % 128], as_trained=True)
    report = check_sparse_parity_low_precision(tiny_model(num_hidden_layers=2), proof, short, torch.bfloat16)
    assert report.passed, report.worst


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_on_a_gpu_are_judged_in_their_own_dtype(
    tmp_path: Path, text: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []

    def spy(model: Any, settings: OombConfig, *rest: Any) -> Any:
        judged.append((settings.page_tokens, settings.q_block))
        return check_sparse_parity_low_precision(model, settings, *rest)

    monkeypatch.setattr(verify_sparse, "check_sparse_parity_low_precision", spy)
    folder, path = save_tiny_model(tmp_path / "model", "qwen2", head_dim=64), tmp_path / "report.json"
    sizes = ["--tokens", "2000", "--chunk-tokens", "256", "--page-tokens", "32", "--top-k", "8"]
    settings = ["--attention", "sparse", *sizes, "--dtype", dtype, "--device", "cuda", "--json", str(path)]
    text.write_text(text.read_text() * 2)
    save_tiny_model(folder, "qwen2", head_dim=64, max_position_embeddings=4096)
    assert main(["verify", str(folder), *settings, "--text", str(text)]) == 0
    assert set(json.loads(path.read_text())["exactness"]) == {"float64", dtype}
    assert judged == [(32, 128)]
