"""Frozen weights in 8 bits on a GPU, by torch's scaled products: bf16 against the definition, twice plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.harness.float8 import with_float8_linears
from tests.harness.models import twin, with_lora
from tests.harness.parity import assert_twice_plain_result, chunked, reference
from tests.harness.tolerance import assert_same_bits
from tests.test_gpu_parity import LAYOUTS, gpu_config, gpu_model, hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper(), reason="needs a GPU with 8-bit floats"),
    pytest.mark.filterwarnings("ignore:No target in row"),
]


def lora(model: str) -> PeftModel:
    return with_lora(gpu_model(model)).cuda().bfloat16()


@pytest.mark.parametrize("layout", ["ragged", "packed", "one target"])
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "qwen3 d128", "llama d64"])
def test_models(model: str, layout: str) -> None:
    low, documents = lora(model), LAYOUTS[layout].documents
    exact = reference(with_float8_linears(twin(low).float()), documents)
    plain = reference(with_float8_linears(twin(low)), documents)
    ours = chunked(twin(low), LAYOUTS[layout], gpu_config(base_dtype="float8"))
    assert_twice_plain_result(ours, plain, exact)


@pytest.mark.parametrize("settings", [{"keep_outputs": False, "keep_last_graph": False}, {}])
def test_the_same_bits_twice(settings: dict[str, Any]) -> None:
    """Scaled products are deterministic; without cuDNN's backward everything is."""
    model, layout = lora("qwen2 7:1 d128"), LAYOUTS["packed"]
    config = gpu_config(base_dtype="float8", deterministic=True, **settings)
    first, second = (chunked(twin(model), layout, config) for _ in range(2))
    assert_same_bits(first.gradients, second.gradients)


def test_fp64_is_simulated() -> None:
    model, layout = with_lora(gpu_model("qwen2 7:1 d128")).cuda().double(), LAYOUTS["even"]
    wanted = chunked(with_float8_linears(twin(model)), layout, gpu_config())
    ours = chunked(twin(model), layout, gpu_config(base_dtype="float8"))
    assert abs(float(ours.loss / wanted.loss) - 1) < 1e-6
    for name, grad in ours.gradients.items():
        torch.testing.assert_close(grad, wanted.gradients[name], rtol=1e-3, atol=1e-5)
