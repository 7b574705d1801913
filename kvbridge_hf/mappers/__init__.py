"""Methods that turn calibration statistics into a mapper, one file a method; importing this registers them."""

from . import anchored, causal, fuser, low_rank, mlp, ridge, shared_space  # noqa: F401
from .config import DistillationConfig, FitConfig

__all__ = ["DistillationConfig", "FitConfig"]
