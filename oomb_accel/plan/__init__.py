"""What a step takes before it runs: memory by tier, time, traffic; for laptops too, so nothing here imports torch."""

from oomb_accel.plan.adapters import Adapters
from oomb_accel.plan.choose import Choice, choose
from oomb_accel.plan.fit import Estimate, estimate, largest_tokens
from oomb_accel.plan.gpus import GPUS, Gpu, gpu_named, gpu_of_device
from oomb_accel.plan.job import Found, Job, check_base_dtype, check_settings, dtypes_of, settings_of
from oomb_accel.plan.memory import Memory, estimate_memory
from oomb_accel.plan.memory_plan import MemoryPlan, plan_memory
from oomb_accel.plan.pages import PageDemand, PageLayout, page_demand
from oomb_accel.plan.pools import least_host_bytes
from oomb_accel.plan.shape import ModelShape, shape_of
from oomb_accel.plan.source import read_shape
from oomb_accel.plan.suggest import Suggestion, longest_on_this_machine, nearest, suggestions
from oomb_accel.plan.timing import StepTime, estimate_time

__all__ = [
    "GPUS",
    "Adapters",
    "Choice",
    "Estimate",
    "Found",
    "Gpu",
    "Job",
    "Memory",
    "MemoryPlan",
    "ModelShape",
    "PageDemand",
    "PageLayout",
    "StepTime",
    "Suggestion",
    "check_base_dtype",
    "check_settings",
    "choose",
    "dtypes_of",
    "estimate",
    "estimate_memory",
    "estimate_time",
    "gpu_named",
    "gpu_of_device",
    "largest_tokens",
    "least_host_bytes",
    "longest_on_this_machine",
    "nearest",
    "page_demand",
    "plan_memory",
    "read_shape",
    "settings_of",
    "shape_of",
    "suggestions",
]
