"""Chunk recurrence for code that uses DeepSpeed by itself.

``initialize`` stands in for ``deepspeed.initialize``; ``install`` makes DeepSpeed's own function do the same.
``step`` reduces gradients chunk by chunk, where ZeRO's gradient memory matters. ``save_adapter`` gathers and writes
an adapter under every ZeRO stage, and ``check_adapter`` refuses one of another model or adapter.
"""

from oomb_accel.integrations.deepspeed_step import step
from oomb_accel.integrations.engine import initialize, install, uninstall
from oomb_accel.integrations.saving import check_adapter, save_adapter

__all__ = ["check_adapter", "initialize", "install", "save_adapter", "step", "uninstall"]
