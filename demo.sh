#!/usr/bin/env bash
# The first ten minutes: pretrain MAE and CL-MAE alike, judge both, compare them, and draw what the masks did.
#
#   make demo                       on built-in images of striped shapes
#   DATA=path/to/images make demo   on your own: DATA/train/CLASS/* with DATA/val, DATA/CLASS/*, or just image files
#
# Every step is a command that you could type yourself. A second run goes on where the first stopped, and repeats nothing.
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}
# A thread less than cores, for the loader: OpenMP threads that share a core with another process wait for each other.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 1 ? cores - 1 : 1))}

# --- The data ---
data=(--data_set shapes --shapes_images 5120)              # drawn from a seed, no files needed
name=shapes batch=64 probe=512 epochs=8 labels=yes
if [ -n "${DATA:-}" ]; then
    [ -d "$DATA" ] || { echo "DATA=$DATA is not a folder" >&2; exit 2; }
    name=$(basename "$(realpath "$DATA")")
    train=$DATA; [ ! -d "$DATA/train" ] || train=$DATA/train
    data=(--data_path "$DATA" --max_images 5120)           # more would take longer than a coffee
    images=$(find -L "$train" -type f | head -n 5120 | wc -l)
    if ! [ -d "$DATA/val" ] && ! [ -d "$DATA/test" ]; then
        if [ "$images" -ge 10 ] && [ -n "$(find -L "$train" -mindepth 2 -type f -print -quit)" ]; then
            data+=(--split 0.8)                            # class folders: a fifth of each is for testing
        else
            labels=no                                      # just files, or hardly any: there is nothing to judge by
        fi
    fi
    batch=$((images < 80 ? (images + 2) / 3 : 64))         # few images: still a few steps per epoch
    probe=$((images < 1000 ? batch : 512))
    epochs=$((images < 410 ? 100 : 41000 / images))        # as many images seen as in the demo on shapes, or less
fi
out=output_dir/demo/$name

# --- The steps ---
say() { printf '\n== %s\n' "$*"; }
program() { printf '$ python'; printf ' %q' "$@"; printf '\n'; "$python" "$@"; }
evaluate() {  # PROGRAM RUN FLAGS...: once; an evaluation that the data does not allow is left out
    local task=$1 run=$2; shift 2
    if compgen -G "$out/eval/$run/$task*.npz" >/dev/null; then echo "$task of $run: done before"; return; fi
    program "main_$task.py" --finetune "$out/$run" "${data[@]}" --num_workers 1 --global_pool \
        --output_dir "$out/eval/$run" "$@" || { [ $? -eq 2 ] && echo "(left out)"; }
}

pretrain=(
    --model mae_vit_micro_patch4 --input_size 32 --norm_pix_loss             # a ViT of 0.3 M parameters on 32 px images
    "${data[@]}" --num_workers 1
    --epochs "$epochs" --warmup_epochs 1 --batch_size "$batch" --blr 4e-3    # minutes, not days
    --save_every $(((epochs + 7) / 8)) --resume auto
)
# The paper's curriculum ends at -0.1 and has --lambda_gauss 10, for hundreds of epochs. A run of minutes has to turn faster.
curriculum=(--masking curriculum --lambda_cl_end -1 --lambda_gauss 1)

say "1/5  MAE. Random masks hide three quarters of each image, and the autoencoder learns to fill them in."
program main_pretrain.py "${pretrain[@]}" --masking random --output_dir "$out/mae"

say "2/5  CL-MAE. The same, but a second network chooses what to hide: first what is easy, at the end what is hard."
program main_pretrain.py "${pretrain[@]}" "${curriculum[@]}" --output_dir "$out/clmae"

if [ $labels = yes ]; then
    say "3/5  Judge both encoders: neighbours, a linear layer, a linear layer on a few images per class."
    for run in mae clmae; do
        evaluate knn $run
        evaluate linprobe $run --batch_size $probe --cache_features --runs 3 --lr_grid 1 3 10 30
        evaluate fewshot $run
    done
    say "4/5  Compare. A gain counts if p < 0.001 (*); at this size, after minutes, do not expect one."
    program main_compare.py "$out/eval/mae" "$out/eval/clmae" --names MAE CL-MAE --output_dir "$out/compare" \
        || [ $? -eq 2 ]
else
    say "3/5, 4/5  There are no class folders in $DATA, or hardly any images: no labels to judge the encoders by."
fi

say "5/5  Draw the masks from the first checkpoint to the last, their diversity, and the curves of both runs."
program main_visualize.py "$out/clmae" "${data[@]}" --grid masks diversity --animate --blocks 3 \
    --names CL-MAE --output_dir "$out/pictures"
program main_visualize.py "$out/mae" "$out/clmae" --curve --names MAE CL-MAE --output_dir "$out/pictures"

say "Done. Look at"
ls "$out"/pictures/* "$out"/compare/*.png 2>/dev/null || true
echo "Each step again, with your own data and settings: README.md"
