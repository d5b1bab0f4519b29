"""Evaluate a frozen encoder by nearest neighbour: an image gets the label of the most similar training image.

    python main_knn.py --finetune runs/clmae/checkpoint-399.pth --data_path /data/imagenet --output_dir eval/clmae

Split over several processes:
    torchrun --nproc_per_node=8 main_knn.py --finetune runs/clmae/checkpoint-399.pth --data_path /data/imagenet

A random-weight baseline, on a machine with no GPU and no images:
    python main_knn.py --model vit_micro_patch4 --data_set shapes --num_workers 2 --output_dir eval/random
"""

from argparse import Namespace

from util.arguments import add_evaluation_arguments
from util.cli import ArgumentParser, UserError, count, logger, number
from util.program import answer_early, run

DEFAULT_K = (1, 5, 10, 20)


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_knn.py", description=str(__doc__).split("\n")[0])
    knn = parser.add_argument_group("nearest neighbours")
    knn.add_argument(
        "--distance", default="euclidean", choices=["euclidean", "cosine"], help="distance between features"
    )
    knn.add_argument("--k", type=count, nargs="+", help="numbers of neighbours that vote; default: 1 5 10 20")
    knn.add_argument("--block_mb", default=256, type=number(at_least=1), help="megabytes per block of distances")
    knn.add_argument("--batch_size", default=256, type=count, help="images encoded at once, per process")
    add_evaluation_arguments(parser)
    return parser


answer_early(__name__, get_args_parser)

import torch

from util.evaluation.features import FeatureSet
from util.evaluation.metrics import summary
from util.evaluation.neighbours import inverse_distance, nearest_neighbours, vote
from util.evaluation.results import TOP, Outcome, Report
from util.evaluation.subject import open_subject
from util.evaluation.tables import show_accuracies, show_table


def numbers_of_neighbours(args: Namespace, num_train: int) -> list[int]:
    """The values of `--k`, none larger than the training set."""
    if args.k is None:
        return [k for k in DEFAULT_K if k <= num_train]
    if max(args.k) > num_train:
        raise UserError(f"--k {max(args.k)}: there are only {num_train} training images")
    return sorted(set(args.k))


def neighbour_votes(
    labels: torch.Tensor, distances: torch.Tensor, truth: torch.Tensor, ks: list[int], num_classes: int
) -> dict[str, dict[str, float]]:
    """Acc@1 in percent of majority and distance-weighted votes of the k nearest, given labels and distances [M, K]."""
    votes = {str(k): {} for k in ks}
    for k in ks:
        weights = inverse_distance(distances[:, :k])
        for name, ballot in {"majority": torch.ones_like(weights), "weighted": weights}.items():
            right = vote(labels[:, :k], ballot, num_classes) == truth
            votes[str(k)][name] = 100 * right.double().mean().item()
    return votes


def evaluate(
    train: FeatureSet,
    test: FeatureSet,
    *,
    ks: list[int],
    num_classes: int,
    cosine: bool = False,
    device: torch.device | str = "cpu",
    block_mb: float = 256,
) -> tuple[torch.Tensor, dict[str, dict[str, float]]]:
    """Labels of the five nearest training images, int64 [1, N, 5] (-1 where there are fewer), and the votes."""
    most = max([*ks, min(TOP, len(train))])
    distances, index = nearest_neighbours(
        train.features, test.features, most, cosine=cosine, device=device, block_mb=block_mb, header="neighbours"
    )
    labels = train.labels[index]
    nearest = torch.nn.functional.pad(labels[:, :TOP], (0, max(TOP - most, 0)), value=-1)
    return nearest[None], neighbour_votes(labels, distances, test.labels, ks, num_classes)


def main(args: Namespace) -> None:
    subject = open_subject(args)
    numbers_of_neighbours(args, len(subject.datasets["train"]))  # fail before any work is done
    report = Report(subject, "knn" if args.distance == "euclidean" else f"knn-{args.distance}")
    train, test = subject.features("train"), subject.features("val")
    ks = numbers_of_neighbours(args, len(train))  # among the readable images
    top5, votes = evaluate(
        train,
        test,
        ks=ks,
        num_classes=len(subject.classes),
        cosine=args.distance == "cosine",
        device=subject.device,
        block_mb=args.block_mb,
    )

    metrics = summary(top5, test.labels)
    show_accuracies(f"nearest neighbour ({args.distance}) on {subject.data_name}", metrics)
    if len(subject.classes) < TOP:
        logger.info("(Acc@5 is over the labels of the five nearest images; classes: %d)", len(subject.classes))
    show_table(
        "votes of the k nearest, Acc@1",
        ["k", "majority", "weighted"],
        [[k, f"{acc['majority']:.2f}", f"{acc['weighted']:.2f}"] for k, acc in votes.items()],
    )
    report.accuracies(metrics, step=0)
    for k, acc in votes.items():
        for name, value in acc.items():
            report.scalar(name, value, int(k))
    report.write(Outcome(test, top5, [args.seed], {"distance": args.distance}, len(train), {"votes": votes}))


if __name__ == "__main__":
    run(main, get_args_parser())
