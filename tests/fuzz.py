"""Bad values for every flag of every program, drawn from the parsers themselves.

    python -m tests.fuzz --cases 10000 --seed 1

A case is a program with flags that work, and one to three others in their place or beside them. It runs in a fork of
this process, which has imported everything. Whatever the flags are, it ends within seconds, by itself or on a stop
signal, with an exit code that docs/cluster.md names and without a traceback, and leaves files where flags allow it.
"""

import argparse
import importlib
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has none of its threads

from util.cli import ArgumentParser, Interrupted, UserError, count, label, logger, seed_number
from util.program import run

ROOT = Path(__file__).resolve().parent.parent
CODES = {0, UserError.exit_code, 3}
# Seconds until a stop signal, and from there to the end. Most cases take a tenth of one; machines may be busy.
PATIENCE, PATIENCE_WITH_LONG_RUNS, GRACE = 30, 1, 30
MEMORY = 2 << 30  # bytes beside those of this process
SHAPES = "--data_set shapes --shapes_images 48 --device cpu"
DATA = f"{SHAPES} --num_workers 0"
ENCODER = f"--model vit_micro_patch4 --input_size 16 {DATA}"
PRETRAIN = f"--model mae_vit_micro_patch4 --input_size 16 --cmm_depth 1 {DATA} --batch_size 16 --epochs 1 --vis_every 0"
# Flags with which a program ends well, and soon. Not here are tools.flags, which takes none, and
# benchmarks.bench_launches, which starts processes.
PROGRAMS = {
    "main_pretrain": f"{PRETRAIN} --warmup_epochs 0",
    "main_finetune": f"{ENCODER} --batch_size 16 --epochs 1 --warmup_epochs 0",
    "main_linprobe": f"{ENCODER} --batch_size 16 --epochs 1 --warmup_epochs 0",
    "main_knn": f"{ENCODER} --k 1",
    "main_fewshot": f"{ENCODER} --shots 1 --runs 1",
    "main_compare": "../inputs/eval ../inputs/eval --names a b",
    "main_masks": f"../inputs/run {SHAPES} --num_images 4 --moments 1",
    "main_visualize": f"../inputs/run {SHAPES} --num_images 2 --blocks 1",
    "tools.export": "../inputs/run --format timm --encoder_only --output out.pth",
    "tools.diff_upstream": "../inputs/data",
    "experiments.run": "losses --data_set shapes --dry_run",
    "experiments.maskbench": "--data_set shapes --dry_run",
    "experiments.probe": "../inputs/run --last 1 --folds 2 --output_dir probe --device cpu",
    "benchmarks.bench_knn": "--train 50 --queries 5 --width 4 --k 2 --rounds 1 --threads 1 --only ours",
    "benchmarks.bench_loader": "--images 2 --width 16 --height 16 --input_size 16 --batch_size 2 --rounds 1 "
    "--num_workers 0 --seconds 0.01",
    "benchmarks.bench_step": "--input_size 16 --batch_size 2 --rounds 1 --methods MAE",
    "submitit_pretrain": f"{PRETRAIN} --warmup_epochs 0",
    "submitit_eval": f"{ENCODER}",
}
LAUNCHED = {"submitit_pretrain": "main_pretrain", "submitit_eval": "main_knn"}
# What starts other programs or pdb, or asks a real cluster.
LEFT_OUT = {"memory", "inside", "cluster", "help", "python", "one", "download", "compile"}
LONG = re.compile(
    "size|epochs|runs|rounds|images|seconds|model|scale|seeds|queries|train|width|height|methods|folds|shots"
)

