"""What lets the masking module turn adversary, and does that help?

Runs      CL-MAE as it is; with the curriculum down to -1 instead of -0.1; with a tenth of the Gaussian weight, so that
          masks stay movable; with none of it; with a tenth and -1; and with these and three times the CMM's learning
          rate. Compare the errors over random masks' (below 1: partner, above: adversary) with the accuracies.
Paper     nothing of this. Its end of the curriculum is -0.1, which leaves the adversary the last eleventh of training.
Cost      full: 6 + 6 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 1 + 6 x 6 core minutes
Command   python -m experiments.run adversary --scale full --data_path /data/imagenet
"""

from experiments.recipe import MAE, Recipe, Variant

END, MOVABLE = "--lambda_cl_end -1", "--lambda_gauss 1"

RECIPE = Recipe(
    title="What lets the masking module turn adversary",
    variants=(
        Variant("MAE", MAE),
        Variant("CL-MAE"),
        Variant("lambda_CL(T) -1", END),
        Variant("lambda_Gauss 1", MOVABLE),
        Variant("lambda_Gauss 0", "--lambda_gauss 0"),
        Variant("lambda_Gauss 1, -1", f"{MOVABLE} {END}"),
        Variant("lambda_Gauss 1, -1, faster CMM", f"{MOVABLE} {END} --cmm_blr 1.2e-2"),
    ),
    pictures=("--grid", "masks", "positions", "--curve", "--blocks", "1"),
    baseline="MAE",
)
