"""Exact nearest neighbours side by side: ours, faiss-cpu's IndexFlatL2, and scikit-learn's brute force.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.bench_knn                                    # 50,000 x 8,192 x 768, alternating in one process
    python -m benchmarks.bench_knn --queries 50000 --only ours        # 50,000 x 50,000 x 768: time and peak memory

All get the same float32 features, threads and k. The others' indexes are built before the clock starts; ours has none.
Rounds alternate; ratios are of the same round.
"""

import os
import resource
from argparse import Namespace
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.timing import alternate, median, ratio
from util.cli import ArgumentParser, UserError, count, logger, number, positive
from util.evaluation.neighbours import nearest_neighbours
from util.evaluation.tables import show_table
from util.misc import generator
from util.program import run

Search = Callable[[int], np.ndarray]  # given the round, returns neighbours' indices [M, k]


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_knn", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", default=50_000, type=count, help="training vectors")
    parser.add_argument("--queries", default=8_192, type=count, help="query vectors")
    parser.add_argument("--width", default=768, type=count, help="their width")
    parser.add_argument("--k", default=20, type=count, help="neighbours")
    parser.add_argument("--rounds", default=5, type=count, help="alternating repetitions")
    cores = number(int, at_least=1, at_most=os.cpu_count() or 1)
    parser.add_argument("--threads", default=torch.get_num_threads(), type=cores, help="of each")
    parser.add_argument("--block_mb", default=256, type=positive, help="memory of a block, ours")
    parser.add_argument("--only", default=None, choices=["ours", "faiss", "sklearn"], help="measure one alone")
    return parser


def features(number: int, width: int, name: str) -> torch.Tensor:
    """Like an encoder's: a common offset, most of the variance in few directions, some noise."""
    directions = torch.randn(64, width, generator=generator("directions", width)) / 8
    draw = generator(name, number)
    position = torch.randn(number, 64, generator=draw)
    return position @ directions + 0.3 * torch.randn(number, width, generator=draw) + 3


def build_searches(train: torch.Tensor, queries: torch.Tensor, args: Namespace) -> dict[str, Search]:
    searches: dict[str, Search] = {}
    if args.only in (None, "ours"):
        searches["ours"] = lambda _: nearest_neighbours(train, queries, args.k, block_mb=args.block_mb)[1].numpy()
    try:
        if args.only in (None, "faiss"):
            import faiss  # pyright: ignore[reportMissingImports]

            faiss.omp_set_num_threads(args.threads)
            index = faiss.IndexFlatL2(args.width)
            index.add(train.numpy())
            searches["faiss"] = lambda _: index.search(queries.numpy(), args.k)[1]
        if args.only in (None, "sklearn"):
            from sklearn.neighbors import NearestNeighbors

            brute = NearestNeighbors(n_neighbors=args.k, algorithm="brute", n_jobs=args.threads).fit(train.numpy())
            searches["sklearn"] = lambda _: brute.kneighbors(queries.numpy(), return_distance=False)
    except ImportError as error:
        raise UserError(f"{error}: pip install -r benchmarks/requirements.txt, or use --only ours") from None
    return searches


def main(args: Namespace) -> None:
    if args.k > args.train:
        raise UserError(f"--k {args.k}: there are only {args.train} training vectors (--train)")
    torch.set_num_threads(args.threads)
    train, queries = features(args.train, args.width, "train"), features(args.queries, args.width, "queries")
    searches = build_searches(train, queries, args)
    times, found = alternate(searches, args.rounds)
    rows = [
        [name, median(seconds), ratio(times["ours"], seconds), f"{(found['ours'] == found[name]).mean():.5f}"]
        if "ours" in times
        else [name, median(seconds), "", ""]
        for name, seconds in times.items()
    ]
    size = f"{args.queries:,} queries, {args.train:,} training vectors of {args.width}, k = {args.k}"
    title = f"{size}, {args.threads} threads, {args.rounds} rounds (medians)"
    show_table(title, ["search", "s", "ours / it", "same neighbours"], rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    held = (train.nbytes + queries.nbytes) / 2**20
    logger.info("peak memory of the process: %.0f MB, of which %.0f MB are the features", peak, held)


if __name__ == "__main__":
    run(main, get_args_parser())
