"""``oomb estimate`` as it is typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.cli import main
from oomb_accel.cli.estimate import token_count
from oomb_accel.plan.known import KNOWN
from oomb_accel.plan.limits import LONGEST
from oomb_accel.plan.sizes import GIB
from tests.docs.messages import ROOT


def run(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    code = main(["estimate", *words.split()])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def report(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, f"{words} --json")[1])
    return found


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "Qwen/Qwen2.5-7B --length 1M --attention sparse --page_grad_dtype bfloat16 --price 3.5 --keep_outputs false"
    code, text = run(capsys, words)
    assert code == 0
    for part in (
        *("7.62B parameters, LoRA r=16 (40.4M trained)", "1,048,576 tokens, sparse attention (top_k 64)"),
        *("weights", "optimizer", "activations of one chunk", "logits of one chunk", "page gradients", "K and V"),
        *("page lists", "CUDA context", "pinned", "process", "over PCIe, GB to the GPU"),
        *("linear layers", "tokens per second and GPU", "cost of a million tokens"),
        *(
            "It fits.",
            "longest document that fits",
            "Qwen/Qwen2.5-7B are made for 131,072 tokens by its config",
            "Page lists are taken as random",
            "measured on H200s",
        ),
    ):
        assert part in text, part
    assert "It does not fit" not in text and "makes it fit" not in text


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "qwen2.5-7b --length 2M --attention sparse --page_grad_dtype bfloat16 --gpu h200")
    assert code == 1
    assert "It does not fit. Host memory is too small" in text
    assert "Any line of these makes it fit:" in text and "page_dtype: float8" in text


REFUSED = (
    "qwen2.5-7b --length 2M --attention sparse --page_grad_dtype bfloat16",
    "qwen2.5-7b --length 64K --zero 2 --optimizer_offload --full --host_gib 32",
    "qwen2.5-7b --length 512K --keep_outputs true",
    "qwen2.5-72b --length 64K --gpus 2 --zero 3",
    "qwen2.5-72b --length 8K --gpu rtx3090",
)
"""For want of host memory, for pages and for the optimizer, and of GPU memory, for outputs, a chunk and the model."""
_NO_STEP = ("seconds", "tokens_per_second", "up_bytes", "down_bytes", "cost_per_million_tokens")


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_plan_does_not_look_like_one_that_fits(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """No time, no traffic, no cost: there is no such step. Said above the tables, not below them alone."""
    code, text = run(capsys, f"{words} --price 3.5")
    verdict = " ".join(text.partition("It does not fit. ")[2].split())
    tables = text.partition("It does not fit. ")[0]
    first = next(line for line in tables.splitlines() if line.startswith("does not fit: "))
    assert code == 1 and verdict.startswith(first.removeprefix("does not fit: "))
    assert tables.index(first) < tables.index("GPU memory")
    for what in (
        "GPU memory that it would take, GiB of ",
        "process would take, GiB\n",
        "Time of a step: does not fit\n",
    ):
        assert what in tables, tables
    for part in ("linear layers", "tokens per second", "over PCIe", "cost", "up to", "on their way"):
        assert part not in tables, part
    # What is kept where there is room gives way.
    kept = [line for line in tables.splitlines() if line.startswith("  kept")]
    assert ["attention outputs" in line for line in kept] == [True] * ("keep_outputs true" in words)


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_plan_as_json(capsys: pytest.CaptureFixture[str], words: str) -> None:
    found, fitting = report(capsys, f"{words} --price 3.5"), report(capsys, "qwen2.5-7b --length 8K --price 3.5")
    assert found["fits"] is False and set(fitting) <= set(found)
    assert all(found[name] is None and fitting[name] is not None for name in _NO_STEP)
    device = found["device_bytes"]
    assert device["total"] == sum(size for part, size in device.items() if part not in ("total", "available"))
    assert all(change["seconds"]["total"] > 0 for change in found["suggestions"])
    if "keep_outputs" not in words:
        assert sum(size for part, size in device.items() if part.startswith("kept")) == 0
        assert sum(number for name, number in found.items() if name.endswith("_chunks")) == 0


def test_what_a_refused_plan_would_take_on_text_has_no_time_either(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen2.5-7b --attention sparse --top_k 16 --page_grad_dtype bfloat16"
    said = "Page lists are taken as random, which is the worst case."
    for length, fits in (("512K --device_pages_gib 8", True), ("4M", False)):
        text = " ".join(run(capsys, f"{words} --length {length}")[1].split())
        assert said in text and ("(--distinct 0.15), a step takes" in text) == fits, text


@pytest.mark.parametrize("setting", ["--device_pages_gib 4", "--host_memory_gib 8"])
def test_memory_settings_that_contradict_each_other(capsys: pytest.CaptureFixture[str], setting: str) -> None:
    code, text = run(capsys, f"qwen2.5-7b --length 64K --offload false {setting}")
    assert code == 2 and "no meaning with" in text and "offload=False" in text
    assert run(capsys, f"qwen2.5-7b --length 64K {setting}")[0] == 0


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        ("--device_pages_gib 300", "more than the GPU has", "--gpu_gib"),
        ("--host_memory_gib 300", "more than this machine can give", "--host_gib 304"),
        ("--host_memory_gib 126", "more than this machine can give", "--host_gib 130"),
        ("--gpus 8 --zero 2 --host_gib 32 --host_memory_gib 20", "to all its ranks", "--host_gib 164"),
        ("--gpus 8 --zero 2 --host_gib 32 --host_memory_gib 4", "Asked for 8 x 4 GiB", "--host_gib 35"),
    ],
)
def test_more_than_the_machine_has(capsys: pytest.CaptureFixture[str], words: str, what: str, remedy: str) -> None:
    """Either remedy will do."""
    code, text = run(capsys, f"qwen2.5-7b --length 64K {words}")
    assert code == 2 and what in text and remedy in text
    first = words.replace("--host_gib 32", "")
    if "host_memory" in words:
        assert run(capsys, f"qwen2.5-7b --length 64K {first} {remedy}")[0] == 0
        (lower,) = re.findall(r"host_memory_gib=([\d.]+) or less", " ".join(text.split()))
        assert run(capsys, f"qwen2.5-7b --length 64K {re.sub('memory_gib .*', f'memory_gib {lower}', words)}")[0] == 0


def test_pinned_memory_stays_within_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.1-8b --page_grad_dtype bfloat16 --host_memory_gib 118"
    longest = report(capsys, f"{words} --length 64K")["largest_tokens"]
    pinned = report(capsys, f"{words} --length {longest}")["pinned_bytes"]
    assert 116 * GIB < pinned["K, V and page gradients"] <= 118 * GIB


def test_kept_outputs_on_the_host_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen2.5-7b --length 256K --page_grad_dtype bfloat16"
    assert "kept outputs, pinned" in run(capsys, words)[1]
    assert "kept outputs, pinned" not in run(capsys, f"{words} --offload false")[1]


def test_base_weights_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "qwen2.5-7b --length 64K --base_dtype float8")
    assert code == 0 and "base weights in float8" in " ".join(text.split()) and "weights in 8 bits" in text
    assert run(capsys, "qwen2.5-7b --length 64K --base_dtype float8 --full")[0] == 2
    assert "in float8" not in " ".join(run(capsys, "qwen2.5-7b --length 64K")[1].split())


@pytest.mark.parametrize(
    "words",
    [
        "qwen2.5-7b --length 2M --attention sparse --page_grad_dtype bfloat16",
        "qwen3-8b --length 2M",
        "qwen2.5-7b --length 512K --attention sparse --chunk_tokens auto --page_grad_dtype auto",
        "qwen2.5-72b --length 128K --gpus 8 --zero 3 --host_gib 560",
        "qwen2.5-72b --length 128K --gpus 8 --zero 3 --host_gib 560 --chunk_tokens auto",
        "qwen2.5-0.5b --gpu a100 --gpu_gib 40",
    ],
)
def test_no_line_is_wider_than_100(capsys: pytest.CaptureFixture[str], words: str) -> None:
    _, text = run(capsys, words)
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_host_memory_has_a_least_and_a_most(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The most is what may be pinned, in a recipe too; a limit below the least is refused, and is among the changes."""
    words = "qwen2.5-7b --length 512K --attention sparse --top_k 16 --page_grad_dtype bfloat16 --device_pages_gib 8"
    found = report(capsys, f"{words} --host_memory_gib 46")
    least = found["pinned_bytes"]["K, V and page gradients"]
    assert least < 46 * GIB == found["host_most_bytes"] - found["pageable_bytes"]["process"]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model_name_or_path: qwen2.5-7b\nmax_length: 512K\noomb: {attention: sparse, page_grad_dtype: bfloat16, "
        "device_pages_gib: 8, host_memory_gib: 20}\n"
    )
    code, text = run(capsys, str(recipe))
    assert code == 1 and "20.0 GiB may be used (host_memory_gib)" in text and "  host_memory_gib: auto " in text
    (number,) = re.findall(r"Set host_memory_gib=([\d.]+) or more, or 'auto'", text)
    assert run(capsys, f"{recipe} --host_memory_gib {number}")[0] == 0
    assert run(capsys, f"{recipe} --host_memory_gib {float(number) - 0.1}")[0] == 1
    _, text = run(capsys, f"{recipe} --host_memory_gib 60")
    assert "It fits" in text and "and up to, where there is room" in text


