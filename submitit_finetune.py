"""Fine-tune as a SLURM job; takes all flags of main_finetune.py, plus those of the job.

python submitit_finetune.py --nodes 1 --ngpus 8 --partition NAME --finetune runs/clmae --epochs 100 \
        --output_dir eval/clmae
"""

from main_finetune import get_args_parser
from util.training.launcher import launch

if __name__ == "__main__":
    launch("main_finetune", get_args_parser())
