"""Methods that turn calibration statistics into a mapper, one file a method."""

from .config import FitConfig

__all__ = ["FitConfig"]
