"""Figure: the masks of a curriculum, from partner to adversary.

Runs      CL-MAE, and draws images, Z, masks and reconstructions at five moments of training, with curves of the masks'
          health and of the hidden patches' error over random masks'.
Paper     a figure; at first the masks hide what is easy to reconstruct, at the end what is hard.
Cost      full: 20 h on eight A100 (computed, benchmarks/projection.md); small: 6 core minutes
Command   python -m experiments.run masks_curriculum --scale full --data_path /data/imagenet
"""

from experiments.recipe import Recipe, Variant

RECIPE = Recipe(
    title="Masks over the curriculum",
    variants=(Variant("CL-MAE"),),
    evaluations=(),
    pictures=("--grid", "masks", "diversity", "positions", "--curve", "--blocks", "5"),
)
