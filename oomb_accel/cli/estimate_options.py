"""Options of ``oomb estimate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomb_accel.cli.options import Parser, num_tokens, number
from oomb_accel.plan import GPUS, Adapters

SWITCH: dict[str, Any] = {"auto": "auto", "true": True, "false": False}
"""Words for settings that are on, off or up to us."""


def estimate_parser(plain: Mapping[str, Any]) -> Parser:
    """The parser.

    Args:
        plain: settings of the recurrence that nobody changed, by the names of their options.
    """
    parser = Parser(
        prog="oomb estimate",
        description="Memory on GPU and host, traffic between them, time and cost of one training step, the longest "
        "document that fits, and which setting to change when one does not. Needs neither GPU nor weights. Exit code 1 "
        "when the step does not fit. A recipe gives model, length (max_length), adapters, dtypes and settings; options "
        "go over it, those of oomb train too. How many GPUs and which ZeRO stage, the launch will say: --gpus, --zero.",
    )
    parser.add_argument(
        "model",
        help="a config.json, a model's folder, a hub id, a name such as qwen2.5-7b; or, as the first word, a recipe",
    )
    parser.set_defaults(mixed_precision="auto", adapters=Adapters(), revision=None)
    parser.add_argument(
        "--length",
        default="128K",
        help="tokens of the document, such as 131072, 128K or 1M; default 128K, with a recipe its max_length",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--lora_r", type=int, default=16, help="rank of adapters on all linear layers; default 16")
    training.add_argument("--full", action="store_true", help="train all weights; the same as --lora_r 0")
    training.add_argument(
        "--torch_dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="of the weights; default auto, which is as the config says, bfloat16 where it says nothing, and float32 "
        "where all are trained, without DeepSpeed",
    )
    training.add_argument(
        "--zero", type=int, default=0, choices=[0, 1, 2, 3], help="ZeRO stage; default 0, which is no DeepSpeed"
    )
    training.add_argument("--optimizer_offload", action="store_true", help="optimizer states in host memory")
    settings = parser.add_argument_group(
        "settings of oomb_accel", "As in OombConfig. OOMB_ variables and a recipe change these defaults."
    )

    def setting(name: str, about: str = "", **named: Any) -> None:
        default = "no limit if left out" if plain[name] is None else f"default {plain[name]}"
        settings.add_argument(f"--{name}", help=f"{default}{about}", **named)

    setting("attention", choices=["dense", "sparse"])
    setting("top_k", type=int)
    setting("page_budget", type=int)
    setting("chunk_tokens", '; "auto" takes the best that fits')
    setting("page_tokens", type=num_tokens)
    setting("page_dtype", choices=["model", "float8"])
    setting("page_grad_dtype", choices=["float32", "bfloat16", "auto"])
    setting(
        "base_dtype",
        "; float8 is for speed and costs memory: copies beside the weights, 12 GiB for a 7B",
        choices=["model", "float8"],
    )
    setting("keep_outputs", choices=list(SWITCH))
    setting("offload", choices=list(SWITCH))
    settings.add_argument(
        "--device_pages_gib", type=number(0, above=True), help="most GPU memory for pages; what is free if left out"
    )
    settings.add_argument(
        "--host_memory_gib",
        type=number(0, above=True),
        help="most host memory that each process pins for pages; its share of the host if left out",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", default="h200", help=f"one of {', '.join(GPUS)}; default h200")
    machine.add_argument("--gpus", type=int, default=1, help="of one host, each with a document of its own; default 1")
    machine.add_argument(
        "--gpu_gib",
        type=number(0, above=True),
        help="memory of a GPU that is not in the list; that of --gpu if left out",
    )
    machine.add_argument(
        "--tflops",
        type=number(0, above=True),
        help="its peak of dense bf16 matrix products, by which its memory's rate is scaled too; those of --gpu if left "
        "out, as are copies over PCIe and between GPUs",
    )
    machine.add_argument(
        "--host_gib", type=number(0), default=128, help="memory of the host, for all GPUs; default 128"
    )
    machine.add_argument("--price", type=number(0), help="of one GPU for an hour, for the cost; no cost if left out")
    machine.add_argument(
        "--distinct",
        metavar="SHARE|RUN",
        help="distinct pages that a chunk's lists name, as a share of the most they could; or the output_dir of a run "
        "on such text, which has logged it; if left out, what lists at random come to: more than on real text",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON; bytes and seconds")
    return parser
