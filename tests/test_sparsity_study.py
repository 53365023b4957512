"""The quality study of sparse attention, at tiny size: what it measures is what it says, and all of it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.sparsity import job, losses, report, run
from benchmarks.sparsity.facts import answers
from benchmarks.sparsity.gradients import compare
from benchmarks.sparsity.mass import judge
from benchmarks.sparsity.material import Q4_1, Q8_0, Material, dequantise, load_material
from benchmarks.sparsity.pack import from_interleaved, hub_name
from benchmarks.sparsity.running import Bench, Results, sparse_settings, switched_on, token_losses
from benchmarks.sparsity.scene import Scene, selection_replaced
from benchmarks.sparsity.sizes import TINY
from benchmarks.sparsity.texts import Texts, code_document, fact_document, held_out_documents, load_texts
from benchmarks.sparsity.variants import VARIANTS, Sketch
from tests.harness.tolerance import assert_same_bits, assert_same_values


@pytest.fixture(scope="module")
def material() -> Material:
    return load_material("tiny")


@pytest.fixture(scope="module")
def texts(material: Material) -> Texts:
    return load_texts(material.encode, max_files=TINY.max_files)


@pytest.fixture
def bench(material: Material, texts: Texts, tmp_path: Path) -> Bench:
    results = Results(tmp_path / "rows" / "all.jsonl")
    return Bench(material, texts, TINY, torch.device("cpu"), results, tmp_path / "adapter")


def rows(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "rows" / "all.jsonl").read_text().splitlines()]


# ---- the model ----


def test_quantised_blocks_mean_what_gguf_says() -> None:
    scale, minimum = np.array([0.5], np.float16), np.array([-1.0], np.float16)
    low, high = np.arange(16, dtype=np.uint8), np.arange(15, -1, -1, dtype=np.uint8)
    raw = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), low | high << 4])[None]
    assert dequantise(raw, Q4_1)[0].tolist() == [0.5 * n - 1 for n in [*range(16), *range(15, -1, -1)]]
    numbers = np.arange(-16, 16, dtype=np.int8)
    assert dequantise(np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)])[None], Q8_0)[0].tolist() == [
        0.5 * n for n in range(-16, 16)
    ]


def test_rows_that_gguf_interleaves_come_back() -> None:
    halves = np.arange(12).reshape(12, 1)  # two heads of six rows: the first and second half of each rotate together
    interleaved = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]).reshape(12, 1)
    assert (from_interleaved(interleaved, 2) == halves).all()
    assert hub_name("blk.7.ffn_gate.weight") == "model.layers.7.mlp.gate_proj.weight"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "smol.part1").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"Found: smol\.part1"):
        load_material(str(tmp_path))


# ---- documents ----


def test_documents_are_seeded_and_held_out_files_stay_out(texts: Texts) -> None:
    first = code_document(texts.training, 600, [1, 2])
    assert len(first) == 600
    assert (first == code_document(texts.training, 600, [1, 2])).all()
    assert not (first == code_document(texts.training, 600, [1, 3])).all()
    heads = {bytes(ids[:60]) for ids in texts.training}
    assert not heads & {bytes(ids[:60]) for ids in texts.held_out}
    documents = held_out_documents(texts, "code", 600, 2)
    assert [len(ids) for ids in documents] == [600, 600]
    assert {bytes(ids[:60]) for ids in documents} <= {bytes(ids[:60]) for ids in texts.held_out}


def test_encoded_texts_are_stored_whole(material: Material, tmp_path: Path) -> None:
    made, stored = (load_texts(material.encode, max_files=2, cache=tmp_path / "texts.npz") for _ in range(2))
    assert made.digest == stored.digest
    for one, other in zip(made.training + made.held_out, stored.training + stored.held_out, strict=True):
        assert (one == other).all()


def test_a_fact_stands_where_its_depth_says_and_nowhere_else(material: Material, texts: Texts) -> None:
    document = fact_document(texts, material.encode, 1500, [3], facts=4, questions=3, held_out=False)
    assert len(document.ids) == 1500
    text = bytes(document.ids.astype(np.uint8))
    for (first, end), depth in zip(document.answers, document.depths, strict=True):
        code = text[first:end]
        assert code.isdigit() and len(code) == 6
        places = [i for i in range(len(text)) if text.startswith(code, i)]
        assert len(places) == 2 and places[1] == first
        assert depth < places[0] < depth + 80
        assert (document.labels[first:end] == document.ids[first:end]).all()
    assert (document.labels >= 0).sum() == 3 * 6


# ---- selections ----


def make_scene(page_tokens: int = 4) -> Scene:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=generator)

    return Scene(random(6, 48, 16), random(2, 20 * page_tokens, 16), random(2, 58, 16), page_tokens, 0.25, 32,
                 before_HTD=random(6, 32, 16))  # fmt: skip


def test_exact_masses_are_the_softmax() -> None:
    scene = make_scene()
    pages_GETN, local_GET = scene.exact_masses()
    keys = torch.cat([scene.keys_GND, scene.local_GMD], 1).repeat_interleave(3, 0)
    scores = scene.q_HTD @ keys.mT * scene.scale
    row, column = torch.arange(48)[:, None], torch.arange(58)[None]
    scores[:, :, 80:].masked_fill_(column > row + 10, -torch.inf)
    weights = scores.softmax(-1)
    assert_same_values(pages_GETN.flatten(0, 1), weights[..., :80].unflatten(-1, (20, 4)).sum(-1), "pages")
    assert_same_values(local_GET.flatten(0, 1), weights[..., 80:].sum(-1), "local keys")


def test_every_selection_has_a_weight_for_every_page() -> None:
    scene = make_scene()
    truth_GBN = VARIANTS["oracle"][0](scene)
    local_GB = torch.zeros(2, 2)
    assert_same_values(VARIANTS["product"][0](scene), Sketch(16, 16, 2)(scene), "the library's and its sketch")
    best = judge(truth_GBN, truth_GBN, local_GB, 5)
    assert best[2] == 1.0
    for name, (variant, _) in VARIANTS.items():
        mass_GBN = variant(scene)
        assert mass_GBN.shape == (2, 2, 20), name
        assert mass_GBN.isfinite().all(), name
        covered, share, recall, _ = judge(mass_GBN, truth_GBN, local_GB, 5)
        assert covered <= best[0] + 1e-6 and share <= best[1] + 1e-6 and recall <= 1.0, name


def test_a_page_that_all_look_at_is_found() -> None:
    scene = make_scene()
    liked_GD = torch.tensor([1.0, -1.0]).repeat(2, 8)
    scene.keys_GND[:, 28:32] += 2 * liked_GD[:, None]  # page 7
    scene.q_HTD += 4 * liked_GD.repeat_interleave(3, 0)[:, None]
    for name in set(VARIANTS) - {"nearest", "causal"}:
        assert (VARIANTS[name][0](scene).argmax(-1) == 7).all(), name


@pytest.mark.parametrize(
    ("variant", "setting"),
    [("product", {}), ("causal", {"causal_selection": True}), ("per-layer", {"select_per": "layer"})],
)
def test_the_librarys_selections_give_the_librarys_losses(
    bench: Bench, variant: str, setting: dict[str, object]
) -> None:
    """The study's way of replacing a selection changes nothing else."""
    model = bench.model(long=True)
    ids = held_out_documents(bench.texts, "code", 512, 1)[0]
    chosen = sparse_settings(TINY, 128, top_k=3, page_tokens=16)
    with switched_on(model, chosen | setting):
        wanted = token_losses(model, ids, sparse=True)
    with switched_on(model, chosen), selection_replaced(losses.selecting_by(VARIANTS[variant][0])):
        found = token_losses(model, ids, sparse=True)
    assert_same_bits(found, wanted)
    with switched_on(model, chosen), selection_replaced(losses.selecting_by(VARIANTS["nearest"][0])):
        assert not torch.equal(token_losses(model, ids, sparse=True), wanted)


