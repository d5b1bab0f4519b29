#!/usr/bin/env bash
# Pretrain vanilla MAE and CL-MAE on the built-in shapes, with equal epochs, and show the last metrics of both.
# The two commands differ in one flag. A second run continues or reuses what is done.
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}

common=(
    --model mae_vit_micro_patch4 --input_size 32 --norm_pix_loss   # a 0.3M-parameter ViT on 32 px images
    --data_set shapes --shapes_images 5120                         # drawn from a seed, no files needed
    --epochs 8 --warmup_epochs 1 --batch_size 64 --blr 2e-3        # minutes, not days
    --num_workers 1 --save_every 1 --knn_every 4 --resume auto
)

echo "== MAE: random masks"
"$python" main_pretrain.py "${common[@]}" --masking random --output_dir output_dir/demo/mae

echo "== CL-MAE: masks from the curriculum masking module, first partner, then adversary"
"$python" main_pretrain.py "${common[@]}" --masking curriculum --output_dir output_dir/demo/clmae

echo "== Last epoch"
for run in mae clmae; do
    echo "$run: $(tail -n 1 "output_dir/demo/$run/log.txt")"
done
echo "Losses, mask figures and pictures: tensorboard --logdir output_dir/demo"