def test_distinct_pages_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"step": n, "distinct_share": share} for n, share in enumerate((0.1, 0.2, None), 1)]
    fields = {"loss": 1, "grad_norm": 1, "tokens": 9, "tokens_per_second": 1, "seconds": 1, "host_gib": 1}
    lines = [json.dumps({k: v for k, v in row.items() if v is not None} | fields) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    words = "qwen2.5-7b --length 2M --attention sparse --top_k 16 --page_grad_dtype bfloat16"
    by_run = report(capsys, f"{words} --distinct {tmp_path}")
    assert by_run["seconds"] == report(capsys, f"{words} --distinct 0.15")["seconds"]
    assert by_run["chosen"] == [f"distinct=0.15, as in {tmp_path}"]
    (tmp_path / "metrics.jsonl").write_text(lines[-1] + "\n")
    code, text = run(capsys, f"{words} --distinct {tmp_path}")
    assert code == 2 and "1 step(s), none of them with distinct_share" in text
    code, text = run(capsys, f"{words} --distinct nowhere")
    assert code == 2 and "There is no folder 'nowhere'" in text


def test_other_gpus_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(run(capsys, "qwen2.5-0.5b --gpu a100 --gpu_gib 40")[1].split())
    assert "GPU memory, GiB of 40.0" in text and "Rates are scaled" in text and "not measured on" in text


_SCALED = "Rates are scaled from an H200's by the makers' peaks"


@pytest.mark.parametrize(
    ("words", "name", "rates"),
    [
        ("--gpu_gib 48 --tflops 300", "GPU with 48 GiB and 300 TFLOP/s", _SCALED),
        ("--gpu_gib 48", "GPU with 48 GiB and 989 TFLOP/s", "Rates are those of an H200"),
        ("--gpu a100 --gpu_gib 39.5", "GPU with 39.5 GiB and 312 TFLOP/s", _SCALED),
        ("--gpu a100", "A100 80 GB", _SCALED),
    ],
)
def test_a_gpu_is_named_once_in_a_line(capsys: pytest.CaptureFixture[str], words: str, name: str, rates: str) -> None:
    text = " ".join(run(capsys, f"qwen2.5-0.5b {words}")[1].split())
    assert f"1 x {name}, 128 GiB of host memory" in text and "this GPU (" not in text
    assert f"{rates}: not measured on the {name}." in text


def test_a_document_beyond_all_estimates_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: qwen2.5-7b\nmax_length: 16M\nper_device_train_batch_size: 2\n")
    for words in ("--length 16777217", "--length 999999999999", f"--length {10**13}", f"--length {'9' * 99}"):
        code, text = run(capsys, f"qwen2.5-7b {words}")
        assert code == 2 and "at least 2 tokens, and at most 16,777,216 (16M)" in " ".join(text.split())
    code, text = run(capsys, str(recipe))
    assert code == 2 and "at most 16,777,216 (16M)" in " ".join(text.split()) and "Got '33554432'" in text
    assert token_count("16M") == LONGEST


def test_the_same_limit_holds_for_all_that_is_counted_in_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of chunks and pages, and in a recipe."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: qwen2.5-7b\nmax_length: 17M\n")
    for words in ("qwen2.5-7b --chunk_tokens 17M", "qwen2.5-7b --page_tokens 17M --chunk_tokens 16M", str(recipe)):
        code, text = run(capsys, words)
        assert code == 2 and "16,777,216" in text and "10^12" not in text, text


