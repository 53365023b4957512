"""Frozen weights in 8 bits on a GPU, by torch's scaled products: bf16 against the definition, twice plain."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from peft import PeftModel

from oomb_kernels import checksums, float8_product_fault
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


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times a GPU that no other process uses")
def test_what_looking_for_changed_weights_costs() -> None:
    """Every weight of a 7B is read once per step: at most 10 ms of the device, and 3 ms of the host."""
    shapes = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), *[(18944, 3584)] * 2, (3584, 18944)]
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes * 28]
    before = checksums(weights)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert checksums(weights) == before
        whole_s = time.perf_counter() - start
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            checksums(weights)
        device_s = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
        times.append((device_s, whole_s - device_s))
    device_s, host_s = (min(column) for column in zip(*times, strict=True))
    print(f"checksums of {len(weights)} weights: {1e3 * device_s:.2f} ms of the device, {1e3 * host_s:.2f} of the host")
    assert device_s < 10e-3 and host_s < 3e-3
    weights[100].data[5, 7] += 1
    assert [a == b for a, b in zip(checksums(weights), before, strict=True)].count(False) == 1


def test_a_trial_product_works() -> None:
    assert float8_product_fault(torch.device("cuda", 0)) is None
