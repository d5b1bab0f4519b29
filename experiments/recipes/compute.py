"""Is the curriculum worth its time? MAE against CL-MAE at equal epochs, and at equal compute.

Runs      MAE and CL-MAE for the same epochs; and MAE for as many epochs as CL-MAE's time would pay for, which is
          their ratio in benchmarks/README.md: 3.09 with ViT-B, 4.77 with the micro model.
Paper     the first two rows are the paper's (39.2 / 61.5 and 42.1 / 65.1); it does not compare at equal compute.
Cost      full: 6 + 20 + 20 h on eight A100 (computed, benchmarks/projection.md); small: 1 + 6 + 6 core minutes
Command   python -m experiments.run compute --scale full --data_path /data/imagenet
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="Equal epochs and equal compute",
    variants=(
        Variant("MAE", MAE, paper=(39.2, 61.5)),
        Variant("MAE, equal compute", MAE, equal_compute=True),
        Variant("CL-MAE", paper=(42.1, 65.1)),
    ),
    evaluations=("knn", "linprobe", "fewshot"),
    baseline="MAE",
)
