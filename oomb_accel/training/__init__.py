"""Fine-tuning from a recipe: flat settings, one loop on Accelerate, an adapter that plain PEFT loads."""

from oomb_accel.training.loop import Summary, train
from oomb_accel.training.recipe import Recipe

__all__ = ["Recipe", "Summary", "train"]
