"""Figure: masks without the Kullback-Leibler loss.

Runs      CL-MAE with and without the KL loss, and draws masks and their visible share over training.
Paper     a figure; without the loss, the mask ratio is no longer what was asked for.
Cost      full: 2 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 2 x 6 core minutes
Command   python -m experiments.run masks_no_kl --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

RECIPE = Recipe(
    title="Masks without the Kullback-Leibler loss",
    variants=(Variant("CL-MAE"), Variant("without KL", "--lambda_kl 0")),
    evaluations=(),
    pictures=("--grid", "masks", "diversity", "positions", "--curve", "--blocks", "1"),
)
