"""Cached features beside upstream's linear probing, and our heads beside scikit-learn's logistic regression.

    pip install -r benchmarks/requirements.txt
    OMP_NUM_THREADS=1 python -m benchmarks.bench_probe                     # all three parts; minutes on one core
    python -m benchmarks.bench_probe --parts protocol --model vit_tiny_patch16 --input_size 224

protocol    90 epochs of augmented images, encoded anew (extrapolated from a few iterations), against encoding once and
            90 epochs on features: the same encoder, data and head, through main_linprobe.py's own functions
fewshot     engine_probe.fit_softmax against LogisticRegression: the same synthetic features, draws and objective
full        the probe's LARS head, 90 epochs on all features, and fit_softmax, against LogisticRegression

Whatever is compared alternates within each round, because a shared machine is faster at some times than at others.
"""

import statistics
import time
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F

import main_linprobe
from benchmarks.bench_knn import features as vectors
from engine_probe import CachedBatches, LinearHeads, build_optimizer, fit_softmax, predict, train_one_epoch
from main_fewshot import draw
from models_vit import SIZES
from util.arguments import check_at_least
from util.cli import ArgumentParser, UserError, logger, run
from util.evaluation.features import FeatureSet
from util.evaluation.subject import Subject, open_subject
from util.evaluation.tables import show_table

try:
    from sklearn.linear_model import LogisticRegression
except ImportError:
    LogisticRegression = None

EPOCHS, WARMUP = 90, 10  # upstream's
GRAD_TOLERANCE = 1e-4  # of fit_softmax: the largest component of the gradient of the sum
RATES = (0.1, 1.0, 3.0, 10.0)  # --blr; the first is upstream's
SPREAD = 0.4  # of the class centres: one shot gets some test vectors right, all features nearly all

Solver = Callable[[torch.Tensor, torch.Tensor, Namespace], LinearHeads]


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_probe", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=list(PARTS), nargs="+", choices=list(PARTS), help="what to measure")
    parser.add_argument("--rounds", default=3, type=int, help="alternating repetitions")
    parser.add_argument("--threads", default=1, type=int, help="of torch; set OMP_NUM_THREADS alike for scikit-learn")
    parser.add_argument("--model", default="vit_micro_patch4", choices=list(SIZES), help="encoder of `protocol`")
    parser.add_argument("--input_size", default=32, type=int, help="of its images")
    parser.add_argument("--images", default=2048, type=int, help="training images (built-in shapes) of `protocol`")
    parser.add_argument("--batch_size", default=256, type=int, help="of all heads trained by LARS")
    parser.add_argument("--iterations", default=4, type=int, help="of upstream's protocol that are measured per round")
    parser.add_argument("--shots", default=[1, 2, 4, 8, 16], type=int, nargs="+", help="images per class of `fewshot`")
    parser.add_argument("--draws", default=3, type=int, help="of each number of shots")
    parser.add_argument("--classes", default=30, type=int, help="of the synthetic features")
    parser.add_argument("--train", default=5000, type=int, help="training features")
    parser.add_argument("--test", default=5000, type=int, help="test features")
    parser.add_argument("--width", default=768, type=int, help="of the features")
    parser.add_argument("--flush_denormal", action="store_true", help="numbers below 1e-38 count as 0")
    parser.add_argument("--l2", default=1.0, type=float, help="as main_fewshot.py")
    return parser


def check_args(args: Namespace) -> None:
    names = ("rounds", "threads", "input_size", "iterations", "draws", "test", "width")
    check_at_least(args, 1, *names)
    check_at_least(args, 2, "batch_size", "classes")
    if args.l2 <= 0:
        raise UserError(f"--l2 {args.l2} must be above 0")
    if min(args.images, args.train) < args.batch_size:
        raise UserError(f"--images {args.images} and --train {args.train} must fill a --batch_size {args.batch_size}")
    if args.train < max(args.shots) * args.classes:
        raise UserError(f"--train {args.train} is too few for {max(args.shots)} shots of {args.classes} classes")
    if LogisticRegression is None and set(args.parts) - {"protocol"}:
        raise UserError("scikit-learn is missing: pip install -r benchmarks/requirements.txt, or --parts protocol")


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of rounds, and their range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"


# --- Upstream's protocol and cached features ---


def open_shapes(args: Namespace, *flags: str) -> tuple[Subject, Namespace]:
    given = ["--model", args.model, "--input_size", str(args.input_size), "--data_set", "shapes", "--device", "cpu"]
    given += ["--shapes_images", str(args.images), "--batch_size", str(args.batch_size), "--num_workers", "0", *flags]
    probe_args = main_linprobe.get_args_parser().parse_args([*given, "--no_cache", "--output_dir", ""])
    return open_subject(probe_args), probe_args


