"""Figures: style, curves, masks, and the snapshots of a run that they show."""
