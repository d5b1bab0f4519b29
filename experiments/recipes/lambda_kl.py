"""Ablation: the weight of the Kullback-Leibler loss, which holds the mask ratio.

Runs      CL-MAE with the Gaussian loss and the KL loss at five weights.
Paper     Acc@1 of the nearest neighbour 36.5, 37.8, 38.2, 39.5, 39.3 for 0.1, 0.2, 0.5, 1, 2; it goes on with 1. That
          39.5 is also the paper's "+ KL" row of the loss ablation, so diversity and curriculum were off.
Cost      full: 5 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 5 x 6 core minutes
Command   python -m experiments.run lambda_kl --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

PAPER = {0.1: 36.5, 0.2: 37.8, 0.5: 38.2, 1: 39.5, 2: 39.3}

RECIPE = Recipe(
    title="Weight of the Kullback-Leibler loss",
    variants=tuple(
        Variant(f"lambda_KL {weight}", f"--no_curriculum --lambda_div 0 --lambda_kl {weight}", paper=(acc1, None))
        for weight, acc1 in PAPER.items()
    ),
)
