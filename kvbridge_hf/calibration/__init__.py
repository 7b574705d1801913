"""Calibration: run both models over the same tokens, keep what a fit needs, choose layers, fit.

Modules: `traces` (the models' content keys and values), `layout` and `moments` (what is summed, and how),
`statistics` (mergeable, saved and loaded), `selection`, `solve`, `probe` and `weighting` (receiver sensitivity),
`driver` (`fit_mapper`, `collect_statistics`, `fit_from_statistics`).
"""
