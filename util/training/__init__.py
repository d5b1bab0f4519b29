"""A run from start to end: resuming, saving, progress, monitoring, clusters."""
