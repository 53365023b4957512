"""Training of transformers language models on very long documents, in memory that does not grow with them."""

from oomb_accel.config import OombConfig
from oomb_accel.integrations.banner import banner
from oomb_accel.integrations.stream import count_targets
from oomb_accel.integrations.transformers import disable, enable

__version__ = "0.1.0"

__all__ = ["OombConfig", "__version__", "banner", "count_targets", "disable", "enable"]
