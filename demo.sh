#!/usr/bin/env bash
# A demo that takes minutes: pretrain MAEs with random, CL-MAE and predictive masks, evaluate and compare the encoders,
# and plot the masks.
#
#   make demo                       on built-in images of striped shapes
#   DATA=path/to/images make demo   on your own: DATA/train/CLASS/* with DATA/val, DATA/CLASS/*, or just image files
#
# Every step is a command you could type yourself. A second run resumes where the first stopped.
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-python}
# One thread fewer than cores, to leave one for the loader: an OpenMP thread that shares its core stalls all the others.
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
    images=$(find -L "$train" -type f | sed -n 1,5120p | wc -l)  # head would end find, and pipefail the script
    if ! [ -d "$DATA/val" ] && ! [ -d "$DATA/test" ]; then
        if [ "$images" -ge 10 ] && [ -n "$(find -L "$train" -mindepth 2 -type f -print -quit)" ]; then
            data+=(--split 0.8)                            # class folders: test on a fifth of each
        else
            labels=no                                      # no class folders, or too few images to evaluate
        fi
    fi
    batch=$((images < 80 ? (images + 2) / 3 : 64))         # a few steps per epoch even with few images
    probe=$((images < 1000 ? batch : 512))
    epochs=$((images < 410 ? 100 : 41000 / images))        # at most as many images seen as in the demo on shapes
fi
out=output_dir/demo/$name

# --- The steps ---
say() { printf '\n== %s\n' "$*"; }
program() { printf '$ python'; printf ' %q' "$@"; printf '\n'; "$python" "$@"; }
evaluate() {  # PROGRAM RUN FLAGS...: once; skips an evaluation that the data does not allow
    local task=$1 run=$2; shift 2
    if compgen -G "$out/eval/$run/$task*.npz" >/dev/null; then echo "$task of $run: already done"; return; fi
    program "main_$task.py" --finetune "$out/$run" "${data[@]}" --num_workers 1 --global_pool \
        --output_dir "$out/eval/$run" "$@" || { [ $? -eq 2 ] && echo "(skipped)"; }
}

pretrain=(
    --model mae_vit_micro_patch4 --input_size 32                             # an autoencoder of 0.3 M parameters
    "${data[@]}" --num_workers 1
    --epochs "$epochs" --warmup_epochs 1 --batch_size "$batch" --blr 4e-3    # minutes, not days
    --save_every $(((epochs + 7) / 8)) --resume auto
)
# The module learns from every second batch, and from a quarter of its images: half the time.
names=(MAE CL-MAE predictive)
curriculum=(--masking curriculum --soft attention --cmm_every 2 --cmm_fraction 0.25)

say "1/6  MAE. Random masks hide three quarters of each image, and the autoencoder learns to fill them in."
program main_pretrain.py "${pretrain[@]}" --masking random --output_dir "$out/mae"

say "2/6  CL-MAE. The same, but a second network chooses the masks: easy ones at first, hard ones at the end."
program main_pretrain.py "${pretrain[@]}" "${curriculum[@]}" --output_dir "$out/clmae"

say "3/6  Predictive CL-MAE. A small network predicts which patches are hard: visible at first, hidden at the end."
# Twice the default strength, for a curriculum that is easy to see.
program main_pretrain.py "${pretrain[@]}" --masking predictive --cmm_strength 1 --output_dir "$out/predictive"

if [ $labels = yes ]; then
    say "4/6  Evaluate the encoders: nearest neighbours, linear probing, few-shot linear probing."
    for run in mae clmae predictive; do
        evaluate knn $run
        evaluate linprobe $run --batch_size $probe --cache_features --runs 3 --lr_grid 1 3 10 30
        evaluate fewshot $run
    done
    say "5/6  Compare. A gain is significant if p < 0.001 (*); do not expect one from so small a model after a few minutes."
    program main_compare.py "$out"/eval/{mae,clmae,predictive} --names "${names[@]}" --output_dir "$out/compare" \
        || [ $? -eq 2 ]
else
    say "4/6, 5/6  Skipped: $DATA has no class folders, or too few images to evaluate the encoders."
fi

say "6/6  Measure the masks with an autoencoder that never saw them, and draw them from the first epoch to the last."
program main_masks.py "$out"/{clmae,predictive} --names CL-MAE predictive --judge "$out/mae" "${data[@]}" \
    --num_images 512 --moments 4 --output_dir "$out/pictures"
mv "$out/pictures/masks.png" "$out/pictures/forensics.png"
mapfile -t moments < <(ls -v "$out"/predictive/checkpoint-[0-9]*.pth)
last=$((${#moments[@]} - 1)) first=$((${#moments[@]} > 3))  # the second: after one epoch the module has hardly learned
program main_visualize.py "${moments[first]}" "${moments[last / 2]}" "${moments[last]}" "${data[@]}" \
    --grid masks --blocks 3 --num_images 3 --output_dir "$out/pictures"
program main_visualize.py "$out/predictive" "${data[@]}" --animate --output_dir "$out/pictures"
program main_visualize.py "$out"/{mae,clmae,predictive} --names "${names[@]}" "${data[@]}" \
    --curve --output_dir "$out/pictures" --html "$out/report.html"

say "Done. Look at"
ls "$out"/pictures/* "$out"/compare/*.png 2>/dev/null || true
echo "Open the report in a browser and drag its slider through training: $PWD/$out/report.html"
echo "For these steps with your own settings, see README.md; for your own images: DATA=path/to/images make demo"
