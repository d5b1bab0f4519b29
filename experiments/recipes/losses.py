"""Ablation: the losses of the masking module, one after the other.

Runs      vanilla MAE; masks from a CMM with the Gaussian loss alone; with KL; with diversity; with the curriculum,
          which is CL-MAE.
Paper     Acc@1 / Acc@5 of the nearest neighbour: MAE 39.2 / 61.5, Gauss 38.7 / 61.7, + KL 39.5 / 61.9,
          + diversity 40.8 / 62.4, + curriculum 42.1 / 65.1.
Cost      full: 6 + 4 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 1 + 4 x 6 core minutes
Command   python -m experiments.run losses --scale full --data_path /data/imagenet
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="Losses of the masking module",
    variants=(
        Variant("MAE", MAE, paper=(39.2, 61.5)),
        Variant("Gauss", "--no_curriculum --lambda_kl 0 --lambda_div 0", paper=(38.7, 61.7)),
        Variant("+ KL", "--no_curriculum --lambda_div 0", paper=(39.5, 61.9)),
        Variant("+ diversity", "--no_curriculum", paper=(40.8, 62.4)),
        Variant("+ curriculum", paper=(42.1, 65.1)),
    ),
    baseline="MAE",
)