NUMBERS = ["nan", "inf", "-inf", "-1", "0", "-0", "1e-300", "1e300", "1e400", "9" * 400, "-1e9", "", "x", "0x10", "٣"]
NUMBERS += ["1 000", "1_0", "1e3", "0.5", "1.5", "--", "-", "\n", "1,5", "½", "True", "None", "4294967296", "1e10"]
LARGE = ["1000", "65536", "1000000", "1000000000", "4294967295"]
SMALL = ["1", "2", "3", "4", "7", "0.1", "0.25", "0.999", "16", "24"]
WORDS = ["", " ", "x", "auto", "-", "--", "none", "é☃", "a\nb", "\t", "%s", "%j", "{}", "../x", "a" * 300, "a" * 5000]
WORDS += ["\udcff", "caf\udce9", "\ud800", "a\0b", "=cmd|1", "$(touch x)", "; touch x", "*", "[", "\\", "~", "'", "nan"]
WORDS += ["cuda", "cuda:7", "mps", "cpu:1", "meta", "tcp://x", "file:///nowhere/x", "env://?rank=9", "rand-m9-mstd0.5"]
ODD = ["missing", "missing/deep/er", "folder", "empty", "text", "binary", "fifo", "dangling", "loop", "tree/a/b/c"]
ODD += ["zeros.pth", "text.json", "text.yaml", "broken.py:f", "text.npz", "empty.npz", "picture.jpg", "0.pth"]
INPUTS = [*(f"../inputs/odd/{name}" for name in ODD), "../inputs/run", "../inputs/run/checkpoint-0.pth"]
INPUTS += ["../inputs/run/log.txt", "../inputs/eval", "../inputs/eval/results.jsonl", "../inputs/data", "../inputs"]
INPUTS += ["/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/dev/null/x", "x" * 5000, "x/" * 1000, "\udcff/x"]
# Where programs write: nothing of what is read must change.
OUTPUTS = ["file", "file/x", "out", "out/é", "dangling", "loop", "fifo", "/proc/x", "x" * 300]
WRITTEN = {"output_dir", "log_dir", "cache_dir", "output", "html", "markdown", "job_dir", "names", "data_name"}


@dataclass
class Case:
    program: str
    flags: list[str]
    long: bool  # it may take its time, until it is told to stop

    def __str__(self) -> str:
        return f"{self.program} {shlex.join(flag.encode(errors='backslashreplace').decode() for flag in self.flags)}"


def parser_of(program: str) -> ArgumentParser:
    from util.training.launcher import add_job_arguments

    parser = importlib.import_module(LAUNCHED.get(program, program)).get_args_parser()
    if program in LAUNCHED:
        add_job_arguments(parser)
    return parser


def entry_of(program: str) -> Callable[[], object]:
    """What `python PROGRAM` calls."""
    module = importlib.import_module(LAUNCHED.get(program, program))
    if program in LAUNCHED:
        from util.training.launcher import launch

        return lambda: launch(LAUNCHED[program], module.get_args_parser())
    return lambda: run(module.main, module.get_args_parser())


def draw_case(seed: int, number: int) -> Case:
    """Mostly with few flags and wild values; sometimes with many, each of which may well pass for itself."""
    rng = random.Random(f"{seed} {number}")
    program, wild = rng.choice([*PROGRAMS, *list(PROGRAMS)[:8]]), rng.random() < 0.7
    actions = [action for action in parser_of(program)._actions if action.dest not in LEFT_OUT]
    flags, long = PROGRAMS[program].split(), False
    for action in rng.sample(actions, min(rng.choice([1, 1, 1, 2, 3] if wild else [2, 3, 5, 8]), len(actions))):
        values, name = draw_values(action, rng, wild), action.option_strings[:1]
        if name and len(values) == 1 and rng.random() < 0.3:
            name, values = [f"{name[0]}={values[0]}"], []
        if action.nargs == argparse.REMAINDER or name:
            flags += [*name, *values]
        else:  # positional arguments come first
            flags = values + (flags if rng.random() < 0.5 else flags[1:])
        long |= bool(LONG.search(action.dest)) or action.nargs == argparse.REMAINDER
    return Case(program, flags, long)


