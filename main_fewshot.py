"""Evaluate a frozen encoder with a softmax layer trained on a few labelled images per class.

    python main_fewshot.py --finetune runs/clmae/checkpoint-399.pth --data_path data/aid --split 0.5 \
        --shots 1 2 4 8 16 --runs 3 --output_dir eval/clmae

A random-weight baseline, on a machine with no GPU and no images:
    python main_fewshot.py --model vit_micro_patch4 --data_set shapes --num_workers 2 --output_dir eval/random
"""

from argparse import Namespace

from util.arguments import add_evaluation_arguments
from util.cli import ArgumentParser, UserError, count, positive, tracked
from util.program import answer_early, run


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_fewshot.py", description=str(__doc__).split("\n")[0])
    few = parser.add_argument_group("few shots")
    few.add_argument("--shots", default=[1, 2, 4, 8, 16], type=count, nargs="+", help="training images per class")
    few.add_argument("--runs", default=3, type=count, help="random draws, with seeds seed, seed + 1, ...")
    few.add_argument("--allow_fewer", action="store_true", help="use all images of a class that has too few")
    few.add_argument("--l2", default=1.0, type=positive, help="weight of |W|^2 / 2, added to the summed losses")
    few.add_argument("--batch_size", default=256, type=count, help="images encoded at once, per process")
    add_evaluation_arguments(parser)
    return parser


answer_early(__name__, get_args_parser)

import itertools
import json
from pathlib import Path

import torch

from engine_probe import fit_softmax, predict
from util.data.sources import labels_of
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import summary
from util.evaluation.results import FEW_SHOT, Outcome, Report, say_if_few_classes
from util.evaluation.subject import Subject, open_subject
from util.evaluation.tables import show_table, shown
from util.misc import generator


def check_enough(labels: torch.Tensor, classes: list[str], args: Namespace) -> None:
    """Reject classes with fewer training images than needed, naming them."""
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    demand = 1 if args.allow_fewer else max(args.shots)
    few = [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < demand]
    if few:
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        advice = "" if args.allow_fewer else "; lower it, or use what there is with --allow_fewer"
        raise UserError(f"--shots {max(args.shots)}: too few training images in {', '.join(few[:5])}{more}{advice}")


def draw(labels: torch.Tensor, classes: list[str], most: int, seed: int) -> list[torch.Tensor]:
    """For each class, the positions of up to `most` of its images, in the order drawn.

    The first s of each class are the s-shot set, so larger sets contain smaller ones. The order depends only on the
    seed and the class.
    """
    drawn = []
    for label, name in enumerate(classes):
        positions = (labels == label).nonzero().flatten()
        order = torch.randperm(len(positions), generator=generator("few shots", seed, name))
        drawn.append(positions[order[:most]])
    return drawn


def evaluate(
    train: FeatureSet,
    test: FeatureSet,
    draws: list[list[torch.Tensor]],
    shots: list[int],
    *,
    l2: float = 1.0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The five most likely classes of each test image, int64 [S, R, N, 5], for each number of shots and each draw."""
    problems = list(itertools.product(shots, draws))
    top5 = []
    for number, drawn in tracked(problems, "few shots", len(problems), 1, "heads/s"):
        chosen = torch.cat([positions[:number] for positions in drawn])
        head = fit_softmax(train.features[chosen], train.labels[chosen], len(drawn), l2, device)
        top5.append(predict(head, test.features)[0, 0])
    return torch.stack(top5).view(len(shots), len(draws), len(test), -1)


def save_draws(
    subject: Subject, train: FeatureSet, draws: list[list[torch.Tensor]], seeds: list[int], path: Path
) -> None:
    """Names of the drawn images, by seed and class, in the order drawn."""
    names = subject.names["train"]
    lists = {
        str(seed): {
            name: [names[train.indices[position]] for position in positions.tolist()]
            for name, positions in zip(subject.classes, drawn, strict=True)
        }
        for seed, drawn in zip(seeds, draws, strict=True)
    }
    path.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")


def main(args: Namespace) -> None:
    args.shots = sorted(set(args.shots))
    subject = open_subject(args)
    check_enough(labels_of(subject.datasets["train"].source), subject.classes, args)  # fail before any work
    report = Report(subject, FEW_SHOT)
    train, test = subject.features("train"), subject.features("val")
    check_enough(train.labels, subject.classes, args)  # among the readable images
    seeds = [args.seed + i for i in range(args.runs)]
    draws = [draw(train.labels, subject.classes, max(args.shots), seed) for seed in seeds]
    top5 = evaluate(train, test, draws, args.shots, l2=args.l2, device=subject.device)

    metrics = {str(shots): summary(each, test.labels) for shots, each in zip(args.shots, top5, strict=True)}
    say_if_few_classes(len(subject.classes))
    show_table(
        f"few-shot linear probing on {subject.data_name}, seeds {', '.join(map(str, seeds))}",
        ["shots", "Acc@1", "Acc@5"],
        [[shots, shown(values, "acc1"), shown(values, "acc5")] for shots, values in metrics.items()],
    )
    for shots, values in metrics.items():
        report.accuracies(values, int(shots))
    settings = {"l2": args.l2, "allow_fewer": args.allow_fewer}
    outcome = Outcome(test, top5, seeds, settings, len(train), {"shots": metrics}, {"shots": args.shots})
    path = report.write(outcome)
    if path:
        save_draws(subject, train, draws, seeds, path.with_suffix(".draws.json"))


if __name__ == "__main__":
    run(main, get_args_parser())
