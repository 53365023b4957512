"""The parts of a profile: names of kernels as an H200 gave them, floors against numbers counted by hand, a tiny run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import profile_step, run, step_parts
from benchmarks.step_parts import Launch, floors, part_of
from oomb_accel import OombConfig
from oomb_accel.bench.models import SHAPES
from oomb_accel.plan.shape import shape_of

RANK, VOCABULARY = 16, 152064
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_"
NATIVE = "void at::native::"
FORWARD, BACKWARD = "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward"

LAUNCHES = [
    # Name, operation, shapes of its inputs, part. From a profile of a sparse step of the 7B.
    ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "mm", [(8192, 3584), (3584, 18944)], step_parts.BASE),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "mm", [(8192, 18944), (18944, 3584)], step_parts.BASE),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_bias_TNT", "addmm", [(512,), (8192, 3584), (3584, 512)], step_parts.BASE),
    ("nvjet_sm90_tst_128x304_64x3_2x1_v_bz_coopA_NNT", "mm", [(8191, 152064), (152064, 3584)], step_parts.HEAD),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_badd_TNN", "addmm_", [(8192, 512), (8192, 16), (16, 512)], step_parts.LORA),
    ("nvjet_sm90_tst_16x64_64x16_1x2_h_bz_TNN", "mm", [(8192, 3584), (3584, 16)], step_parts.LORA),
    ("nvjet_sm90_tst_16x64_64x16_1x2_h_bz_TNN", "mm", [(8192, 3584), (3584, 48)], step_parts.LORA),
    ("nvjet_sm90_tst_192x32_64x7_4x1_v_bz_NTT", "addmm", [(), (18944, 8192), (8192, 16)], step_parts.LORA),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "mm", [(16, 8192), (8192, 3584)], step_parts.LORA),
    ("nvjet_sm90_tst_64x32_64x16_4x1_v_bz_splitK_NTT", "", [], step_parts.OTHER_PRODUCTS),
    (f"{CUDNN}fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", FORWARD, [], step_parts.LOCAL_FORWARD),
    (f"{CUDNN}fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", "", [], step_parts.LOCAL_FORWARD),
    (f"{CUDNN}bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0", BACKWARD, [], step_parts.LOCAL_BACKWARD),
    (f"{CUDNN}bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0", "", [], step_parts.LOCAL_BACKWARD),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", BACKWARD, [], step_parts.LOCAL_BACKWARD),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "", [], step_parts.LOCAL_BACKWARD),
    ("void cudnn::fusion::convert_dq_to_16bits<true>", "", [], step_parts.LOCAL_BACKWARD),
    ("void cudnn::fusion::fmha_reduce_head<true>", "", [], step_parts.LOCAL_BACKWARD),
    ("_page_forward_kernel", "", [], step_parts.SELECTED_FORWARD),
    ("_page_owner_kernel", "", [], step_parts.SELECTED_DKV),
    ("_page_reduce_kernel", "", [], step_parts.SELECTED_DKV),
    ("_page_dq_sum_kernel", "", [], step_parts.SELECTED_DQ),
    ("_page_dq_kernel", "", [], step_parts.SELECTED_DQ),
    ("_row_stats_kernel", "", [], step_parts.SELECTED_INDEX),
    ("_index_gather_kernel", "", [], step_parts.SELECTED_INDEX),
    ("_mass_kernel", "", [], step_parts.SELECTION),
    ("_top_pages_kernel", "", [], step_parts.SELECTION),
    ("_merge_kernel", "", [], step_parts.PAGES),
    ("_move_pages_kernel", "", [], step_parts.PAGES),
    ("_forward_kernel", "", [], step_parts.LOSS),
    ("_backward_kernel", "", [], step_parts.LOSS),
    ("_swiglu_forward_kernel", "", [], step_parts.NORMS),
    ("_swiglu_backward_kernel", "", [], step_parts.NORMS),
    ("_rms_norm_backward_kernel", "", [], step_parts.NORMS),
    ("_triton_rope", "", [], step_parts.NORMS),
    (f"{NATIVE}vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add", "add_", [], step_parts.SUMS),
    (f"{NATIVE}reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16", "mean", [], step_parts.SUMS),
    (f"{NATIVE}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copy_", [], step_parts.COPIES),
    (f"{NATIVE}vectorized_elementwise_kernel<8, at::native::FillFunctor", "", [], step_parts.COPIES),
    ("Memset (Device)", "zero_", [], step_parts.COPIES),
    ("Memcpy DtoD (Device -> Device)", "", [], step_parts.COPIES),
    (f"{NATIVE}multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>", "", [], step_parts.OPTIMIZER),
]  # fmt: skip


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch[1]} {launch[0][:40]}")
def test_kernels_belong_to_parts(launch: tuple[str, str, list[tuple[int, ...]], str]) -> None:
    name, op, shapes, part = launch
    full = op if not op or op.startswith("aten::") else f"aten::{op}"
    assert part_of(Launch(name, 1.0, full, tuple(shapes)), RANK, VOCABULARY) == part


def test_every_own_kernel_has_a_part() -> None:
    """A new kernel would be counted as elementwise."""
    import ast

    folder = Path(__file__).parents[1] / "kernels" / "oomb_kernels"
    launched = {
        node.value.id
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id.endswith("_kernel")
    }
    assert len(launched) > 12
    unknown = {name for name in launched if part_of(Launch(name, 1.0), RANK, VOCABULARY) == step_parts.SUMS}
    assert not unknown


@dataclass
class Event:
    """As the profiler gives them."""

    kind: DeviceType
    text: str
    number: int = 0
    linked: int = 0
    sides: list[Any] | None = None
    us: float = 0.0
    annotation: bool = False

    def device_type(self) -> DeviceType:
        return self.kind

    def name(self) -> str:
        return self.text

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.linked

    def shapes(self) -> list[Any]:
        return self.sides or []

    def duration_ns(self) -> float:
        return self.us * 1e3

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_a_launch_has_the_shapes_of_its_operation() -> None:
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        Event(cpu, "aten::mm", 7, sides=[[8, 4], [4, 16], []]),
        Event(cpu, "cudaLaunchKernel", 12, linked=7),
        Event(cpu, "cuLaunchKernelEx", 7),
        Event(cpu, "_FusedLinearBackward", 9),
        Event(cuda, "nvjet", 1, linked=7, us=3.0),
        Event(cuda, "_merge_kernel", 2, us=2.0),
        Event(cuda, "_triton_rope", 3, linked=9, us=1.0),
        Event(cuda, "Optimizer.step#AdamW.step", 4, us=50.0, annotation=True),
    ]
    assert profile_step.device_launches(events) == [
        Launch("nvjet", 3.0, "aten::mm", ((8, 4), (4, 16), ())),
        Launch("_merge_kernel", 2.0),
        Launch("_triton_rope", 1.0),
    ]


def test_floors_of_the_7b() -> None:
    """40,960 tokens in five chunks, 16 selected pages; the last chunk's graph is kept."""
    shape = shape_of(SHAPES["qwen2.5-7b"], "qwen2.5-7b")
    config = OombConfig(attention="sparse", top_k=16, keep_outputs=False)
    us = {part: seconds / 40960 * 1e6 for part, seconds in floors(shape, 40960, config, 16).items()}
    weights = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert us[step_parts.BASE] == pytest.approx(2 * weights * 2.8 / 700e6)
    assert us[step_parts.HEAD] == pytest.approx(2 * 152064 * 3584 * 2.8 / 700e6, rel=1e-4)
    assert us[step_parts.LORA] == pytest.approx(2 * 40_370_176 * 3.8 / 700e6)
    pair = 4 * 3584 * 28
    assert us[step_parts.LOCAL_FORWARD] == pytest.approx(pair * (4096.5 * 1.8 + 640 * (4 + 3) / 5) / 600e6)
    assert us[step_parts.LOCAL_BACKWARD] == pytest.approx(pair * 2.5 * (4096.5 + 640 * 4 / 5) / 500e6)
    assert us[step_parts.SELECTED_FORWARD] == pytest.approx(pair * 2048 * 7 / 5 / 600e6)
    backward = us[step_parts.SELECTED_DQ] + us[step_parts.SELECTED_DKV]
    assert backward == pytest.approx(pair * 2.5 * 2048 * 4 / 5 / 500e6)
    forward_numbers = 4 * 3584 + 2 * 4096 + 3 * 18944
    backward_numbers = 6 * 3584 + 2 * 4096 + 5 * 18944
    assert us[step_parts.NORMS] == pytest.approx(28 * 2 * (1.8 * forward_numbers + backward_numbers) / 4e6)
    assert us[step_parts.SUMS] == pytest.approx(28 * 2 * 6 * 3584 * 2.8 / 4e6)
    assert us[step_parts.LOSS] == pytest.approx(2 * 152064 * 3.8 / 4e6)
    keys = 8 * (59 + 123 + 187 + 251)  # mean keys of the pages to choose from, by chunk
    assert us[step_parts.SELECTION] == pytest.approx(2 * 3584 * 28 * keys / 5 / 16 / 700e6)
    assert set(us) & {step_parts.COPIES, step_parts.GAPS} == set()
    wider = floors(shape, 40960, OombConfig(attention="sparse", top_k=64, keep_outputs=False), 16)
    # The second chunk attends to all of its 64 pages.
    assert wider[step_parts.SELECTION] == pytest.approx(2 * 3584 * 28 * 8192 * (keys - 8 * 59) / 16 / 700e12)


