"""Can the masking module still turn adversary? The end of the curriculum under two learning rates of the CMM.

Runs      CL-MAE with lambda_CL(T) 0, -0.1, -0.2 and -1, each with --cmm_schedule constant and cosine. The table of mask
          health tells whether the hidden patches' error rises above random masks' when the sign has flipped.
Paper     silent about the CMM's rate; its authors' code decays it. The table of lambda_CL(T) is the recipe `lambda_cl`.
Cost      full: 8 x 20 h on eight A100 (computed, benchmarks/projection.md); small: 8 x 6 core minutes
Command   python -m experiments.run schedule --scale full --data_path /data/imagenet
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="End of the curriculum and rate of the masking module",
    variants=(
        Variant("MAE", MAE),
        *(
            Variant(f"lambda_CL(T) {end}, {schedule}", f"--lambda_cl_end {end} --cmm_schedule {schedule}")
            for schedule in ("constant", "cosine")
            for end in (0, -0.1, -0.2, -1)
        ),
    ),
    pictures=("--curve",),
    baseline="MAE",
)