def encoded_iterations(subject: Subject, probe_args: Namespace, number: int) -> None:
    """Some iterations of upstream's protocol."""
    batches = main_linprobe.build_batches(subject, [0], None, None, probe_args)
    train_head(subject.encoder.embed_dim, len(subject.classes), islice(batches.epoch(0), number), number, probe_args)


def train_head(width: int, classes: int, batches, number: int, probe_args: Namespace) -> None:
    heads = LinearHeads([0], 1, width, classes)
    train_one_epoch(heads, batches, number, build_optimizer(heads, probe_args), torch.tensor([0.1]), 0, probe_args)


def bench_protocol(args: Namespace) -> None:
    subject, encoded_args = open_shapes(args)
    cached_subject, cached_args = open_shapes(args, "--cache_features")
    per_epoch = args.images // args.batch_size
    number = min(args.iterations, per_epoch)
    seconds = defaultdict(list)
    for _ in range(args.rounds):
        some, _ = timed(lambda: encoded_iterations(subject, encoded_args, number))
        seconds["upstream"].append(some / number * per_epoch * EPOCHS)
        extraction, train = timed(lambda: cached_subject.features("train"))
        training, _ = timed(lambda train=train: train_lars(train, [cached_args.blr], args))
        seconds["extraction"].append(extraction)
        seconds["cached"].append(extraction + training)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    logger.info(
        "%s, %d px, %d images: upstream's %d epochs %.0f s (extrapolated from %d iterations), cached %.1f s, of which "
        "%.1f s encode the images once; upstream / cached: %s",
        *(args.model, args.input_size, args.images, EPOCHS, median["upstream"], number),
        *(median["cached"], median["extraction"], ratio(seconds["upstream"], seconds["cached"])),
    )


# --- Solvers of the same objective ---


def synthetic(number: int, args: Namespace, name: str) -> FeatureSet:
    """bench_knn's vectors around a centre for each class, in the directions in which they vary most."""
    labels = torch.arange(number) % args.classes
    centres = vectors(args.classes, args.width, "centres") - 3  # without the common offset
    return FeatureSet(vectors(number, args.width, name) + SPREAD * centres[labels], labels, torch.arange(number))


def fit_ours(x: torch.Tensor, labels: torch.Tensor, args: Namespace) -> LinearHeads:
    return fit_softmax(x, labels, args.classes, args.l2, "cpu")


def fit_sklearn(x: torch.Tensor, labels: torch.Tensor, args: Namespace, tolerance: float = 1e-4) -> LinearHeads:
    """The same objective on features standardised the same way; the default tolerance is scikit-learn's."""
    heads = LinearHeads([0], 1, x.shape[1], args.classes).double()
    x = x.double()
    heads.norm.running_mean.copy_(x.mean(dim=0))
    heads.norm.running_var.copy_(x.var(dim=0, correction=0))
    x = (x - heads.norm.running_mean) / (heads.norm.running_var + heads.norm.eps).sqrt()
    model = LogisticRegression(C=1 / args.l2, tol=tolerance, max_iter=1000).fit(x.numpy(), labels.numpy())
    heads.weight.data.copy_(torch.from_numpy(model.coef_))
    heads.bias.data.copy_(torch.from_numpy(model.intercept_))
    return heads.float()


def fit_sklearn_tightly(x: torch.Tensor, labels: torch.Tensor, args: Namespace) -> LinearHeads:
    """As exact as ours: scikit-learn's tolerance is for the gradient of the mean, ours for that of the sum."""
    return fit_sklearn(x, labels, args, GRAD_TOLERANCE / len(x))


SOLVERS: dict[str, Solver] = {"ours": fit_ours, "sklearn": fit_sklearn, "sklearn, our tolerance": fit_sklearn_tightly}


@torch.no_grad()
def objective(heads: LinearHeads, x: torch.Tensor, labels: torch.Tensor, l2: float) -> float:
    heads = heads.double().eval()
    logits = heads(x.double()[None])[0, 0]
    value = F.cross_entropy(logits, labels, reduction="sum") + l2 / 2 * heads.weight.square().sum()
    heads.float()
    return value.item()


