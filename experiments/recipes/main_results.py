"""Main results: MAE against CL-MAE, in three sizes.

Runs      both methods with ViT-B, ViT-L and ViT-H, judged by nearest neighbours and linear probing. At the small scale
          there is one size.
Paper     Acc@1 / Acc@5 of the nearest neighbour on ImageNet-200, MAE and CL-MAE:
          ViT-B 39.2 / 61.5 and 42.1 / 65.1, ViT-L 44.8 / 67.0 and 45.2 / 67.2, ViT-H 44.1 / 66.1 and 45.7 / 68.2.
Cost      full: 6 + 20 h, 14 + 47 h and 32 + 116 h on eight A100 (computed, benchmarks/projection.md), and linear
          probing beside them; small: 1 + 6 core minutes
Command   python -m experiments.run main_results --scale full --data_path /data/imagenet
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="MAE against CL-MAE",
    variants=(
        Variant("MAE", MAE, paper=(39.2, 61.5)),
        Variant("CL-MAE", paper=(42.1, 65.1)),
        Variant("MAE, ViT-L", f"{MAE} --model mae_vit_large", paper=(44.8, 67.0), full_only=True),
        Variant("CL-MAE, ViT-L", "--model mae_vit_large", paper=(45.2, 67.2), full_only=True),
        Variant("MAE, ViT-H", f"{MAE} --model mae_vit_huge", paper=(44.1, 66.1), full_only=True),
        Variant("CL-MAE, ViT-H", "--model mae_vit_huge", paper=(45.7, 68.2), full_only=True),
    ),
    evaluations=("knn", "linprobe"),
    baseline="MAE",
)
