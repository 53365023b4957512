"""``oomb eval MODEL --data PATH ...``: what a model makes of long documents, with and without an adapter."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import yaml

from oomb_accel.cli.devices import device_named
from oomb_accel.cli.eval_options import parse
from oomb_accel.cli.options import WITHOUT_RECIPE
from oomb_accel.cli.report_file import check_plots, check_writable, tables_beside, write_json
from oomb_accel.cli.sparse_options import sparse_settings
from oomb_accel.columns import folded
from oomb_accel.config import OombConfig
from oomb_accel.evaluation.adapter import rope_of_run
from oomb_accel.evaluation.context import ContextLoss, check_lengths, loss_by_context
from oomb_accel.evaluation.facts import Answer, PlantedText, plant_all, recall
from oomb_accel.evaluation.position import PositionLoss, loss_by_position
from oomb_accel.evaluation.scoring import Subject
from oomb_accel.evaluation.subject import check_texts, load_subject, load_texts, tokenizer_of
from oomb_accel.evaluation.tables import context_table, facts_table, position_table
from oomb_accel.evaluation.windows import WHOLE, Text, default_contexts
from oomb_accel.integrations.saving import read_config
from oomb_accel.setting_text import dtype_name
from oomb_accel.spelling import settings_called
from oomb_accel.writing import saying


@dataclasses.dataclass(slots=True)
class Figures:
    """What was measured; a part that was not asked for is empty."""

    context: list[ContextLoss] = dataclasses.field(default_factory=list)
    facts: list[Answer] = dataclasses.field(default_factory=list)
    position: list[PositionLoss] = dataclasses.field(default_factory=list)


_OPTIONS = {"text_field": "--text_field", "folder_as": "--folder_as"}


@settings_called({**WITHOUT_RECIPE, "data_path": "--data", "model_name_or_path": "MODEL", **_OPTIONS})
def main(arguments: Sequence[str]) -> int:
    """Evaluate and print.

    Returns: 0.

    Raises:
        ValueError: something in the options, the data, the model or the adapter cannot work.
    """
    options = parse(arguments)
    device = device_named(options.device)
    config = _config(options, device)
    _check_places(options)
    rope = _rope(options)
    tokenizer = tokenizer_of(options.model, trust_remote_code=options.trust_remote_code)
    texts, notes = load_texts(
        options.model, options.data, tokenizer, text_field=options.text_field, folder_as=options.folder_as
    )
    texts = texts[: options.max_documents]
    planted = _plant(options, texts, tokenizer) if "facts" in options.parts else []
    texts = [dataclasses.replace(text, ids=text.ids[: options.tokens]) for text in texts]
    contexts = options.contexts or default_contexts(max(len(text.ids) for text in texts) - options.last_tokens)
    if "context" in options.parts:
        check_lengths(texts, options.last_tokens, contexts)
    dtype = getattr(torch, options.dtype, torch.float32 if device.type == "cpu" else None)
    subject = load_subject(
        options.model,
        options.adapter,
        tokenizer,
        config,
        rope_parameters=rope,
        dtype=dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
    )
    check_texts(subject, texts, *_longest_pass(options, texts, planted))
    with tables_beside(options.json):
        print(head := _describe(options, subject, texts, rope))
        for note in notes:
            print(folded(f"note: {note}"))
        started = time.perf_counter()
        figures = _measure(options, subject, texts, planted, contexts)
        seconds = time.perf_counter() - started
        print(f"\n{seconds:.1f} s")
        if options.plot is not None:
            from oomb_accel.evaluation.plots import draw  # an extra, and slow to import

            with saying("The plots", options.plot, "Use --plot ., or a folder of your own."):
                options.plot.mkdir(parents=True, exist_ok=True)
                drawn = draw(options.plot, **_parts(figures), subtitle=head.splitlines()[0])
            print("\n".join(f"drawn {path}" for path in drawn))
    write_json(_report(options, subject, texts, figures, seconds) | {"notes": notes}, options.json)
    return 0


def _measure(
    options: argparse.Namespace,
    subject: Subject,
    texts: list[Text],
    planted: list[PlantedText],
    contexts: Sequence[int],
) -> Figures:
    """Run the parts, and print each when it is done."""
    figures = Figures()
    with subject.on():
        for part in options.parts:
            _say(f"{part}: {len(texts)} document(s)")
            if part == "context":
                figures.context = loss_by_context(
                    subject, texts, last_tokens=options.last_tokens, contexts=contexts, seed=options.seed
                )
                title = f"Loss on the last {options.last_tokens:,} tokens by context length"
                text = context_table(figures.context)
            elif part == "facts":
                figures.facts = recall(
                    subject,
                    planted,
                    contexts=options.contexts or default_contexts(max(len(text.planted.ids) for text in planted)),
                    questions_per_pass=options.questions_per_pass,
                    seed=options.seed,
                )
                title = f"Planted facts, asked at the end, {options.questions_per_pass} at a time"
                text = facts_table(figures.facts)
            else:
                figures.position = loss_by_position(subject, texts, first_bucket=options.first_bucket)
                title, text = "Loss by position", position_table(figures.position)
            subject.line.clear()
            print(f"\n{title} ({_attention(subject)})\n{text}", flush=True)
    return figures


def _config(options: argparse.Namespace, device: torch.device) -> OombConfig:
    """The settings of the recurrence.

    Raises:
        ValueError: settings that contradict each other.
    """
    return OombConfig(
        attention=options.attention,
        chunk_tokens=options.chunk_tokens or (8192 if device.type == "cuda" else 1024),
        page_tokens=options.page_tokens or (128 if device.type == "cuda" else 32),
        backend=options.backend,
        beyond_trained_length="allow" if options.beyond_trained_length else "error",
        keep_outputs=False,
        keep_last_graph=False,
        progress=False,
        **sparse_settings(options),
    )


def _check_places(options: argparse.Namespace) -> None:
    """Refuse what could not be written or read, before the work."""
    check_writable(options.json)
    if options.plot is not None:
        check_plots(options.plot, "--plot", "leave --plot out")
    if options.adapter is not None:
        read_config(options.adapter)


def _rope(options: argparse.Namespace) -> dict[str, Any] | None:
    """RoPE settings over those of the model: from the command line, or those that the adapter was trained with."""
    if options.rope_parameters is None:
        return None if options.adapter is None else rope_of_run(options.adapter)
    try:
        values = yaml.safe_load(options.rope_parameters)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(
            f"--rope_parameters must be a mapping.\n  Got {options.rope_parameters!r}.\n"
            "  Example: --rope_parameters '{rope_type: yarn, factor: 4.0}'"
        )
    return values


def _plant(options: argparse.Namespace, texts: list[Text], tokenizer: Any) -> list[PlantedText]:
    if options.tokens is not None:  # more of the text is not used, nor is it searched for names
        texts = [dataclasses.replace(text, ids=text.ids[: options.tokens]) for text in texts]
    return plant_all(
        texts,
        tokenizer,
        num_tokens=options.tokens,
        depths=options.depths,
        per_depth=options.facts_per_depth,
        seed=options.seed,
    )


def _longest_pass(
    options: argparse.Namespace, texts: Sequence[Text], planted: Sequence[PlantedText]
) -> tuple[int, int]:
    """Tokens of the longest call, and how many of them are questions behind a document."""
    lengths = [(len(text.ids), 0) for text in texts] if set(options.parts) != {"facts"} else []
    for text in planted:
        question = max(len(fact.statement) for fact in text.planted.facts) * options.questions_per_pass
        whole = options.contexts is None or WHOLE in options.contexts
        context = len(text.planted.ids) if whole else min(max(options.contexts), len(text.planted.ids))
        lengths.append((context + question, question))
    return max(lengths)


def _describe(options: argparse.Namespace, subject: Subject, texts: Sequence[Text], rope: dict[str, Any] | None) -> str:
    parameter = next(subject.model.parameters())
    adapter = "" if options.adapter is None else f" and adapter {options.adapter}"
    longest = max(len(text.ids) for text in texts)
    lines = [
        f"{options.model}{adapter}, {_attention(subject)}",
        f"{dtype_name(parameter.dtype)} on {parameter.device}; {len(texts)} document(s), up to "
        f"{longest:,} tokens, in chunks of {subject.config.chunk_tokens:,}",
    ]
    if rope is not None:
        source = "--rope_parameters" if options.rope_parameters else "the adapter's run"
        lines.append(f"rope_parameters {rope}, from {source}")
    return "\n".join(lines)


def _attention(subject: Subject) -> str:
    config = subject.config
    if config.attention == "dense":
        return "dense attention, as served"
    return f"SPARSE attention, as in training and not as served: top_k {config.top_k} pages of {config.page_tokens}"


def _report(
    options: argparse.Namespace, subject: Subject, texts: Sequence[Text], figures: Figures, seconds: float
) -> dict[str, Any]:
    """Everything for JSON; what is no number there is null."""
    parameter = next(subject.model.parameters())
    context = [dataclasses.asdict(row) for row in figures.context]
    return {
        "model": options.model,
        "adapter": None if options.adapter is None else str(options.adapter),
        "attention": subject.config.attention,
        "as_served": subject.config.attention == "dense",
        "settings": subject.config.to_dict(),
        "dtype": dtype_name(parameter.dtype),
        "device": str(parameter.device),
        "seed": options.seed,
        "last_tokens": options.last_tokens,
        "questions_per_pass": options.questions_per_pass,
        "documents": [{"name": text.name, "tokens": len(text.ids)} for text in texts],
        "context": context,
        "facts": [dataclasses.asdict(answer) for answer in figures.facts],
        "position": [
            dataclasses.asdict(row) | {"perplexity": row.perplexity if math.isfinite(row.perplexity) else None}
            for row in figures.position
        ],
        "seconds": seconds,
    }


def _parts(figures: Figures) -> dict[str, Any]:
    """The parts by name."""
    return {item.name: getattr(figures, item.name) for item in dataclasses.fields(figures)}


def _say(what: str) -> None:
    print(f"oomb eval: {what}", file=sys.stderr, flush=True)
