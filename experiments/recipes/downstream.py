"""Transfer: the five downstream sets, by nearest neighbours and linear probing.

Runs      MAE and CL-MAE, pretrained as for the main results, judged on Aerial Images, Airbus Wind Turbines,
          Architectural Heritage Elements, Sea Animals and Sport Balls: folders aid, airbus, ahe, sea_animals and
          sport_balls below --downstream_path, as docs/datasets.md makes them. At the small scale the built-in shapes
          stand in for them.
Paper     gains of CL-MAE in these tables; their figures are not kept here.
Cost      full: nothing but evaluations once the main results are there; small: a minute
Command   python -m experiments.run downstream --scale full --data_path /data/imagenet --downstream_path /data
"""

from experiments.recipe import MAE, Recipe, Variant

RECIPE = Recipe(
    title="Transfer to other data",
    variants=(Variant("MAE", MAE), Variant("CL-MAE")),
    evaluations=("knn", "linprobe"),
    downstream=True,
    baseline="MAE",
)