def test_equal_budgets_by_layer_are_the_usual_top_k(bench: Bench) -> None:
    model = bench.model(long=True)
    ids = held_out_documents(bench.texts, "code", 512, 1)[0]
    with switched_on(model, sparse_settings(TINY, 64, top_k=3, page_tokens=16)):
        usual = token_losses(model, ids, sparse=True)
        with losses.top_k_by_layer([3] * 6):
            assert_same_bits(token_losses(model, ids, sparse=True), usual)
        with losses.top_k_by_layer([3, 3, 3, 3, 3, 1]):
            assert not torch.equal(token_losses(model, ids, sparse=True), usual)


# ---- figures ----


def test_cosine_and_error_of_gradients() -> None:
    exact = {"0": torch.tensor([3.0, 4.0]), "1": torch.tensor([0.0, 1.0])}
    found = {"0": torch.tensor([6.0, 8.0]), "1": torch.tensor([1.0, 0.0])}
    compared = compare(found, exact)
    assert compared["0"] == pytest.approx((1.0, 1.0))
    assert compared["1"] == pytest.approx((0.0, 2**0.5))
    assert compared["all"] == pytest.approx((50 / (101 * 26) ** 0.5, (27 / 26) ** 0.5))


@pytest.mark.parametrize("sparse", [False, True])
def test_exact_match_is_that_of_full_logits(bench: Bench, sparse: bool) -> None:
    """The head is asked for targets only; with every page selected the plain model says the same."""
    model = bench.model(long=True)
    document = fact_document(bench.texts, bench.material.encode, 512, [5], facts=3, questions=2, held_out=True)
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(document.ids, dtype=torch.long)[None]).logits[0]
    for first, end in document.answers:  # make the first answer right and leave the second
        document.ids[first:end] = logits[first - 1 : end - 1].argmax(-1).numpy()
        document.labels[first:end] = document.ids[first:end]
        break
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(document.ids, dtype=torch.long)[None]).logits[0]
    wanted = [
        int((logits[first - 1 : end - 1].argmax(-1).numpy() == document.labels[first:end]).all())
        for first, end in document.answers
    ]
    settings = sparse_settings(TINY, 64, top_k=32, page_tokens=16)
    with switched_on(model, settings):
        found = answers(model, document, sparse=sparse)
    assert found["exact"] == wanted
    first, end = document.answers[1]
    loss = torch.nn.functional.cross_entropy(
        logits[first - 1 : end - 1], torch.as_tensor(document.ids[first:end]).long()
    )
    assert found["answers"][1] == pytest.approx(float(loss), abs=1e-4)


