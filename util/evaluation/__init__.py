"""From a checkpoint to a number: subject, features, neighbours, metrics, results, comparisons, tables."""
