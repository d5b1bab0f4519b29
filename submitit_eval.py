"""Evaluate an encoder as a SLURM job: nearest neighbours, linear probing, few-shot probing or fine-tuning.

Takes all flags of main_knn.py, main_linprobe.py, main_fewshot.py or main_finetune.py, plus those of the job:
    python submitit_eval.py --task linprobe --nodes 1 --ngpus 8 --partition NAME \
        --finetune runs/clmae --data_path /data/imagenet --output_dir eval/clmae
"""

import importlib

from util.cli import ArgumentParser, UserError
from util.training.launcher import launch

TASKS = ("knn", "linprobe", "fewshot", "finetune")


def get_task_parser() -> ArgumentParser:
    which = ArgumentParser("submitit_eval.py", description=str(__doc__).split("\n")[0], add_help=False)
    which.add_argument("--task", choices=TASKS, help="the evaluation to run; add --help to list its flags")
    return which


if __name__ == "__main__":
    which = get_task_parser()
    chosen, argv = which.parse_known_args()
    if chosen.task is None:
        which.print_help()
        which.exit(0 if {"-h", "--help"} & set(argv) else UserError.exit_code)
    program = f"main_{chosen.task}"
    launch(program, importlib.import_module(program).get_args_parser(), argv)
