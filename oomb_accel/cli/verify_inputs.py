"""What ``oomb verify`` works on: a model, whole or cut short, and documents."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from oomb_accel.integrations.support import base_model_of
from oomb_accel.training.data import check_vocabulary, load_corpus
from oomb_accel.training.model import check_folder, load_tokenizer, load_weights, read_config
from oomb_accel.training.recipe import Recipe


def load(name: str, layers: int, random_weights: bool, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model in fp32 on the CPU.

    Args:
        name: folder, hub id or config.json.
        layers: it is cut to so many; 0 keeps all.
        trust_remote_code: run the code that comes with it.

    Raises:
        ValueError: there is no such model.
    """
    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(
            f"There is no file {name}.\n  Got a name that ends in .json.\n"
            "  Pass a folder, a hub id or an existing config.json."
        )
    if layers < 0:
        raise ValueError(
            f"A model cannot be cut to {layers} layers.\n  Got --layers {layers}.\n  Use --layers 2, or 0 to keep all."
        )
    random_weights = random_weights or path.suffix == ".json"
    source = _source(name)
    check_folder(source)
    return _build(source, layers, random_weights, trust_remote_code)


def num_layers_of(name: str, *, trust_remote_code: bool = False) -> int:
    """Layers of the whole model."""
    return int(read_config(_source(name), trust_remote_code=trust_remote_code).get_text_config().num_hidden_layers)


def _source(name: str) -> str:
    """The folder or hub id that a model's files come from."""
    path = Path(name)
    return str(path.parent) if path.suffix == ".json" else name


def _build(source: str, layers: int, random_weights: bool, trust_remote_code: bool) -> PreTrainedModel:
    logging.set_verbosity_error()  # weights of layers that are cut off are no news
    config = read_config(source, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    if layers:
        text.num_hidden_layers = min(layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
    if random_weights:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        assert isinstance(model, PreTrainedModel)
        return model
    return load_weights(source, config, torch.float32, trust_remote_code=trust_remote_code)


def trained(
    model: PreTrainedModel,
    options: argparse.Namespace,
    dtype: torch.dtype,
    device: torch.device,
    *,
    random_adapters: bool = True,
) -> nn.Module:
    """The model where and as it is checked, with LoRA where that is asked for.

    Args:
        random_adapters: give LoRA's B random values, as if it had been trained: with its usual zeros, A would get no
            gradient to compare. They change the model's loss a little.
    """
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product of mixtures of experts has no fp64
    moved: nn.Module = nn.Module.to(model, device=device, dtype=dtype)
    return _with_lora(model, random_adapters) if options.lora else moved


def _with_lora(model: PreTrainedModel, random_adapters: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name and random_adapters:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def documents_of(options: argparse.Namespace, model: PreTrainedModel, device: torch.device) -> list[Tensor]:
    """The documents of ``--text``, or random ones, cut to ``--tokens``."""
    tokens = options.tokens
    vocab_size = base_model_of(model).config.get_text_config().vocab_size
    if options.text:
        return [_text(path, options, vocab_size).to(device) for path in options.text]
    lengths = (tokens,) if options.attention == "sparse" else (tokens, tokens * 2 // 3 + 1, max(tokens // 7, 2))
    return [torch.randint(0, vocab_size, (length,), device=device) for length in lengths]


def _text(path: str, options: argparse.Namespace, vocab_size: int) -> Tensor:
    recipe = Recipe(
        model_name_or_path=_source(options.model),
        data_path=path,
        output_dir="unused",
        max_length=options.tokens,
        truncation="start",
        trust_remote_code=options.trust_remote_code,
    )
    documents = load_corpus(recipe, load_tokenizer(recipe)).documents
    lengths = documents.num_tokens()
    document = documents[lengths.index(max(lengths))]
    check_vocabulary([document], vocab_size)
    return document.input_ids
