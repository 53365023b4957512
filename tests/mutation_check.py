"""Breaks a copy of the library in known ways and shows that the tests notice.

    python -m tests.mutation_check [name ...]

Not collected by pytest. Each mutation replaces one piece of source text; a fast part of the suite must then fail,
and must pass without any mutation. Exits with 1 when one survives or no longer applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.page_mutations import PAGE_FAULTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("oomb_accel", "kernels", "configs", "tests", "pyproject.toml", "README.md")
ONE_PROCESS = (
    "tests/cases/test_case_01.py",
    "tests/cases/test_case_02.py",
    "tests/cases/test_case_03.py",
    "tests/cases/test_case_05.py",
    "tests/cases/test_case_06.py",
    "tests/cases/test_case_09.py",
    "tests/cases/test_case_11.py",
    "-k",
    "parity or target or gradients or batch or windows or rows or dropout or once",
)
TWO_RANKS = ("tests/cases/test_case_12.py", "-k", "(zero2 or zero3) and not offload")
"""Needs DeepSpeed."""
SPARSE = (
    "tests/cases/test_case_06.py",
    "tests/cases/test_case_15.py",
    "-k",
    "selected or masked or replay or evaluation or settings or banner",
)
TIERS = ("tests/pages/test_tiered_order.py", "tests/test_foresight.py", "-k", "not worth")
KEPT = ("tests/test_kept_products.py", "tests/test_own_head.py")
KEPT_ON_HOST = ("tests/test_kept_on_host.py",)


@dataclass(frozen=True)
class Mutation:
    """One fault: in ``file``, ``old`` becomes ``new``. ``suite`` are arguments of pytest that choose the tests."""

    name: str
    file: str
    old: str
    new: str
    suite: tuple[str, ...] = ONE_PROCESS


MUTATIONS = (
    Mutation(
        "target at a chunk border lost",
        "oomb_accel/integrations/step.py",
        "    loss = log_probs_N.neg().sum()",
        "    borders = [c.end - 1 for c in stream.schedule.chunks[:-1]]\n"
        "    log_probs_N = log_probs_N * ~torch.isin(stream.target_rows_N, torch.tensor(borders, device=device))\n"
        "    loss = log_probs_N.neg().sum()",
    ),
    Mutation(
        "page gradient not added",
        "oomb_accel/attention.py",
        "        run.memory.cache.collect_gradients(layer.layer, run.chunk, dk, dv)",
        "        pass",
    ),
    Mutation(
        "page gradient overwritten by later chunks",
        "oomb_accel/pages/cache.py",
        "first=not held,",
        "first=True,",
    ),
    Mutation(
        "mean of chunk means",
        "oomb_accel/integrations/step.py",
        "    loss = log_probs_N.neg().sum() / _normaliser(batch, stream)",
        "    pieces = [log_probs_N[c.first_target : c.end_target] for c in stream.schedule.chunks if c.num_targets]\n"
        "    loss = -torch.stack([p.mean() for p in pieces]).mean() if pieces else log_probs_N.sum()",
    ),
    Mutation(
        "normalised by length",
        "oomb_accel/integrations/step.py",
        "        count = stream.num_targets",
        "        count = stream.schedule.num_tokens",
    ),
    Mutation(
        "missing LSE merge",
        "oomb_accel/dense_parts.py",
        "        merge_attention_(of_rows(out_HTD, part.rows), of_rows(lse_HT, part.rows), *attend(part))",
        "        part_out, part_lse = attend(part)\n"
        "        out_HTD[:, part.rows] += part_out / len(parts)\n"
        "        lse_HT[:, part.rows] = torch.logaddexp(lse_HT[:, part.rows], part_lse)",
    ),
    Mutation(
        "local instead of global LSE in the backward",
        "oomb_accel/dense_parts.py",
        "            of_rows(lse_HT, rows),\n            part.call,",
        "            dense_attention_forward(q_HTD[:, rows], keys, values, part.call, run.settings.backend)[1],\n"
        "            part.call,",
    ),
    Mutation(
        "window off by one: too wide",
        "oomb_accel/dense_parts.py",
        "window=window if causal else None,",
        "window=window + 1 if causal and window else None,",
    ),
    Mutation(
        "window off by one: a page too few",
        "oomb_accel/past.py",
        "past.newest(-(-(window - 1) // page_tokens))",
        "past.newest((window - 1) // page_tokens)",
    ),
    Mutation(
        "dropout redrawn in the recompute",
        "oomb_accel/recurrence.py",
        "            self._rng[chunk.index].restore(self._device)\n",
        "",
    ),
    *(
        Mutation(name, file, old, new, KEPT)
        for name, file, old, new in (
            (
                "a kept product that somebody has changed",
                "oomb_accel/kept_results.py",
                "result if versions == [tensor._version for tensor in result] else None",
                "result",
            ),
            (
                "kept products of calls in another order",
                "oomb_accel/kept_results.py",
                ".popleft()",
                ".pop()",
            ),
            ("x A^T of a kept product lost", "oomb_accel/integrations/fused_lora.py", "(known.xa,)", "(known.xa * 0,)"),
            (
                "the head's gradient without its factor",
                "oomb_accel/loss.py",
                "torch.mul(gradient_ND, grads[0].unsqueeze(1)",
                "torch.mul(gradient_ND, 1",
            ),
            (
                "the head's gradient is made and not kept",
                "oomb_accel/integrations/step.py",
                "            results.put(HEAD, *gradient)\n",
                "            pass\n",
            ),
            (
                "attention outputs before the head's gradient",
                "oomb_accel/plan/places.py",
                "device_bytes, host_bytes = device_bytes - on_device, ",
                "device_bytes, host_bytes = device_bytes, ",
            ),
        )
    ),
    *(
        Mutation(f"kept on the host: {name}", "oomb_accel/kept_on_host.py", old, new, KEPT_ON_HOST)
        for name, old, new in (
            ("changed while it was copied", "result.usable = versions == ", "result.usable = True or "),
            ("used before it has come", "        self._mover.wait((result.arrival,))\n", ""),
            ("its memory given away before it was copied", "        self._mover.wait((result.sent,))\n", ""),
            ("brought without a bound", "return not self.coming or ", "return True or "),
            ("brought only when it is asked for", "return not self.coming or ", "return False and "),
            ("held without a bound", "while self.device_bytes > self._most_bytes:", "while False:"),
            ("in another order", "self._by_key[key].popleft()", "self._by_key[key].pop()"),
            ("gaps copied", "if size != 1 and stride != expected:", "if False:"),
            ("used when it has given way", "result.usable and not self._host.is_lost", "result.usable"),
            ("never freed", "        self._stack.cut(min(mark, self._stack.end))\n", ""),
        )
    ),
    Mutation(
        "K stored twice",
        "oomb_accel/attention.py",
        "    if first_run:\n        run.memory.cache.store(",
        "    if True:\n        run.memory.cache.store(",
    ),
    Mutation(
        "own keys attended to twice",
        "oomb_accel/dense_parts.py",
        "    if part.own is None:\n        return past_k, past_v\n",
        "    if part.own is None:\n        return torch.cat([past_k, k_GTD], 1), torch.cat([past_v, v_GTD], 1)\n",
    ),
    Mutation(
        "first document token as target",
        "oomb_accel/integrations/stream.py",
        "    end = document.end if document.end == shifted.shape[1] else document.end - 1",
        "    end = document.end",
    ),
    Mutation(
        "targets of masked chunks only: past gradients dropped without targets",
        "oomb_accel/dense_parts.py",
        "            if need_kv:",
        "            if need_kv and run.chunk.num_targets:",
    ),
    Mutation(
        "attention across documents of a packed row",
        "oomb_accel/dense_parts.py",
        "segments=segments if len(segments) > 1 else None,",
        "segments=None,",
    ),
    Mutation(
        "positions restart in each chunk",
        "oomb_accel/integrations/step.py",
        "position_ids=stream.position_ids_1T[:, tokens],",
        "position_ids=stream.position_ids_1T[:, tokens] - stream.position_ids_1T[:, chunk.start],",
    ),
    Mutation(
        "ZeRO 2: gradients in another order on a short rank",
        "oomb_accel/integrations/step.py",
        "always_one_node=num_ranks() > 1 and not is_partitioned(state.model),",
        "always_one_node=False,",
        TWO_RANKS,
    ),
    Mutation(
        "ZeRO 3: ranks do not agree on passes",
        "oomb_accel/integrations/agreement.py",
        "    dist.all_reduce(agreed, dist.ReduceOp.MAX)\n",
        "",
        TWO_RANKS,
    ),
    Mutation(
        "ZeRO 3: gradients of all chunks but the first lost",
        "oomb_accel/gradients.py",
        "        return grad if total is None else total.add_(grad).to(grad.dtype)",
        "        return grad",
        TWO_RANKS,
    ),
    Mutation(
        "ZeRO 3: every pass is taken for the last",
        "oomb_accel/gradients.py",
        "        parameter.ds_grad_is_ready = ready",
        "        parameter.ds_grad_is_ready = True",
        TWO_RANKS,
    ),
    Mutation(
        "sparse: pages selected anew in the recompute",
        "oomb_accel/selected_part.py",
        "    if reach is not None and first_run:",
        "    if reach is not None and selector._lists.get(run.chunk.index, {}).pop(layer.layer, True):",
        SPARSE,
    ),
    Mutation(
        "sparse: selected by the queries of all documents in the chunk",
        "oomb_accel/selected_part.py",
        "        first_HTD = q_HTD[:, run.first_rows]",
        "        first_HTD = q_HTD[:, -run.first_rows.stop :]",
        SPARSE,
    ),
    Mutation(
        "sparse: sinks left out",
        "oomb_accel/past.py",
        "filter(len, (reach.sinks, reach.recents))",
        "filter(len, (reach.recents,))",
        SPARSE,
    ),
    Mutation(
        "sparse: recent pages get the gradients of sinks",
        "oomb_accel/dense_parts.py",
        "            tokens = slice(past, past + len(pages) * run.settings.page_tokens)",
        "            tokens = slice(0, len(pages) * run.settings.page_tokens)",
        SPARSE,
    ),
    Mutation(
        "sparse: dense part not joined",
        "oomb_accel/selected_part.py",
        "        others=(out_HTD, lse_HT),",
        "        others=None,",
        SPARSE,
    ),
    Mutation(
        "sparse: dQ of the dense part lost",
        "oomb_accel/selected_part.py",
        "        dq_HTD=dq_HTD,",
        "        dq_HTD=None,",
        SPARSE,
    ),
    Mutation(
        "sparse: later documents of a chunk get the first one's output",
        "oomb_accel/attention.py",
        "    x[:, :num_rows] = first",
        "    x[:, -num_rows:] = first",
        SPARSE,
    ),
    Mutation(
        "sparse: LSE of the dense part alone in the backward",
        "oomb_accel/attention.py",
        "_with_rows(lse_HT, joined_lse, lse_HT.dtype)",
        "lse_HT",
        SPARSE,
    ),
    Mutation(
        "sparse: evaluation selects pages",
        "oomb_accel/integrations/step_memory.py",
        "state.selector(tell_pages=tell_pages) if torch.is_grad_enabled() else None",
        "state.selector(tell_pages=tell_pages)",
        SPARSE,
    ),
    Mutation(
        "sparse: layers that are to stay dense select pages",
        "oomb_accel/plan/limits.py",
        "    return frozenset(full - dense)",
        "    return frozenset(full)",
        SPARSE,
    ),
    Mutation(
        "two tiers: used before it has arrived",
        "oomb_accel/pages/tiered.py",
        "        self._wait_for(arrival)\n        return slots_GN",
        "        return slots_GN",
        TIERS,
    ),
    Mutation(
        "two tiers: a slot is filled before it was saved",
        "oomb_accel/pages/tiered.py",
        "        self._free.give(slots, (saved,))",
        "        self._free.give(slots, ())",
        TIERS,
    ),
    Mutation(
        "two tiers: what was changed leaves as if the host had it",
        "oomb_accel/pages/tiered.py",
        "                self._rows[layer].changed[here] = True\n",
        "                pass\n",
        TIERS,
    ),
    Mutation(
        "two tiers: backward foreseen in the order of the forward",
        "oomb_accel/foresight.py",
        'layers if phase != "backward" else layers[::-1]',
        "layers",
        TIERS,
    ),
    *(
        Mutation(name, f"kernels/oomb_kernels/{file}", old, new, suite)
        for (file, suite), faults in PAGE_FAULTS.items()
        for name, (old, new) in faults.items()
    ),
)


def main(names: list[str]) -> int:
    """Run the chosen mutations, or all, and print a table."""
    chosen = [m for m in MUTATIONS if not names or any(n in m.name for n in names)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        survivors = 0
        failing = 0
        for suite in dict.fromkeys(mutation.suite for mutation in chosen):
            passed, seconds, detail = run_suite(copy, suite, stop_at_first=False)
            failing += not passed
            print(f"{'no mutation':52} {'passes' if passed else 'FAILS'} {seconds:6.1f} s  {detail}", flush=True)
        for mutation in chosen:
            outcome = check(copy, mutation)
            survivors += outcome.startswith(("SURVIVES", "DOES NOT APPLY"))
            print(f"{mutation.name:52} {outcome}", flush=True)
    return int(survivors + failing > 0)


def check(copy: Path, mutation: Mutation) -> str:
    """Apply one mutation, run the suite, undo it."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"DOES NOT APPLY: its text is {text.count(mutation.old)} times in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        passed, seconds, detail = run_suite(copy, mutation.suite, stop_at_first=True)
    finally:
        path.write_text(text)
    return f"{'SURVIVES' if passed else 'caught'} {seconds:6.1f} s  {detail}"


def run_suite(copy: Path, suite: tuple[str, ...], *, stop_at_first: bool) -> tuple[bool, float, str]:
    """Whether the suite passes in the copy, how long it took, and its first failure or its summary."""
    paths = [copy, copy / "kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    command += ["--tb=no", *(["-x"] if stop_at_first else []), *suite]
    start = time.monotonic()
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    if result.returncode > 1:  # below 0 it has crashed, as with memory that is written to when it is gone
        raise RuntimeError(f"pytest did not run:\n{result.stdout}\n{result.stderr}")
    return result.returncode == 0, time.monotonic() - start, (failed or lines or ["crashed"])[0 if failed else -1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