def test_weights_are_as_wide_as_in_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `oomb train` loads them; what is said counts more."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(KNOWN["qwen2.5-0.5b"] | {"torch_dtype": "float32"}))
    wide = report(capsys, f"{config} --length 8K")["device_bytes"]["weights"]
    narrow = report(capsys, "qwen2.5-0.5b --length 8K")["device_bytes"]["weights"]
    assert wide > 1.9 * narrow
    assert report(capsys, f"{config} --length 8K --torch_dtype bfloat16")["device_bytes"]["weights"] == narrow
    assert report(capsys, f"{config} --length 8K --zero 2")["device_bytes"]["weights"] < 1.1 * narrow


def test_both_spellings_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen2.5-1.5b --length 64K --host_gib 64 --page_grad_dtype=bfloat16 --chunk_tokens 4096"
    assert report(capsys, words) == report(capsys, words.replace("_gib", "-gib").replace("_tokens", "-tokens"))


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "qwen2.5-1.5b --length 64K --full --zero 2 --gpus 2 --price 2")
    device = found["device_bytes"]
    assert device["total"] == sum(size for part, size in device.items() if part not in ("total", "available"))
    assert found["seconds"]["total"] == pytest.approx(sum(found["seconds"].values()) / 2)
    assert found["fits"] is True and found["suggestions"] == [] and found["cost_per_million_tokens"] > 0