def compare_solvers(problems: list[FeatureSet], test: FeatureSet, title: str, args: Namespace) -> list[list[str]]:
    """Rows of a table: seconds for all problems, ours / theirs, agreement, how far above ours the objective ends."""
    seconds = {name: [0.0] * args.rounds for name in SOLVERS}
    found: dict[str, list[LinearHeads]] = {}
    for turn in range(args.rounds):
        found = {name: [] for name in SOLVERS}
        for problem in problems:
            for name, solve in SOLVERS.items():
                took, heads = timed(lambda s=solve, p=problem: s(p.features, p.labels, args))
                seconds[name][turn] += took
                found[name].append(heads)
    tops = {name: torch.stack([predict(h, test.features)[0, 0, :, 0] for h in heads]) for name, heads in found.items()}
    values = {
        name: [objective(h, p.features, p.labels, args.l2) for h, p in zip(heads, problems, strict=True)]
        for name, heads in found.items()
    }
    rows = []
    for name in SOLVERS:
        excess = max((a - b) / b for a, b in zip(values[name], values["ours"], strict=True))
        agreement = (tops[name] == tops["ours"]).float().mean().item()
        accuracy = (tops[name] == test.labels).float().mean().item()
        took = f"{statistics.median(seconds[name]):.2f}"
        beside = "" if name == "ours" else ratio(seconds["ours"], seconds[name])
        rows.append([title, name, took, beside, f"{100 * agreement:.2f} %"])
        rows[-1] += [f"{100 * accuracy:.1f} %", f"{values[name][0]:.6g}", f"{excess:+.1e}"]
    return rows


HEADER = ["problem", "solver", "s", "ours / it", "same class", "Acc@1", "objective", "above ours"]


def bench_fewshot(args: Namespace) -> None:
    train, test = synthetic(args.train, args, "train"), synthetic(args.test, args, "test")
    names = [str(label) for label in range(args.classes)]
    draws = [draw(train.labels, names, max(args.shots), seed) for seed in range(args.draws)]
    rows = []
    for shots in args.shots:
        problems = [train.take(torch.cat([positions[:shots] for positions in drawn])) for drawn in draws]
        rows += compare_solvers(problems, test, f"{shots} shots", args)
    show_table(f"{args.classes} classes, width {args.width}, {args.draws} draws of each", HEADER, rows)


# --- All training features ---


def train_lars(train: FeatureSet, rates: list[float], args: Namespace) -> LinearHeads:
    """The probe's head at several --blr at once, 90 epochs on cached features."""
    schedule = dict(epochs=EPOCHS, warmup_epochs=WARMUP, min_lr=0.0, weight_decay=0.0, accum_iter=1)
    probe_args = Namespace(**schedule)
    batches = CachedBatches(train, [0], args.batch_size, torch.device("cpu"))
    heads = LinearHeads([0], len(rates), train.features.shape[1], int(train.labels.max()) + 1)
    optimizer = build_optimizer(heads, probe_args)
    absolute = torch.tensor(rates) * args.batch_size / 256
    for epoch in range(EPOCHS):
        train_one_epoch(heads, batches.epoch(epoch), len(batches), optimizer, absolute, epoch, probe_args)
    return heads


def bench_full(args: Namespace) -> None:
    train, test = synthetic(args.train, args, "train"), synthetic(args.test, args, "test")
    show_table("all training features", HEADER, compare_solvers([train], test, f"{args.train} x {args.width}", args))
    seconds, heads = defaultdict(list), None
    for _ in range(args.rounds):
        seconds["one"].append(timed(lambda: train_lars(train, [RATES[0]], args))[0])
        took, heads = timed(lambda: train_lars(train, list(RATES), args))
        seconds["grid"].append(took)
        seconds["sklearn"].append(timed(lambda: fit_sklearn(train.features, train.labels, args))[0])
    right = predict(heads, test.features)[0, :, :, 0] == test.labels
    rows = [[f"{blr:g}", f"{100 * share:.1f} %"] for blr, share in zip(RATES, right.float().mean(dim=1), strict=True)]
    show_table("the LARS head, test accuracy by --blr", ["--blr", "Acc@1"], rows)
    for name, label in {"one": "one rate", "grid": f"{len(RATES)} rates at once"}.items():
        text = ratio(seconds[name], seconds["sklearn"])
        logger.info("LARS, %s: %.1f s; LARS / sklearn: %s", label, statistics.median(seconds[name]), text)


PARTS = {"protocol": bench_protocol, "fewshot": bench_fewshot, "full": bench_full}


def main(args: Namespace) -> None:
    check_args(args)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(args.flush_denormal)
    warnings.filterwarnings("ignore", "The number of unique classes")  # one shot is meant to be one
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    run(main, get_args_parser())
