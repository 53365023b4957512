"""Training of transformers language models on very long documents, in memory that does not grow with them."""

from oomb_accel import deepspeed
from oomb_accel.config import OombConfig
from oomb_accel.integrations.banner import banner
from oomb_accel.integrations.callback import OombCallback
from oomb_accel.integrations.memory_watch import watch_memory
from oomb_accel.integrations.plugin import OombPlugin
from oomb_accel.integrations.prepare import prepare
from oomb_accel.integrations.stream import count_targets
from oomb_accel.integrations.transformers import disable, enable
from oomb_accel.memory_report import MemoryReport
from oomb_accel.sampler import LengthBalancedSampler

__version__ = "0.1.0"

__all__ = [
    "LengthBalancedSampler",
    "MemoryReport",
    "OombCallback",
    "OombConfig",
    "OombPlugin",
    "__version__",
    "banner",
    "count_targets",
    "deepspeed",
    "disable",
    "enable",
    "prepare",
    "watch_memory",
]
