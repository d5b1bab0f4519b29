"""Pretrain CL-MAE, or MAE with any other masking strategy, as a SLURM job that survives time-outs and preemption.

Takes all flags of main_pretrain.py, plus those of the job. Eight nodes of eight GPUs give a batch of 4096:
    python submitit_pretrain.py --nodes 8 --ngpus 8 --partition NAME --model mae_vit_base --batch_size 64

Three seeds of both methods, as one job array:
    python submitit_pretrain.py --nodes 1 --ngpus 8 --array seed=0,1,2 masking=curriculum,random ...
"""

from main_pretrain import get_args_parser
from util.training.launcher import launch

if __name__ == "__main__":
    launch("main_pretrain", get_args_parser())
