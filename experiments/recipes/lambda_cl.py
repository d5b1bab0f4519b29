"""Ablation: the curriculum weight at the end of training, from neutral (0) to the adversary (below 0).

Runs      CL-MAE at four ends of the curriculum, all from 1.
Paper     Acc@1 of the nearest neighbour 39.5, 41.4, 40.7, 38.1 for 0, -0.1, -0.15, -0.2; it goes on with -0.1.
          The final method, with diversity at weight 2, has 42.1. So this table seems to be made without the
          diversity loss, and the runs here have none; the paper does not say.
Cost      full: 4 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 4 x 6 core minutes
Command   python -m experiments.run lambda_cl --scale full --data_path /data/imagenet

The same with the diversity loss, and with the CMM's two learning rate schedules, is the recipe `schedule`.
"""

from experiments.recipe import Recipe, Variant

PAPER = {0: 39.5, -0.1: 41.4, -0.15: 40.7, -0.2: 38.1}

RECIPE = Recipe(
    title="Curriculum weight at the end",
    variants=tuple(
        Variant(f"lambda_CL(T) {end}", f"--lambda_div 0 --lambda_cl_end {end}", paper=(acc1, None))
        for end, acc1 in PAPER.items()
    ),
)