def draw_values(action: argparse.Action, rng: random.Random, wild: bool) -> list[str]:
    if action.nargs == 0:
        return []
    number = rng.choice([0, 1, 1, 2, 2, 3][not wild :]) if action.nargs in ("+", "*", argparse.REMAINDER) else 1
    return [draw_value(action, rng, wild) for _ in range(number)]


def draw_value(action: argparse.Action, rng: random.Random, wild: bool) -> str:
    if action.choices is not None and rng.random() < (0.7 if wild else 1):
        return str(rng.choice(list(action.choices)))
    if action.type not in (None, label):
        return rng.choice(rng.choices([NUMBERS, SMALL, LARGE], [5, 4, 1] if wild else [0, 20, 1])[0])
    if action.dest in WRITTEN:
        # With --output '' tools.export writes beside the checkpoint, which is said and wanted.
        words = [word for word in WORDS if ".." not in word and (word or action.dest != "output")]
        return rng.choice([*OUTPUTS, *words])
    return rng.choice(rng.choices([INPUTS, WORDS, NUMBERS], [5, 4, 1] if wild else [9, 1, 0])[0])


# --- Where cases run ---


def make_inputs(folder: Path) -> None:
    from PIL import Image

    odd = folder / "odd"
    for name in ("folder", "tree/a/b/c"):
        (odd / name).mkdir(parents=True)
    contents = {"empty": b"", "empty.npz": b"", "zeros.pth": bytes(5000), "0.pth": b"PK\3\4" + bytes(90)}
    for name, content in contents.items():
        (odd / name).write_bytes(content)
    for name in ("text", "text.json", "text.yaml", "text.npz"):
        (odd / name).write_text("a: [1\n{\n" * 3)
    (odd / "broken.py").write_text("def f(:\n")
    (odd / "binary").write_bytes(bytes(range(256)) * 9)
    os.mkfifo(odd / "fifo")
    (odd / "dangling").symlink_to("nowhere")
    (odd / "loop").symlink_to("loop")
    Image.new("RGB", (9, 9)).save(odd / "picture.jpg")
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (16, 16), (60 * i, 99, 0)).save(folder / "data" / split / name / f"{i}.png")
    for program, flags in {
        "main_pretrain": f"{PRETRAIN} --warmup_epochs 0 --output_dir ../inputs/run --save_every 1",
        "main_knn": f"{ENCODER} --k 1 --output_dir ../inputs/eval",
    }.items():
        code, said, _ = Sandbox(folder.parent).run(Case(program, flags.split(), long=False))
        if code:
            raise RuntimeError(said)


