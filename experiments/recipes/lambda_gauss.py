"""Ablation: the weight of the Gaussian loss, which makes masks decisive.

Runs      CL-MAE with the Gaussian loss alone, at five weights. Without the KL loss nothing holds the mask ratio.
Paper     Acc@1 of the nearest neighbour 35.0, 37.8, 35.1, 38.7, 38.2 for 1, 2, 5, 10, 20; it goes on with 10. That
          38.7 is also the paper's "Gauss" row of the loss ablation, so no other loss was on.
Cost      full: 5 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 5 x 6 core minutes
Command   python -m experiments.run lambda_gauss --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

PAPER = {1: 35.0, 2: 37.8, 5: 35.1, 10: 38.7, 20: 38.2}

RECIPE = Recipe(
    title="Weight of the Gaussian loss",
    variants=tuple(
        Variant(
            f"lambda_Gauss {weight}",
            f"--no_curriculum --lambda_kl 0 --lambda_div 0 --lambda_gauss {weight}",
            paper=(acc1, None),
        )
        for weight, acc1 in PAPER.items()
    ),
)