# ---- everything runs ----


@pytest.fixture
def all_rows(bench: Bench, tmp_path: Path) -> Iterator[report.Rows]:
    bench.results.add("setup", model="tiny", liger=False)
    for part in job.PLAIN.values():
        part(bench)
    for name in ("dense", "top4", "top4-causal"):
        job.RUNS["curve"](bench, name, 0)
    job.RUNS["after"](bench, "top4", 0)
    for name in ("dense", "top4"):
        job.RUNS["facts"](bench, name, 0)
    yield report.Rows(tmp_path / "rows")


def test_all_parts_run_and_their_rows_make_the_page(all_rows: report.Rows, tmp_path: Path) -> None:
    page = tmp_path / "sparsity.md"
    page.write_text("\n".join(f"<!-- table: {name} -->\nold\n<!-- end -->" for name in report.TABLES))
    for _ in range(2):  # the markers stay
        page.write_text(report.filled(page.read_text(), all_rows))
    text = page.read_text()
    assert "old" not in text and report.PENDING not in text
    assert text.count("<!-- end -->") == len(report.TABLES)
    from benchmarks.sparsity.plots import draw_all

    assert {path.name for path in draw_all(all_rows, tmp_path)} == {
        f"sparsity_{name}.png" for name in ("loss", "layers", "selection", "training")
    }
    covered = {(row["variant"], row["top_k"]): row for row in all_rows.of("mass", page=16, q_block=128)}
    for layer in range(6):
        assert covered["product", 4]["covered"][layer] <= covered["oracle", 4]["covered"][layer] + 1e-6
        assert covered["product", 2]["covered"][layer] <= covered["product", 4]["covered"][layer] + 1e-6
    assert all_rows.of("gradient", name="dense, other chunks")[0]["cosine"][0] == pytest.approx(1.0, abs=1e-5)
    assert [row["step"] for row in all_rows.of("curve_step", run="top4")] == [1, 2, 3]


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    page = Path(report.HERE).parents[1] / "docs" / "sparsity.md"
    text = page.read_text(encoding="utf-8")
    assert report.filled(text, report.Rows(report.HERE / "results")) == text


def test_the_driver_collects_the_rows_of_its_jobs_and_names_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"run native_grid curve:top0:0 --source tiny --size tiny --work {tmp_path}/work --out {tmp_path}/out"
    monkeypatch.setattr(sys, "argv", arguments.split())
    assert run.main() == 1
    assert "failed: curve:top0:0\n" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["job"] for row in found} == {"setup", "native_grid"}
    assert {row["study"] for row in found} == {"setup", "loss"}


@pytest.mark.parametrize("name", ["nothing", "curve", "curve:top16", "curve:top16:x", "nothing:top16:1"])
@pytest.mark.parametrize("command", [run, job])
def test_a_job_that_there_is_not_is_refused_before_anything_runs(
    command: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver waited minutes for its adapter, and said that all was done."""
    options = ["--source", "tiny", "--work", str(tmp_path), *(["--out", str(tmp_path)] if command is run else [])]
    monkeypatch.setattr(sys, "argv", ["study", name, *options])
    with pytest.raises(SystemExit) as stop:
        command.main()
    assert stop.value.code == 2 and f"got '{name}'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_job_of_a_group_has_a_name_that_is_known() -> None:
    assert all(job.job_named(name) == name for names in run.GROUPS.values() for name in names)


def test_names_in_a_plot_cover_no_point_and_no_other_name() -> None:
    from benchmarks.sparsity import plots

    figure, (axes,) = plots._axes(1)
    points = {f"selection-{i}": (0.5 + 0.001 * (i % 3), 0.05 + 0.0004 * i) for i in range(9)} | {"far": (0.2, 0.2)}
    for point in points.values():
        axes.plot(*point, marker="o")
    axes.margins(0.2)
    plots._name_points(axes, points)
    boxes = [plots.Text.get_window_extent(text) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == list(points)
    assert all(box.count_overlaps(boxes) == 1 for box in boxes), "each overlaps with itself alone"
    dots = axes.transData.transform(list(points.values()))
    assert not any(box.contains(*dot) for box in boxes for dot in dots)
    plots.plt.close(figure)
