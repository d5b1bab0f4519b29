"""Ablation: the weight of the diversity loss, which keeps the masks of a batch apart.

Runs      CL-MAE, all losses on, at three weights of the diversity loss.
Paper     Acc@1 of the nearest neighbour 41.4, 42.1, 40.6 for 1, 2, 5; 42.1 is the final method.
Cost      full: 3 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 3 x 6 core minutes
Command   python -m experiments.run lambda_div --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

PAPER = {1: 41.4, 2: 42.1, 5: 40.6}

RECIPE = Recipe(
    title="Weight of the diversity loss",
    variants=tuple(
        Variant(f"lambda_div {weight}", f"--lambda_div {weight}", paper=(acc1, None)) for weight, acc1 in PAPER.items()
    ),
)
