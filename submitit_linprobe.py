"""Linear probing as a SLURM job; takes all flags of main_linprobe.py, plus those of the job.

python submitit_linprobe.py --nodes 1 --ngpus 8 --partition NAME --finetune runs/clmae --runs 3 \
        --output_dir eval/clmae
"""

from main_linprobe import get_args_parser
from util.training.launcher import launch

if __name__ == "__main__":
    launch("main_linprobe", get_args_parser())
