"""Few-shot linear probing: 1, 2, 4, 8 and 16 labelled images per class, three draws each.

Runs      MAE and CL-MAE, pretrained as for the main results, on the pretraining's data and the downstream sets.
Paper     curves of both methods; their figures are not kept here.
Cost      full: nothing but evaluations once the main results are there; small: a minute
Command   python -m experiments.run fewshot --scale full --data_path /data/imagenet --downstream_path /data
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="Few-shot linear probing",
    variants=(Variant("MAE", MAE), Variant("CL-MAE")),
    evaluations=("fewshot",),
    downstream=True,
    baseline="MAE",
)
