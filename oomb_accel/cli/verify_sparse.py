"""``oomb verify --attention sparse``: what sparsity costs on the user's model and text, and whether it is exact.

The cost is measured with the settings asked for. Exactness is shown on the first layers of the same model and the
beginning of the same text, where a plain model with a mask can follow: in fp64 with small pages, and on a GPU also in
the dtype asked for, with pages and query blocks as in training.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oomb_accel.cli.verify_inputs import load, num_layers_of, trained
from oomb_accel.cli.verify_tables import cost_rows, layer_table, loss_table, parity_rows, parity_table
from oomb_accel.config import SPARSE_SETTINGS, OombConfig
from oomb_accel.integrations.masked_attention import attention_mass
from oomb_accel.integrations.parity import ParityReport
from oomb_accel.integrations.selections import SelectionRecord
from oomb_accel.integrations.sparse_parity import check_sparse_parity, check_sparse_parity_low_precision
from oomb_accel.integrations.sparsity_cost import gradient_costs, layer_attention, loss_costs, training_step
from oomb_accel.integrations.support import model_facts, sparse_layers
from oomb_accel.progress import ProgressLine
from oomb_accel.schedule import ChunkSchedule
from oomb_accel.setting_text import dtype_name

_MASS_QUERIES = 8192
"""Attention mass is that of so many queries of a document: for all of a longer one its time would grow with the square.
"""
_PROOF_TOKENS, _PROOF_CHUNK, _PROOF_PAGE, _PROOF_TOP_K, _PROOF_RECENT = 600, 128, 16, 4, 2


def defaults(device: torch.device) -> dict[str, Any]:
    """What options mean that were left out. On the CPU pages are small, so that a short text has many of them."""
    if device.type == "cuda":
        sizes = {"layers": 0, "tokens": 32768, "chunk_tokens": 4096, "page_tokens": 128, "dtype": "bfloat16"}
    else:
        sizes = {"layers": 4, "tokens": 4096, "chunk_tokens": 512, "page_tokens": 32, "dtype": "float32", "top_k": 16}
    return {**sizes, "span_tokens": 32768}


def run(
    options: argparse.Namespace,
    config: OombConfig,
    model: PreTrainedModel,
    documents: list[Tensor],
    device: torch.device,
) -> tuple[bool, dict[str, Any]]:
    """Measure, check and print.

    Returns: whether sparse attention is exact, and the report for JSON.

    Raises:
        ValueError: the documents are too short for anything to be left out.
    """
    _check_sparse(config, documents)
    lengths = [len(ids) for ids in documents]
    facts = model_facts(model)
    sparse_layers(facts, config)  # a layer that does not exist is refused before time is spent
    print(_describe(options, config, model, lengths, device))
    for warning in (warnings := _warnings(options, model)):
        print(f"NOTE: {warning}")
    dtype = getattr(torch, options.dtype)
    measured = trained(model, options, dtype, device, random_adapters=False)
    cost = _cost(measured, config, documents, facts.windows)
    losses, gradients, attention, mass = cost
    print(f"\nLoss\n{loss_table(losses)}\n\nLayers\n{layer_table(gradients, attention, mass)}\n{_LEGEND}")
    if (every := _mass_step(lengths)) > 1:
        print(f"mass is that of one query in {every}: the documents have up to {max(lengths):,} tokens.")
    del measured, model
    kept = _proof_layers(config, facts.windows)
    proof = _proof(options, config, documents, facts.windows, kept, device)
    report: dict[str, Any] = {
        "model": options.model,
        "settings": config.to_dict(),
        "dtype": options.dtype,
        "document_tokens": lengths,
        "notes": warnings,
        "mass_of_one_query_in": every,
        "exact_layers": kept,
        **cost_rows(*cost),
        "exactness": {},
    }
    for name, compared in proof.items():
        covered = f"first {kept} of {len(facts.windows)} layers"
        print(f"\nExactness in {name}, {covered}: full attention masked to the selected pages")
        print(parity_table(compared, show_all=options.all))
        report["exactness"][name] = parity_rows(compared)
    return all(compared.passed for compared in proof.values()), report


_LEGEND = """attended: share of all (query, key) pairs. pages/list: selected by a block of queries, beside sinks and
recent pages. distinct: share of its candidates that a chunk selects for some block. mass: share of full attention's
weight that lies on what was attended to, over queries that select. cosine, rel. error: the gradient of the layer's
parameters against that of dense attention."""


def _cost(model: nn.Module, config: OombConfig, documents: list[Tensor], windows: tuple[int | None, ...]) -> Any:
    _say("training step with dense attention")
    dense_config = OombConfig(
        chunk_tokens=config.known_chunk_tokens,
        page_tokens=config.page_tokens,
        span_tokens=config.span_tokens,
        backend=config.backend,
        progress=False,
    )
    dense = training_step(model, dense_config, documents, on_progress=ProgressLine())
    _say("training step with sparse attention")
    record = SelectionRecord()
    sparse = training_step(model, config, documents, on_selection=record, on_progress=ProgressLine())
    _say("attention mass")
    lengths = [len(ids) for ids in documents]
    mass = attention_mass(model, documents, record, config.page_tokens, every=_mass_step(lengths))
    return (
        loss_costs(dense.token_losses, sparse.token_losses, config.known_chunk_tokens),
        gradient_costs(dense.gradients, sparse.gradients),
        layer_attention(record, windows, lengths, config.page_tokens),
        mass,
    )


def _mass_step(lengths: list[int]) -> int:
    """One query in so many has its attention mass measured."""
    return -(-max(lengths) // _MASS_QUERIES)


def _proof(
    options: argparse.Namespace,
    config: OombConfig,
    documents: list[Tensor],
    windows: tuple[int | None, ...],
    kept: int,
    device: torch.device,
) -> dict[str, ParityReport]:
    """Reports by dtype, on the first ``kept`` layers. On a GPU the kernels of 16 and 32 bits are judged besides the
    orchestration in fp64."""
    dense = {layer % len(windows) for layer in config.dense_layers}
    config = dataclasses.replace(config, dense_layers=tuple(sorted(layer for layer in dense if layer < kept)))
    dtypes = [torch.float64]
    if device.type == "cuda" and options.dtype != "float64":
        dtypes.append(getattr(torch, options.dtype))
    found = {}
    for dtype in dtypes:
        name = dtype_name(dtype)
        _say(f"exactness in {name}, on the first {kept} layers")
        model = trained(
            load(options.model, kept, options.random_weights, trust_remote_code=options.trust_remote_code),
            options,
            torch.float64,
            device,
        )
        settings, short = proof_case(config, documents, as_trained=dtype != torch.float64)
        if dtype == torch.float64:
            found[name] = check_sparse_parity(model, settings, short)
        else:
            found[name] = check_sparse_parity_low_precision(model, settings, short, dtype)
    return found


def _proof_layers(config: OombConfig, windows: tuple[int | None, ...]) -> int:
    """How many of the first layers exactness is shown on: two, and one that selects among them."""
    dense = {layer % len(windows) for layer in config.dense_layers}
    first_sparse = min(layer for layer, window in enumerate(windows) if window is None and layer not in dense)
    return min(len(windows), max(2, first_sparse + 1))


def proof_case(config: OombConfig, documents: list[Tensor], *, as_trained: bool) -> tuple[OombConfig, list[Tensor]]:
    """Settings and documents that a plain model with a mask can follow, as it holds all weights of a layer at once.

    Args:
        config: the settings of the user.
        as_trained: keep their pages and query blocks, which decide how kernels run; otherwise both are small.
    """
    page, q_block = (config.page_tokens, config.q_block) if as_trained else (_PROOF_PAGE, 64)
    chunk = min(config.known_chunk_tokens, max(page, 4 * q_block)) if as_trained else _PROOF_CHUNK
    sinks, recents = min(config.sink_pages, 1), min(config.recent_pages, _PROOF_RECENT)
    top_k = min(config.top_k, _PROOF_TOP_K)
    settings = dataclasses.replace(
        config,
        chunk_tokens=chunk,
        page_tokens=page,
        span_tokens=max(256, page),
        q_block=q_block,
        top_k=top_k,
        sink_pages=sinks,
        recent_pages=recents,
        page_budget=None if config.page_budget is None else 2 * top_k,
    )
    # The last two chunks have a candidate more than a list holds.
    tokens = (sinks + recents + top_k + 2) * page + chunk - page // 3 if as_trained else _PROOF_TOKENS
    longest_first = sorted(documents, key=len, reverse=True) * 2
    return settings, [ids[:length] for ids, length in zip(longest_first, (tokens, tokens * 2 // 3 + 1), strict=False)]


def _check_sparse(config: OombConfig, documents: list[Tensor]) -> None:
    """Refuse documents that are attended to as a whole."""
    schedule = ChunkSchedule.build(
        [len(ids) for ids in documents], [], chunk_tokens=config.known_chunk_tokens, page_tokens=config.page_tokens
    )
    longest = max(len(chunk.past_pages) for chunk in schedule.chunks)
    always = config.sink_pages + config.recent_pages
    if longest > always + config.top_k:
        return
    wanted = (always + config.top_k + 1) * config.page_tokens + config.known_chunk_tokens
    remedy = f"Use --tokens {wanted} or more, with a text as long"
    if longest > always + 1:
        remedy += f", or --top_k {max(1, (longest - always) // 4)}"
    raise ValueError(
        "Nothing would be left out: every page is attended to, so sparse is dense here.\n"
        f"  The longest past has {longest} pages of {config.page_tokens} tokens; sinks, recent pages and top_k make "
        f"{always + config.top_k}.\n  {remedy}."
    )


def _warnings(options: argparse.Namespace, model: PreTrainedModel) -> list[str]:
    """Why the figures may mean little."""
    found = []
    if not options.text:
        found.append("there is nothing to be found in random tokens; the cost means something with --text FILE.")
    if options.random_weights or options.model.endswith(".json"):
        found.append("random weights attend to everything alike; the cost says nothing about a trained model.")
    used, whole = (
        model_facts(model).num_layers,
        num_layers_of(options.model, trust_remote_code=options.trust_remote_code),
    )
    if used < whole:
        found.append(f"the first {used} of {whole} layers make a poor model; --layers 0 takes all of them.")
    if options.dtype == "bfloat16":
        found.append("rounding to bfloat16 is part of the differences; --dtype float32 shows sparsity alone.")
    return found


def _describe(
    options: argparse.Namespace, config: OombConfig, model: PreTrainedModel, lengths: list[int], device: torch.device
) -> str:
    text = ", ".join(options.text) or "random tokens"
    settings = {name: getattr(config, name) for name in ("top_k", "q_block", "sink_pages", "recent_pages")}
    settings |= {name: getattr(config, name) for name in sorted(config.given & set(SPARSE_SETTINGS))}
    return (
        f"{type(model).__name__}, {model_facts(model).num_layers} layers, {options.dtype} on {device}; {text}: "
        f"{', '.join(f'{length:,}' for length in lengths)} tokens in chunks of {config.known_chunk_tokens}, pages of "
        f"{config.page_tokens}; {', '.join(f'{name}={value}' for name, value in settings.items())}"
    )


def _say(what: str) -> None:
    print(f"oomb verify: {what}", file=sys.stderr, flush=True)