class Sandbox:
    """A folder with `inputs` that no case may change, and a fresh `work` in which each case runs."""

    def __init__(self, folder: Path):
        self.folder, self.work, self.inputs = folder, folder / "work", folder / "inputs"

    def run(self, case: Case) -> tuple[int | None, str, float]:
        """Exit code (None: had to be killed), all that was said, and the seconds it took."""
        shutil.rmtree(self.work, ignore_errors=True)
        for name in ("work", "tmp", "home"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.work / "file").write_text("")
        (self.work / "dangling").symlink_to("nowhere/x")
        (self.work / "loop").symlink_to("loop")
        os.mkfifo(self.work / "fifo")
        begun, child = time.monotonic(), os.fork()
        if not child:
            self.become(case)
        code = self.wait(child, case.long)
        said = (self.folder / "said.txt").read_text(errors="replace")
        return code, said, time.monotonic() - begun

    def become(self, case: Case) -> None:
        """In the fork: what a fresh interpreter would be, and never return."""
        code = 1
        try:
            os.setsid()
            os.chdir(self.work)
            os.dup2(os.open(self.folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.argv = [f"{case.program}.py", *case.flags]
            entry_of(case.program)()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, child: int, long: bool) -> int | None:
        handle = os.pidfd_open(child)
        try:
            if not select.select([handle], [], [], PATIENCE_WITH_LONG_RUNS if long else PATIENCE)[0]:
                os.kill(child, signal.SIGTERM)
                if not select.select([handle], [], [], GRACE)[0]:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return None
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            os.close(handle)

    def contents(self) -> dict[str, tuple[int, int]]:
        """Of all but `work`: sizes and times of change of files."""
        found = {}
        for top, folders, files in os.walk(self.folder):
            if Path(top) == self.folder:
                folders.remove("work")
                files = []
            found |= dict.fromkeys((os.path.join(top, name) for name in folders), (0, 0))
            for name in files:
                status = os.lstat(os.path.join(top, name))
                found[os.path.join(top, name)] = (status.st_size, status.st_mtime_ns)
        return found

    def fault(self, case: Case, before: dict) -> tuple[str | None, int | None, float]:
        """What is wrong with the end of a case, if anything; its exit code; its seconds."""
        code, said, seconds = self.run(case)
        problem = None
        if code is None:
            problem = "did not end"
        elif code == Interrupted.exit_code and not case.long:
            problem = f"did not end within {PATIENCE} s"
        elif code not in CODES | {Interrupted.exit_code}:
            problem = f"exit code {code}"
        elif "Traceback" in said or "Exception ignored" in said:
            problem = "a traceback"
        elif changed := {path for path, state in self.contents().items() if before.get(path) != state}:
            problem = f"wrote {sorted(changed)[:3]}"
        elif strange := {path.name for path in self.work.iterdir()} - self.expected(case):
            problem = f"wrote {sorted(strange)[:3]} to the working folder"
        elif not (self.work / "fifo").is_fifo():
            problem = "replaced a FIFO"
        return (f"{problem}: {case}\n{said[-1500:]}" if problem else None), code, seconds

    def expected(self, case: Case) -> set[str]:
        """Names that a case may leave in its working folder: those of its flags, given or by default."""
        values = [action.default for action in parser_of(case.program)._actions if isinstance(action.default, str)]
        values += [part for flag in case.flags for part in (flag, flag.partition("=")[2])]
        names = {os.path.normpath(value).split("/")[0] for value in values if "\0" not in value}
        return names | {"file", "dangling", "loop", "fifo", "nowhere"}


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", default=300, type=count, help="how many")
    parser.add_argument("--seed", default=0, type=seed_number, help="of all draws")
    parser.add_argument("--first", default=0, type=seed_number, help="number of the first case")
    return parser


def main(args: Namespace) -> None:
    for program in PROGRAMS:
        parser_of(program)
    for name in ("matplotlib.pyplot", "torch.utils.tensorboard", "safetensors.torch", "timm.data.auto_augment"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        os.environ.update(
            HOME=f"{folder}/home", TMPDIR=f"{folder}/tmp", PATH=f"{folder}/none", MPLCONFIGDIR=f"{folder}/mpl"
        )
        os.environ.update(https_proxy="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9")  # no network
        tempfile.tempdir = f"{folder}/tmp"
        sandbox = Sandbox(folder)
        make_inputs(folder / "inputs")
        faults = try_all(sandbox, args)
        tempfile.tempdir = None
    if faults:
        sys.exit(1)


def try_all(sandbox: Sandbox, args: Namespace) -> int:
    """Returns the number of faults. Reports what is done, also when it is stopped."""
    begun, before, faults, codes = time.monotonic(), sandbox.contents(), 0, Counter()
    try:
        for number in range(args.first, args.first + args.cases):
            fault, code, seconds = sandbox.fault(draw_case(args.seed, number), before)
            codes[code] += 1
            if fault:
                faults += 1
                logger.error("case %d of seed %d, %.1f s: %s\n", number, args.seed, seconds, fault)
                before = sandbox.contents()
    finally:
        ends = ", ".join(f"{times} x {code}" for code, times in sorted(codes.items(), key=str))
        seconds = time.monotonic() - begun
        logger.info("%d cases in %.0f s: %d faults; exit codes %s", codes.total(), seconds, faults, ends)
    return faults


if __name__ == "__main__":
    run(main, get_args_parser())