def test_all_weights_are_trained_in_fp32_as_by_oomb_train(capsys: pytest.CaptureFixture[str]) -> None:
    plain, zero, bf16 = (
        report(capsys, f"qwen2.5-1.5b --full {words}")["device_bytes"]["weights"]
        for words in ("", "--zero 2", "--torch_dtype bfloat16")
    )
    assert plain == 3 * zero and zero == bf16
    assert report(capsys, "qwen2.5-1.5b --full") == report(capsys, "qwen2.5-1.5b --lora_r 0")


def test_a_chunk_of_its_own_choice(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "qwen3-8b --length 128K --gpu 4090 --chunk_tokens auto")
    assert found["fits"] and found["chunk_tokens"] < 8192


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("131072", 131072),
        ("131,072", 131072),
        ("131_072", 131072),
        ("128K", 131072),
        ("2k", 2048),
        ("1.5M", 1572864),
    ],
)
def test_lengths(text: str, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "ten", "1", "-5", "1G", "1e6", "1,2,3K", "1,2,3", "1__0K", "0.3K", "1.K"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, and at most 16,777,216"):
        token_count(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("qwen2.5-7b --lenght 1M", "Did you mean '--length'?"),
        ("qwen2.5-7b --gpu h20", "Did you mean 'h200'?"),
        ("qwen2.5-7b --chunk_tokens 64", "Use --chunk_tokens 128 or more."),
        ("qwen2.5-7b --optimizer_offload", "Use --zero 2 --optimizer_offload."),
        ("qwen2.5-7b --top_k 0", "--top_k is too small."),
        ("qwen2.5-7b --top_k 64 --page_budget 32", "Use --page_budget 64 or more."),
        ("qwen2.5-7b --distinct 25", "Use 0.25, for example."),
        ("qwen2.5-7b --full --lora_r 8", "Got --full with --lora_r 8."),
        ("qwen2.5-7b --top-k 16", "Use --attention sparse, or leave --top_k out."),
        ("qwen2.5-7b --length soon", "Write 131072, 128K or 1M"),
        ("qwen2.5-7b --tokens 1M", "Did you mean '--length'?"),
        ("qwen2.5-7b --max-seq-length 1M", "Did you mean '--length'?"),
        ("qwen2.5-7b tokens 1M", "Did you mean '--length'?"),
        ("qwen2.5-7b lenght 1M", "Unknown word 'lenght' on the command line."),
        ("qwen2.5-7b lenght 1M", "Did you mean '--length'?"),
        ("qwen2.5-7b page-tokens 64", "Did you mean '--page_tokens'?"),
        ("qwen2.5-7b sparse", "Did you mean '--attention sparse'?"),
        ("qwen2.5-7b --attention spars", "Unknown value 'spars' for --attention."),
        ("qwen2.5-7b --attention spars", "Did you mean 'sparse'?"),
        ("qwen2.5-7b --zero 5", "Valid values: 0, 1, 2, 3."),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    code, text = run(capsys, words)
    assert code == 2 and message in text and "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3


@pytest.mark.parametrize("command", ["verify", "bench step", "eval"])
def test_the_length_of_other_commands(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "qwen2.5-7b", "--max_length", "64K"]) == 2
    assert "Did you mean '--tokens'?" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "--help"])
    assert stop.value.code == 0 and "usage: oomb estimate" in capsys.readouterr().out