def test_a_dense_step_selects_nothing() -> None:
    found = floors(shape_of(SHAPES["tiny"], "tiny"), 1024, OombConfig(chunk_tokens=256), 16)
    assert not {step_parts.SELECTED_FORWARD, step_parts.SELECTED_DQ, step_parts.SELECTION} & set(found)


def test_a_tiny_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    options = "profile_step --shape tiny --lengths 320 --chunk-tokens 128 --timed 1 --sides oomb-no-kept peer"
    assert run.main([*options.split(), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| part | us a token | floor | gap | launches |" in printed and "| whole step | " in printed
    own, peer = (json.loads(line) for line in out.read_text().splitlines())
    assert "text" not in own and own["details"]["largest"]
    parts = {part["part"]: part for part in own["details"]["parts"]}
    gaps = [part["us"] - part["floor_us"] for part in own["details"]["parts"]]
    assert gaps == sorted(gaps, reverse=True)
    # Two layers of seven products, three chunks, of which two run again; the first layer's q, k, v need no gradient.
    assert parts[step_parts.BASE]["launches"] == 14 * (3 + 2 + 3) - 3 * 3
    assert parts[step_parts.HEAD]["launches"] == 3 + 2 + 3
    assert {part["part"] for part in peer["details"]["parts"]} >= {step_parts.LORA, step_parts.BASE, step_parts.HEAD}


def test_launches_are_summed_by_part() -> None:
    launches = [Launch("_merge_kernel", 30.0), Launch("_merge_kernel", 10.0), Launch("_triton_rope", 60.0)]
    details = profile_step._by_part(launches, shape_of(SHAPES["tiny"], "tiny"), 100, 2e-4, OombConfig(chunk_tokens=128))
    us = Counter({part["part"]: part["us"] for part in details["parts"]})
    assert us[step_parts.PAGES] == 0.4 and us[step_parts.NORMS] == 0.6 and us[step_parts.GAPS] == pytest.approx(1.0)
    assert details["total"]["us"] == pytest.approx(2.0) and details["total"]["busy"] == pytest.approx(0.5)
    assert details["largest"][0] == {
        "part": step_parts.NORMS,
        "op": "",
        "name": "_triton_rope",
        "shapes": "",
        "us": 0.6,
    }


@pytest.mark.gpu
def test_products_on_a_gpu_are_known_by_their_shapes() -> None:
    device = torch.device("cuda")
    x, weight, a = (torch.randn(512, side, device=device, dtype=torch.bfloat16) for side in (512, 512, 16))
    launches = profile_step.recorded(lambda: (x @ weight, x @ a, x.float(), torch.softmax(x, -1)), device)
    found = {part_of(launch, RANK, VOCABULARY) for launch in launches}
    assert {step_parts.BASE, step_parts.LORA, step_parts.COPIES, step_parts.SUMS} <= found
    assert all(launch.us > 0 for launch in launches)
