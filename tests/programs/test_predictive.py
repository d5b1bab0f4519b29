"""The predictive curriculum on built-in images, by the programs alone: masks move from plain to detailed patches."""

import json

import pytest

import main_masks
import main_pretrain

RUN = (
    *("--model", "mae_vit_micro_patch4", "--input_size", "32", "--data_set", "shapes", "--shapes_images", "2560"),
    *("--epochs", "8", "--warmup_epochs", "1", "--batch_size", "32", "--lr", "1e-3", "--save_every", "1"),
    *("--num_workers", "0", "--vis_every", "0", "--device", "cpu", "--masking", "predictive", "--cmm_strength", "1"),
)


@pytest.mark.slow
def test_hidden_patches_move_from_plain_to_detailed(program, tmp_path):
    main_pretrain.main(main_pretrain.get_args_parser().parse_args([*RUN, "--output_dir", str(tmp_path / "run")]))
    data = ("--data_set", "shapes", "--num_images", 256, "--moments", 8, "--output_dir", tmp_path)
    code, out, err = program(main_masks, tmp_path / "run", *data)
    assert (code, err) == (0, ""), out
    measured = json.loads((tmp_path / "masks.json").read_text())
    moments = [each["metrics"] for each in measured[1:]]  # after the first epoch the module has hardly learned
    edges = [moment["edge"] for moment in moments]
    assert edges == sorted(edges)
    assert edges[0] < -0.1
    assert edges[-1] > 0.2
    for moment in moments:
        assert moment["visible"] == 0.25
        assert moment["unseen"] == 0
        assert moment["place"] < 0.05
    mirrors = [moment["mirror"] for moment in moments]
    assert min(mirrors) > 0.8
    assert min(mirrors[2:]) > 0.9  # from the fourth epoch on