def test_help_says_what_holds_where_an_option_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "5000")
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    options = capsys.readouterr().out.split("\n  --")[1:]
    of = {f"--{option.split()[0]}": " ".join(option.split()) for option in options}
    known = {
        "length": "128K",
        "lora_r": 16,
        "torch_dtype": "auto",
        "gpu": "h200",
        "gpus": 1,
        "host_gib": 128,
        "zero": 0,
    }
    config = {"attention": "dense", "top_k": 64, "chunk_tokens": 8192, "page_tokens": 128, "keep_outputs": "auto"}
    config |= {"page_dtype": "model", "page_grad_dtype": "float32", "base_dtype": "model", "offload": "auto"}
    for name, value in (known | config).items():
        assert f"default {value}" in of[f"--{name}"], of[f"--{name}"]
    for name in ("page_budget", "device_pages_gib", "host_memory_gib", "gpu_gib", "tflops", "price", "distinct"):
        assert "left out" in of[f"--{name}"], of[f"--{name}"]


SETTINGS = {"OOMB_CHUNK_TOKENS": "4K", "OOMB_ATTENTION": "sparse", "OOMB_TOP_K": "16", "OOMB_RECENT_PAGES": "8"}


def test_settings_of_the_environment_hold_for_a_model_as_for_a_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below the options, and said in the report."""
    words = "qwen2.5-7b --length 256K"
    typed = report(capsys, f"{words} --attention sparse --top_k 16 --chunk_tokens 4K")
    preset = tmp_path / "preset.yaml"
    preset.write_text("page_grad_dtype: bfloat16\n")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    found = report(capsys, words)
    assert found["seconds"] != typed["seconds"]  # of recent pages, which are no option
    told = ["chunk_tokens=4096 (OOMB_CHUNK_TOKENS)", "attention=sparse (OOMB_ATTENTION)", "top_k=16 (OOMB_TOP_K)"]
    assert found["chosen"] == [*told, "recent_pages=8 (OOMB_RECENT_PAGES)"]
    monkeypatch.delenv("OOMB_RECENT_PAGES")
    assert report(capsys, words) == typed | {"chosen": told}
    assert report(capsys, f"{words} --chunk-tokens=8K --attention dense")["chunk_tokens"] == 8192
    monkeypatch.setenv("OOMB_CONFIG", str(preset))
    _, text = run(capsys, f"{words} --chunk-tokens=8K")
    assert f"chosen: page_grad_dtype=bfloat16 ({preset})" in " ".join(text.split()) and "OOMB_CHUNK_TOKENS" not in text
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: qwen2.5-7b\nmax_length: 256K\noomb: {chunk_tokens: 8192}\n")
    _, text = run(capsys, str(recipe))
    assert "chunks of 4,096" in text and "chosen: chunk_tokens=4096 (OOMB_CHUNK_TOKENS)" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OOMB_CHUNK_TOKNS", "8192", "OOMB_CHUNK_TOKENS"),
        ("OOMB_CHUNK_TOKENS", "many", "In OOMB_CHUNK_TOKENS"),
        ("OOMB_ENABLED", "false", "There are no chunks to estimate."),
    ],
)
def test_wrong_settings_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    code, text = run(capsys, "qwen2.5-7b --length 8K")
    assert code == 2 and said in text and len(text.strip().splitlines()) == 3, text


def test_automatic_settings_are_told_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen2.5-7b --length 1M --chunk_tokens auto --page_grad_dtype auto --keep_outputs false"
    _, text = run(capsys, words)
    assert "chosen: chunk_tokens=8192 for 1,048,576 tokens" in text
    assert "chosen: page_grad_dtype=bfloat16 for 1,048,576 tokens" in text and "their gradients bfloat16" in text
    assert len(report(capsys, words)["chosen"]) == 2 and report(capsys, "qwen2.5-7b")["chosen"] == []


def test_a_page_budget_is_suggested_where_gradients_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen2.5-7b --length 4M --attention sparse --top_k 16 --page_dtype float8 --page_grad_dtype bfloat16"
    code, text = run(capsys, words)
    assert code == 1 and "Set page_budget lower" in text and "page_budget: 128 " in text
    assert run(capsys, f"{words} --page_budget 128")[0] == 0


RECIPE = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
data_path: nowhere.jsonl
max_length: 65536
per_device_train_batch_size: 2
lora_r: 32
rope_parameters: {rope_type: yarn, factor: 8.0, original_max_position_embeddings: 32768}
oomb: {chunk_tokens: 4096, attention: sparse, top_k: 16, recent_pages: 8, offload: false, page_grad_dtype: bfloat16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_a_recipe_says_what_options_say(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    options = "--length 131072 --lora_r 32 --chunk_tokens 4096 --attention sparse --top_k 16 --offload false"
    typed = report(capsys, f"qwen2.5-7b {options} --page_grad_dtype bfloat16")
    read = report(capsys, recipe)
    assert read["tokens"] == 131072 and read["chunk_tokens"] == 4096
    assert read["device_bytes"]["optimizer"] == typed["device_bytes"]["optimizer"]
    past = "attention to the past"
    assert read["seconds"][past] > typed["seconds"][past]  # of recent pages, which are no option
    Path(recipe).write_text(RECIPE.replace("recent_pages: 8, ", ""))
    same = report(capsys, recipe)
    assert same == typed
    assert "made for 262,144 tokens" in run(capsys, recipe)[1]  # with its RoPE


def test_two_lengths_on_the_command_line(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    """Neither wins silently; over that of the recipe, one of them goes. Two documents are one step."""
    for words in ("--length 64K --max_length 48K", "--max-length=48K --length=64K"):
        code, text = run(capsys, f"{recipe} {words}")
        assert code == 2 and "Two options say how long documents are." in text
        assert "Got --length 64K, and --max_length 49,152 with 2 documents in a batch" in " ".join(text.split())
        assert "98304" in text
    assert report(capsys, f"{recipe} --length 96K --max_length 48K")["tokens"] == 96 << 10
    assert report(capsys, f"{recipe} --length 64K")["tokens"] == 64 << 10
    assert report(capsys, f"{recipe} --max_length 48K")["tokens"] == 96 << 10


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ("--oomb.chunk_tokens 4K --chunk_tokens 8K", "--chunk_tokens 8192 and --oomb.chunk_tokens 4096"),
        ("--attention dense --oomb.attention=sparse", "--attention dense and --oomb.attention sparse"),
        ("--oomb.keep-outputs false --keep_outputs true", "--keep_outputs true and --oomb.keep_outputs false"),
        ("--oomb.host_memory_gib 8 --host_memory_gib 9 --offload auto", "--host_memory_gib 9.0 and --oomb.host_memory"),
    ],
)
def test_a_setting_under_both_of_its_names(
    capsys: pytest.CaptureFixture[str], recipe: str, words: str, got: str
) -> None:
    Path(recipe).write_text(RECIPE.replace("offload: false, ", ""))
    code, text = run(capsys, f"{recipe} {words}")
    assert code == 2 and "stands twice on the command line" in text and got in text


def test_a_setting_under_both_of_its_names_with_one_value(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert run(capsys, f"{recipe} --oomb.chunk_tokens 4096 --chunk_tokens 4K")[0] in (0, 1)


def test_the_revision_of_a_recipe_is_the_one_that_is_read(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshots = tmp_path / "cache" / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots"
    for commit, model in {"abc": "qwen2.5-0.5b", "def": "qwen2.5-1.5b"}.items():
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").write_text(json.dumps(KNOWN[model]))
    Path(recipe).write_text(f"{RECIPE}revision: abc\n")
    assert "0.49B parameters" in run(capsys, recipe)[1]
    assert "1.54B parameters" in run(capsys, f"{recipe} --revision def")[1]


def test_places_may_be_given_with_a_recipe(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert report(capsys, f"{recipe} --data_path mine.txt --output-dir=mine") == report(capsys, recipe)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--length 32K", "tokens", 32768),
        ("--max_length 8192", "tokens", 16384),
        ("--chunk-tokens 2048", "chunk_tokens", 2048),
        ("--oomb.chunk_tokens=2048", "chunk_tokens", 2048),
    ],
)
def test_options_go_over_a_recipe(
    capsys: pytest.CaptureFixture[str], recipe: str, words: str, name: str, value: int
) -> None:
    assert report(capsys, f"{recipe} {words}")[name] == value
    assert "LoRA r=8 " in run(capsys, f"{recipe} --lora_r 8 {words}")[1]
    assert "all weights" in run(capsys, f"{recipe} --full {words}")[1]


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("max_length: 65536", ""), "", "Add --length 128K"),
        (("oomb: {", "oomb: {enabled: false, "), "", "Add --oomb.enabled true"),
        (("lora_r", "lora_rank"), "", "Did you mean 'lora_r'?"),
        (("", ""), "--lenght 3", "Unknown option '--lenght'"),
        (("", ""), "--chunk_tokens 64", "Use --chunk_tokens 128 or more."),
    ],
)
def test_mistakes_in_recipes(
    capsys: pytest.CaptureFixture[str], recipe: str, change: tuple[str, str], words: str, message: str
) -> None:
    Path(recipe).write_text(RECIPE.replace(*change) if change[0] else RECIPE)
    code, text = run(capsys, f"{recipe} {words}")
    assert code == 2 and message in text and len(text.strip().splitlines()) == 3, text


def test_no_torch_for_a_recipe(recipe: str) -> None:
    """It takes seconds, which nobody who asks a dozen times should wait."""
    code = "import sys; from oomb_accel.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "estimate", recipe], check=False).returncode == 0


@pytest.mark.parametrize("command", ["estimate", "train"])
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--max_steps 8 {}", "{} --max_steps 8"),
        ("--dry-run {} --oomb_config preset.yaml", "{} --dry-run --oomb_config preset.yaml"),
        ("--oomb_config preset.yaml {}", "{} --oomb_config preset.yaml"),
        ("qwen2.5-7b {}", "{}"),
        ("--json {}", "{} --json"),
    ],
)
def test_a_recipe_that_is_not_the_first_word(
    capsys: pytest.CaptureFixture[str], recipe: str, command: str, words: str, meant: str
) -> None:
    assert main([command, *words.format(recipe).split()]) == 2
    what, _, remedy = capsys.readouterr().err.splitlines()
    assert what.endswith("The recipe must be the first word.")
    assert remedy == f"  Write oomb {command} {meant.format(recipe)}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu_gib 48", ["tflops=989 as of the H200: give --tflops for this GPU's own"]),
        ("--gpu a100 --gpu_gib 40", ["tflops=312 as of the A100 80 GB"]),
        ("--tflops 300", ["gpu_gib=139.8 as of the H200"]),
        ("--gpu_gib 48 --tflops 300 --page_dtype float8", ["8-bit floats as of the H200"]),
        ("--gpu_gib 48 --tflops 300", []),
        ("--gpu a100", []),
    ],
)
def test_what_is_taken_from_another_gpu_is_said(
    capsys: pytest.CaptureFixture[str], words: str, said: list[str]
) -> None:
    chosen = report(capsys, f"qwen2.5-7b --length 32K {words}")["chosen"]
    assert len(chosen) == len(said) and all(part in line for part, line in zip(said, chosen, strict=True)), chosen
    text = run(capsys, f"qwen2.5-7b --length 32K {words}")[1]
    assert all(f"chosen: {part}" in text for part in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [("--lora_dropout 0.1", True), ("--use_dora true", True), ("--lora_dropout 0.1 --full", False), ("", False)],
)
def test_dropout_and_dora_are_not_counted_and_it_says_so(
    capsys: pytest.CaptureFixture[str], recipe: str, words: str, said: bool
) -> None:
    text = " ".join(run(capsys, f"{recipe} {words}")[1].split())
    assert ("Adapters with dropout or DoRA are estimated as plain LoRA that PEFT runs" in text) == said, text


@pytest.mark.parametrize(("page", "rows"), [("README.md", 2), ("docs/benchmarks.md", 3), ("docs/settings.md", 3)])
def test_rows_with_kept_results_on_the_host_name_the_setting_that_gives_them(
    capsys: pytest.CaptureFixture[str], page: str, rows: int
) -> None:
    """Half of the host, which is what "auto" gives, was enough for them on the host where they were measured only."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"(262,144|524,288)[^\n]*?(?:\n[^\n]*?)?(\d+) GiB[^(\n]*\(`host_memory_gib=(\d+)`", text)
    assert {(tokens, gib) for tokens, gib, _ in found} == set(_KEPT_ON_HOST[:rows])
    for tokens, gib, setting in found:
        words = (
            f"--length {tokens} --attention sparse --top_k 16 --page_grad_dtype bfloat16 --host_memory_gib {setting}"
        )
        kept = report(capsys, f"qwen2.5-7b {words} --host_gib 251")["pinned_bytes"]["kept outputs"]
        assert kept == pytest.approx(float(gib) * GIB, rel=0.03)


_KEPT_ON_HOST = (("262,144", "92"), ("524,288", "112"), ("524,288", "218"))
"""Tokens, and GiB."""
