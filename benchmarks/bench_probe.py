"""Cached features beside upstream's linear probing, and our heads beside scikit-learn's logistic regression.

    pip install -r benchmarks/requirements.txt
    OMP_NUM_THREADS=1 python -m benchmarks.bench_probe                     # all three parts; minutes on one core
    python -m benchmarks.bench_probe --parts protocol --model vit_tiny_patch16 --input_size 224

protocol    90 epochs of augmented images, encoded anew (extrapolated from a few iterations), against encoding once and
            90 epochs on features: the same encoder, data and head, through main_linprobe.py's own functions
fewshot     engine_probe.fit_softmax against LogisticRegression: the same synthetic features, draws and objective
full        the probe's LARS head, 90 epochs on all features, and fit_softmax, against LogisticRegression

Whatever is compared alternates within each round.
"""

import warnings
from argparse import Namespace
from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F

import main_linprobe
from benchmarks.bench_knn import features as vectors
from benchmarks.timing import alternate, median, ratio
from engine_probe import CachedBatches, LinearHeads, build_optimizer, fit_softmax, predict, train_one_epoch
from main_fewshot import draw
from models_vit import SIZES
from util.cli import ArgumentParser, UserError, count, number, positive, run
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

several = number(int, at_least=2)

Solver = Callable[[torch.Tensor, torch.Tensor, Namespace], LinearHeads]


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_probe", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=list(PARTS), nargs="+", choices=list(PARTS), help="what to measure")
    parser.add_argument("--rounds", default=3, type=count, help="alternating repetitions")
    parser.add_argument("--threads", default=1, type=count, help="of torch; set OMP_NUM_THREADS alike for scikit-learn")
    parser.add_argument("--model", default="vit_micro_patch4", choices=list(SIZES), help="encoder of `protocol`")
    parser.add_argument("--input_size", default=32, type=count, help="of its images")
    parser.add_argument("--images", default=2048, type=count, help="training images (built-in shapes) of `protocol`")
    parser.add_argument("--batch_size", default=256, type=several, help="of all heads trained by LARS")
    parser.add_argument("--iterations", default=4, type=count, help="of upstream's protocol, measured per round")
    parser.add_argument("--shots", default=[1, 2, 4, 8, 16], type=count, nargs="+", help="images per class, `fewshot`")
    parser.add_argument("--draws", default=3, type=count, help="of each number of shots")
    parser.add_argument("--classes", default=30, type=several, help="of the synthetic features")
    parser.add_argument("--train", default=5000, type=count, help="training features")
    parser.add_argument("--test", default=5000, type=count, help="test features")
    parser.add_argument("--width", default=768, type=count, help="of the features")
    parser.add_argument("--flush_denormal", action="store_true", help="numbers below 1e-38 count as 0")
    parser.add_argument("--l2", default=1.0, type=positive, help="as main_fewshot.py")
    return parser


def check_args(args: Namespace) -> None:
    if min(args.images, args.train) < args.batch_size:
        raise UserError(f"--images {args.images} and --train {args.train} must fill a --batch_size {args.batch_size}")
    if args.train < max(args.shots) * args.classes:
        raise UserError(f"--train {args.train} is too few for {max(args.shots)} shots of {args.classes} classes")
    if LogisticRegression is None and set(args.parts) - {"protocol"}:
        raise UserError("scikit-learn is missing: pip install -r benchmarks/requirements.txt, or --parts protocol")


# --- Upstream's protocol and cached features ---


def open_shapes(args: Namespace, *flags: str) -> tuple[Subject, Namespace]:
    given = ["--model", args.model, "--input_size", str(args.input_size), "--data_set", "shapes", "--device", "cpu"]
    given += ["--shapes_images", str(args.images), "--batch_size", str(args.batch_size), "--num_workers", "0", *flags]
    probe_args = main_linprobe.get_args_parser().parse_args([*given, "--no_cache", "--output_dir", ""])
    return open_subject(probe_args), probe_args


def encoded_iterations(subject: Subject, probe_args: Namespace, number: int) -> None:
    """Some iterations of upstream's protocol."""
    batches = main_linprobe.build_batches(subject, [0], None, probe_args)
    train_head(subject.encoder.embed_dim, len(subject.classes), islice(batches.epoch(0), number), number, probe_args)


def train_head(width: int, classes: int, batches, number: int, probe_args: Namespace) -> None:
    heads = LinearHeads([0], 1, width, classes)
    train_one_epoch(heads, batches, number, build_optimizer(heads, probe_args), torch.tensor([0.1]), 0, probe_args)


def bench_protocol(args: Namespace) -> None:
    subject, encoded_args = open_shapes(args)
    cached_subject, cached_args = open_shapes(args, "--cache_features")
    per_epoch = args.images // args.batch_size
    iterations = min(args.iterations, per_epoch)
    features = cached_subject.features("train")
    tasks = {
        "iterations": lambda _: encoded_iterations(subject, encoded_args, iterations),
        "encode once": lambda _: cached_subject.features("train"),
        "train on features": lambda _: train_lars(features, [cached_args.blr], args),
    }
    times, _ = alternate(tasks, args.rounds)
    upstream = [seconds / iterations * per_epoch * EPOCHS for seconds in times.pop("iterations")]
    cached = [sum(parts) for parts in zip(*times.values(), strict=True)]
    rows = [[f"upstream's {EPOCHS} epochs, extrapolated from {iterations} iterations", median(upstream), ""]]
    rows += [["--cache_features", median(cached), ratio(upstream, cached)]]
    rows += [[f"    {name}", median(seconds), ""] for name, seconds in times.items()]
    show_table(f"{args.model}, {args.input_size} px, {args.images} images", ["protocol", "s", "upstream / it"], rows)


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
    heads.norm.running_mean, heads.norm.running_var = x.mean(dim=0), x.var(dim=0, correction=0)
    x = (x - heads.norm.running_mean) / (heads.norm.running_var + heads.norm.eps).sqrt()
    assert LogisticRegression is not None  # check_args
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
    tasks = {
        name: lambda _, solve=solve: [solve(problem.features, problem.labels, args) for problem in problems]
        for name, solve in SOLVERS.items()
    }
    seconds, found = alternate(tasks, args.rounds)
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
        rows.append([title, name, median(seconds[name]), ratio(seconds["ours"], seconds[name])])
        rows[-1] += [f"{100 * agreement:.2f} %"]
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
    tasks = {
        "sklearn": lambda _: fit_sklearn(train.features, train.labels, args),
        "LARS, one rate": lambda _: train_lars(train, [RATES[0]], args),
        f"LARS, {len(RATES)} rates at once": lambda _: train_lars(train, list(RATES), args),
    }
    times, found = alternate(tasks, args.rounds)
    rows = [[name, median(seconds), ratio(seconds, times["sklearn"])] for name, seconds in times.items()]
    show_table("the LARS head beside scikit-learn", ["head", "s", "it / sklearn"], rows)
    right = predict(found[list(tasks)[-1]], test.features)[0, :, :, 0] == test.labels
    rows = [[f"{blr:g}", f"{100 * share:.1f} %"] for blr, share in zip(RATES, right.float().mean(dim=1), strict=True)]
    show_table("the LARS head, test accuracy by --blr", ["--blr", "Acc@1"], rows)


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
