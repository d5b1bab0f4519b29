"""Ablation: the number N of transformer blocks in the masking module.

Runs      CL-MAE with 4, 5 and 6 blocks.
Paper     Acc@1 of the nearest neighbour 42.1, 42.1, 40.0; it goes on with 5.
Cost      full: 3 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 3 x 6 core minutes
Command   python -m experiments.run cmm_depth --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

PAPER = {4: 42.1, 5: 42.1, 6: 40.0}

RECIPE = Recipe(
    title="Blocks of the masking module",
    variants=tuple(
        Variant(f"N = {depth}", f"--cmm_depth {depth}", paper=(acc1, None)) for depth, acc1 in PAPER.items()
    ),
)
