"""Figure: masks without the diversity loss.

Runs      CL-MAE with and without the diversity loss, and draws the masks of 64 images side by side.
Paper     a figure; without the loss, different images get nearly the same mask.
Cost      full: 2 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 2 x 6 core minutes
Command   python -m experiments.run masks_no_diversity --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

RECIPE = Recipe(
    title="Masks without the diversity loss",
    variants=(Variant("CL-MAE"), Variant("without diversity", "--lambda_div 0")),
    evaluations=(),
    pictures=("--grid", "masks", "diversity", "positions", "--curve", "--blocks", "1"),
)
