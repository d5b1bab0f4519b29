"""What tools.export writes, loaded by the libraries it is meant for, and its errors for what it cannot export."""

import json
import os
import re
import shlex
from argparse import Namespace
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import safetensors
import timm
import torch
import transformers
import yaml
from PIL import Image
from small_runs import SMALL

import hubconf
import main_knn
import main_pretrain
import models_mae
import models_vit
import tools.export
from models_vit import SIZES, encoder_weights, load_encoder
from util.checkpoint import load_checkpoint, save_checkpoint
from util.data.decode import MODES
from util.datasets import build_eval_transform, pixel_statistics
from util.misc import git_commit
from util.training.resume import differences, load_init


def noisy(model):
    """No bias is 0 and no norm is the identity, so that nothing can be swapped or left out unseen."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def images(model):
    shape = (2, model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def save(path, model, **args):
    """A checkpoint with the entries that training gives it; `args` are further flags of that training."""
    flags = {"input_size": list(model.patch_embed.img_size), "mask_ratio": 0.75, "masking": "curriculum", **args}
    save_checkpoint(path, {"model": model.state_dict(), "epoch": 2, "args": flags})


@pytest.fixture
def micro(tmp_path):
    """A whole autoencoder with its file."""
    model = noisy(models_mae.mae_vit_micro_patch4(norm_pix_loss=True))
    save(tmp_path / "checkpoint-2.pth", model, norm_pix_loss=True, epochs=10)
    return SimpleNamespace(model=model, path=tmp_path / "checkpoint-2.pth", imgs=images(model))


@pytest.fixture
def export(program):
    """Runs the tool, which must succeed; returns the three lines that it prints for loading."""

    def call(*flags):
        code, out, _ = program(tools.export, *flags)
        assert code == 0, "it failed"
        return "\n".join(out.splitlines()[-3:])

    return call


def execute(lines, imgs):
    names = {"imgs": imgs}
    with torch.no_grad():
        exec(lines, names)
    return names


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# --- timm ---

ENCODERS = {
    "micro": lambda: models_vit.vit_micro_patch4(num_classes=0),
    "micro at 224": lambda: models_vit.vit_micro_patch4(num_classes=0, img_size=224),
    "not square": lambda: models_vit.vit_micro_patch4(num_classes=0, img_size=(16, 64)),
    "grey": lambda: models_vit.vit_micro_patch4(num_classes=0, in_chans=1),
    "tiny": lambda: models_vit.vit_tiny_patch16(num_classes=0, img_size=(48, 32)),
    "small": lambda: models_vit.vit_small_patch16(num_classes=0),
}


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(kind, pooling) for kind in ENCODERS for pooling in ("cls_token", "global_pool")][:-1],  # one is enough
)
def test_timm_gives_our_features(export, tmp_path, kind, pooling):
    model = noisy(ENCODERS[kind]())
    save(tmp_path / "a.pth", model)
    lines = export(tmp_path / "a.pth", "--format", "timm", f"--{pooling}")
    loaded = execute(lines, images(model))
    ours = load_encoder(tmp_path / "a.pth", global_pool=pooling == "global_pool")
    assert type(loaded["encoder"]) is timm.models.VisionTransformer
    close(loaded["features"], ours.forward_features(images(model)))
    if kind == "small":
        file = tmp_path / "a-timm.safetensors"
        assert f'create_model("vit_small_patch16_224", num_classes=0, checkpoint_path="{file}")' in lines


def test_timm_knows_every_size():
    with torch.device("meta"):
        for name in SIZES:
            ours = models_vit.MODELS[name](num_classes=0)
            timm_name, kwargs = tools.export.timm_model(ours)
            theirs = timm.create_model(timm_name, **kwargs)
            assert timm_name.startswith(name) or name == "vit_micro_patch4"
            shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (ours, theirs)]
            assert shapes[0] == shapes[1]
            assert theirs.blocks[0].attn.num_heads == ours.blocks[0].attn.num_heads


def test_a_trained_norm_of_pooled_features_is_kept(export, tmp_path):
    model = noisy(models_vit.vit_micro_patch4(num_classes=5, global_pool=True))  # as fine-tuning leaves it
    save(tmp_path / "a.pth", model)
    loaded = execute(export(tmp_path / "a.pth", "--format", "timm", "--global_pool"), images(model))
    close(loaded["features"], model.forward_features(images(model)))


# --- Hugging Face ---


def load_exactly(cls, folder, **kwargs):
    model, info = cls.from_pretrained(folder, output_loading_info=True, **kwargs)
    problems = {name: keys for name, keys in info.items() if "keys" in name or "msgs" in name}
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= problems.keys()
    assert not any(problems.values()), problems
    return model.eval()


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize("in_chans", [3, 1])
def test_transformers_autoencoder_is_ours(export, tmp_path, norm_pix_loss, in_chans):
    ours = noisy(models_mae.mae_vit_micro_patch4(in_chans=in_chans, norm_pix_loss=norm_pix_loss))
    save(tmp_path / "a.pth", ours, norm_pix_loss=norm_pix_loss, mask_ratio=0.5)
    imgs, noise = images(ours), torch.rand(2, 64, generator=torch.Generator().manual_seed(2))
    lines = export(tmp_path / "a.pth", "--format", "hf")
    theirs = load_exactly(transformers.ViTMAEForPreTraining, tmp_path / "a-hf")
    with torch.no_grad():
        loss, pred, mask = ours(imgs, 0.5, noise=noise)
        output = theirs(imgs, noise=noise)
    assert theirs.config.layer_norm_eps == 1e-6, "too small a thing to see in the figures"
    close(output.logits, pred)
    close(output.loss, loss)
    assert torch.equal(output.mask, mask)
    assert execute(lines, imgs)["loss"].isfinite()


@pytest.mark.parametrize("kwargs", [{}, {"img_size": (16, 64)}, {"in_chans": 1}], ids=str)
def test_transformers_encoder_is_ours(export, tmp_path, kwargs):
    mae = noisy(models_mae.mae_vit_micro_patch4(**kwargs))
    save(tmp_path / "a.pth", mae)
    imgs, visible = images(mae), torch.ones(2, 64, dtype=torch.bool)
    lines = export(tmp_path / "a.pth", "--format", "hf", "--encoder_only")
    encoder = load_exactly(transformers.ViTModel, tmp_path / "a-hf-encoder", add_pooling_layer=False)
    with torch.no_grad():
        close(encoder(imgs).last_hidden_state, mae.forward_encoder(imgs, 0.0, visible=visible)[0])
    close(execute(lines, imgs)["features"], load_encoder(tmp_path / "a.pth").forward_features(imgs))


def test_transformers_takes_no_oblong_images_in_pretraining(program, tmp_path):
    save(tmp_path / "a.pth", models_mae.mae_vit_micro_patch4(img_size=(16, 64)))
    code, _, err = program(tools.export, tmp_path / "a.pth", "--format", "hf")
    assert code == 2
    assert re.search(r"square images only, and .*a\.pth was trained on 16x64 pixels; add --encoder_only", err)


@pytest.mark.parametrize(
    ("in_chans", "size", "mean"), [(3, (32, 32), None), (1, (32, 32), None), (3, (16, 64), [0.5] * 3)]
)
def test_transformers_prepares_images_as_our_evaluations(export, tmp_path, in_chans, size, mean):
    own = {} if mean is None else {"mean": mean, "std": mean}
    save(tmp_path / "a.pth", models_mae.mae_vit_micro_patch4(in_chans=in_chans, img_size=size), **own)
    export(tmp_path / "a.pth", "--format", "hf", "--encoder_only")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "a-hf-encoder")
    statistics = (mean, mean) if mean else pixel_statistics(in_chans)
    assert (list(processor.image_mean), list(processor.image_std)) == statistics
    picture = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    picture = Image.fromarray(picture).resize((140, 100)).convert(MODES[in_chans])
    pixels = processor(picture, return_tensors="pt")["pixel_values"][0]
    ours = build_eval_transform(Namespace(input_size=list(size), in_chans=in_chans, mean=mean, std=mean))(picture)
    assert pixels.shape == ours.shape
    assert (pixels - ours).abs().max() < 2 / 255 / min(statistics[1]), "but for the rounding of resized pixels"


HOSTILE = "a|b`*<script>\n```\n---\n[x](y)"


@pytest.fixture
def described(micro, tmp_path):
    """A checkpoint with a result and a figure beside it; names are as hostile as they can be."""
    save(
        micro.path,
        micro.model,
        norm_pix_loss=True,
        epochs=10,
        data_set="folder",
        data_path=HOSTILE,
        class_list="/secret/names.txt",
        init="hf-hub:facebook/vit-mae-base",
        commit="0123abcd",
    )
    line = {"protocol": "knn", "data": HOSTILE, "settings": {"pooling": "cls_token"}, "acc1": 12.345, "acc5": 50.0}
    line |= {"classes": 10, "predictions": "x.npz", "checkpoint_sha256": tools.export.file_hash(micro.path)}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    for name in ("curves", "masks"):
        (tmp_path / f"{name}.png").write_text(name)
    return micro


def test_a_model_card_tells_of_the_training(export, described, tmp_path):
    export(described.path, "--format", "hf", "--output", tmp_path / "hf")
    text = (tmp_path / "hf" / "README.md").read_text()
    _, front, body = re.split(r"^---$", text, maxsplit=2, flags=re.MULTILINE)
    (result,) = huggingface_hub.ModelCard(text).data.eval_results
    assert (result.metric_value, result.dataset_name) == (12.35, HOSTILE.replace("\n", " "))
    assert yaml.safe_load(front)["library_name"] == "transformers"
    for fact in ("| Method | CL-MAE |", "| Epochs | 3 of 10 |", "| Commit | 0123abcd |", "| 12.35 | 50.00 |"):
        assert fact in body
    assert 'ViTMAEForPreTraining.from_pretrained("hf")' in body
    assert "main_pretrain.py --epochs 10 --input_size 32 --data_path" in body
    assert "--class_list names.txt" in body
    assert "--init hf-hub:facebook/vit-mae-base" in body
    prose = [line for line in body.splitlines() if not line.startswith("    ")]
    assert not any(re.search(r"(?<!\\)[`<]", line) for line in prose if not line.startswith("<!--")), "all is escaped"
    assert len(re.findall(r"(?<!\\)\|", next(line for line in prose if "12.35" in line))) == 6, "no cell is torn"
    assert (tmp_path / "hf" / "figure.png").read_text() == "masks"
    assert "(figure.png)" in body


def test_an_export_is_uploaded(program, described, tmp_path, monkeypatch):
    calls = []

    class HfApi:
        def create_repo(self, name, exist_ok):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, repo_id, folder_path, allow_patterns):
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir() if path.name in allow_patterns)))

    flags = (described.path, "--format", "hf", "--output", tmp_path / "hf", "--push_to_hub", "clmae")
    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    code, out, _ = program(tools.export, *flags)
    assert code == 0
    assert "uploaded to https://huggingface.co/me/clmae" in out
    files = ["README.md", "config.json", "figure.png", "model.safetensors", "preprocessor_config.json"]
    assert calls == [("me/clmae", files)]
    assert 'from_pretrained("clmae")' in (tmp_path / "hf" / "README.md").read_text()

    def refuse(*args, **kwargs):
        raise OSError("401 Client Error.\nInvalid token")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    code, _, err = program(tools.export, *flags, "--overwrite")
    assert code == 2
    assert err.splitlines()[-1].endswith(
        f"--push_to_hub clmae: 401 Client Error; the export stays in {tmp_path / 'hf'}"
    )
    assert sorted(os.listdir(tmp_path / "hf")) == files
    code, _, err = program(tools.export, described.path, "--format", "timm", "--push_to_hub", "clmae")
    assert code == 2
    assert "--push_to_hub uploads what --format hf writes" in err


def test_an_unknown_target_is_said(program, tmp_path):
    torch.save({"model": models_mae.mae_vit_micro_patch4().state_dict()}, tmp_path / "a.pth")
    _, _, err = program(tools.export, tmp_path / "a.pth", "--format", "hf")
    assert "does not say whether it was trained with --norm_pix_loss; config.json says no" in err


# --- Upstream ---


def test_upstream_file_is_what_upstream_saves(export, micro, upstream_shapes):
    lines = export(micro.path, "--format", "upstream")
    file = torch.load(micro.path.with_name("checkpoint-2-upstream.pth"), weights_only=True)
    assert file.keys() == {"model"}
    without_blocks = {key for key in upstream_shapes["mae_vit_base_patch16"] if "blocks." not in key}
    assert {key for key in file["model"] if "blocks." not in key} == without_blocks
    mae, noise = execute(lines, micro.imgs)["mae"], torch.rand(2, 64)
    assert torch.equal(mae(micro.imgs, noise=noise)[0], micro.model(micro.imgs, noise=noise)[0])


@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_upstream_encoder_alone_loads_and_starts_a_run(export, tmp_path, size):
    mae = noisy(models_mae.mae_vit_micro_patch4(img_size=size))
    save(tmp_path / "a.pth", mae)
    lines = export(tmp_path / "a.pth", "--format", "upstream", "--encoder_only")
    path = tmp_path / "a-upstream-encoder.pth"
    assert load_checkpoint(path)["model"].keys() == encoder_weights({"model": mae.state_dict()}, "").keys()
    features = load_encoder(tmp_path / "a.pth").forward_features(images(mae))
    assert torch.equal(load_encoder(path).forward_features(images(mae)), features)
    assert torch.equal(execute(lines, images(mae))["encoder"].eval().forward_features(images(mae)), features)
    fresh = models_mae.mae_vit_micro_patch4(img_size=size)
    load_init(SimpleNamespace(model=fresh, cmm=None), load_checkpoint(path), str(path))
    assert torch.equal(fresh.blocks[3].mlp.fc2.bias, mae.blocks[3].mlp.fc2.bias)


# --- safetensors ---


def header(path):
    """All but the checksum, which is another for each file."""
    with safetensors.safe_open(path, framework="pt") as file:
        told = file.metadata()
    assert len(told.pop("sha256")) == 64
    return told


def assert_same_run(command, trained):
    """The command, given to the program, leads to the settings that were trained with."""
    assert command.startswith("python main_pretrain.py ")
    args = main_pretrain.get_args_parser().parse_args(shlex.split(command)[2:])
    main_pretrain.check_args(args)
    main_pretrain.settle_batch_and_rates(args)
    assert not differences(trained, vars(args))


def test_safetensors_tell_of_their_training(cli, program, export, tmp_path):
    run, evaluation = tmp_path / "run", tmp_path / "eval"
    assert cli(*SMALL, "--output_dir", run)[0] == 0
    judge = ("--data_set", "shapes", "--shapes_images", "50", "--num_workers", "0", "--device", "cpu", "--no_cache")
    for pooling in ("--cls_token", "--global_pool"):
        assert program(main_knn, *judge, pooling, "--finetune", run, "--output_dir", evaluation)[0] == 0
    results = [json.loads(line) for line in (evaluation / "results.jsonl").read_text().splitlines()]
    other = {**results[0], "checkpoint_sha256": "0" * 64, "acc1": 99.0}
    del other["crc32"]
    with open(evaluation / "results.jsonl", "a") as file:
        file.write(json.dumps(other) + "\n")

    _, _, err = program(tools.export, run, "--format", "safetensors", "--results", evaluation)
    assert f"1 of 3 results are of other weights than {run}/checkpoint-1.pth" in err
    told = header(run / "checkpoint-1.safetensors")
    accuracy = json.loads(told.pop("accuracy"))
    assert_same_run(told.pop("command"), load_checkpoint(run / "checkpoint-1.pth")["args"])
    assert told == {
        "format": "pt",
        "method": "CL-MAE",
        "model": "mae_vit_micro_patch4",
        "epochs": "2",
        "planned_epochs": "2",
        "data": "shapes",
        "images": "48",
        "input_size": "[16, 16]",
        "mask_ratio": "0.75",
        "norm_pix_loss": "true",
        "mean": "[0.485, 0.456, 0.406]",
        "std": "[0.229, 0.224, 0.225]",
        **({"commit": commit} if (commit := git_commit()) else {}),  # there is none outside a repository
    }
    assert [(entry["pooling"], entry["acc1"]) for entry in accuracy] == [
        (result["settings"]["pooling"], round(result["acc1"], 2)) for result in results
    ]
    again = tmp_path / "again"
    program(main_knn, *judge, "--finetune", run / "checkpoint-1.safetensors", "--output_dir", again)
    assert json.loads((again / "results.jsonl").read_text())["acc1"] == results[0]["acc1"]


def test_few_shot_accuracies_have_an_entry_for_each_number_of_shots(export, micro, tmp_path):
    shots = {"1": {"acc1": 11.111, "acc5": 50.0}, "16": {"acc1": 22.222, "acc5": 60.0}}
    line = {"protocol": "fewshot", "data": "cifar10", "shots": shots, "settings": {"pooling": "cls_token"}}
    line |= {"classes": 10, "predictions": "x.npz", "checkpoint_sha256": tools.export.file_hash(micro.path)}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    export(micro.path, "--format", "safetensors", "--results", tmp_path / "results.jsonl")
    common = {"protocol": "fewshot", "data": "cifar10", "pooling": "cls_token"}
    assert json.loads(header(micro.path.with_suffix(".safetensors"))["accuracy"]) == [
        {**common, "shots": 1, "acc1": 11.11, "acc5": 50.0},
        {**common, "shots": 16, "acc1": 22.22, "acc5": 60.0},
    ]


def test_what_is_not_known_has_no_entry(export, micro, tmp_path):
    torch.save(micro.model.state_dict(), tmp_path / "bare.pth")
    export(tmp_path / "bare.pth", "--format", "safetensors", "--encoder_only")
    told = header(tmp_path / "bare-encoder.safetensors")
    assert told == {"format": "pt", "model": "vit_micro_patch4", "input_size": "[32, 32]"}


def test_folders_are_named_not_located():
    name = tools.export.trained_on
    assert name({"data_set": "folder", "data_path": "/somewhere/secret/imagenet/"}) == "imagenet"
    assert name({"data_path": "/data/imagenet"}) == "imagenet", "upstream's flags"
    assert name({"data_path": "."}) is None
    assert name({"data_set": "cifar10", "data_path": "/somewhere/else"}) == "cifar10"


def test_the_method_is_named_after_the_masks():
    name = tools.export.method
    assert name({"mask_ratio": 0.75}) == name({"mask_ratio": 0.75, "masking": "random"}) == "MAE"
    assert name({"mask_ratio": 0.75, "masking": "curriculum"}) == "CL-MAE"
    assert name({"mask_ratio": 0.75, "masking": "block"}) == "MAE with block masks"
    assert name({"mask_ratio": 0.75, "masking": "/secret/mine.py:stripes"}) == "MAE with mine.py:stripes masks"
    assert name({"masking": "block"}) is None, "not of pretraining"


def test_safetensors_load_as_any_checkpoint_does(export, micro, tmp_path):
    lines = export(micro.path, "--format", "safetensors")
    noise = torch.rand(2, 64)
    loss, pred, _ = micro.model(micro.imgs, noise=noise)
    copy = execute(lines, micro.imgs)["mae"]
    assert torch.equal(copy(micro.imgs, noise=noise)[0], loss), "norm_pix_loss included"
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in micro.model.parameters()]
    copy(micro.imgs)[0].backward()  # it can be trained

    path = micro.path.with_suffix(".safetensors")
    export(path, "--format", "hf")
    config = json.loads((tmp_path / "checkpoint-2-hf" / "config.json").read_text())
    assert config["norm_pix_loss"] is True
    assert header(tmp_path / "checkpoint-2-hf" / "model.safetensors") == header(path), "what is known goes along"
    fresh = models_mae.mae_vit_micro_patch4()
    load_init(SimpleNamespace(model=fresh, cmm=None), load_checkpoint(path), str(path))
    assert torch.equal(fresh(micro.imgs, noise=noise)[1], pred)


def test_safetensors_know_an_oblong_shape(export, tmp_path):
    mae = noisy(models_mae.mae_vit_micro_patch4(img_size=(16, 64)))
    save(tmp_path / "a.pth", mae)
    lines = export(tmp_path / "a.pth", "--format", "safetensors", "--encoder_only")
    features = load_encoder(tmp_path / "a.pth").forward_features(images(mae))
    assert torch.equal(execute(lines, images(mae))["features"], features)


# --- Mistakes ---


def test_mistakes_end_with_one_sentence(program, micro, tmp_path):
    def refuse(pattern, *flags):
        before = sorted(tmp_path.rglob("*"))
        code, out, err = program(tools.export, *flags)
        assert (code, out) == (2, "")
        assert re.search(pattern, err), err
        assert len(err.splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before

    torch.save(encoder_weights({"model": micro.model.state_dict()}, ""), tmp_path / "encoder.pth")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pth")
    odd = {key: value for key, value in micro.model.state_dict().items() if not key.startswith("blocks.3.")}
    torch.save(odd, tmp_path / "odd.pth")
    (tmp_path / "damaged.pth").write_bytes(micro.path.read_bytes()[:5000])
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    timm_, upstream = ("--format", "timm"), ("--format", "upstream")

    refuse("--format", micro.path)
    refuse("--format.*onnx", micro.path, "--format", "onnx")
    refuse(r"cannot read the checkpoint .*nowhere\.pth: No such file", tmp_path / "nowhere.pth", *timm_)
    refuse(r"CHECKPOINT .*empty is a folder without checkpoint-N\.pth", tmp_path / "empty", *timm_)
    refuse(r"damaged\.pth is damaged", tmp_path / "damaged.pth", *timm_)
    refuse(r"other\.pth holds no patch_embed", tmp_path / "other.pth", *upstream)
    refuse(r"odd\.pth holds a ViT of .* depth 3, which matches none of", tmp_path / "odd.pth", *timm_)
    for name in ("hf", "upstream", "safetensors"):
        wants = rf"encoder\.pth has no decoder, which --format {name} includes; add --encoder_only"
        refuse(wants, tmp_path / "encoder.pth", "--format", name)
    refuse("--global_pool is for --format timm", micro.path, *upstream, "--global_pool")
    refuse("--results: an upstream .pth has no place", micro.path, *upstream, "--results", tmp_path)
    refuse("results.jsonl: No such file", micro.path, "--format", "safetensors", "--results", tmp_path)
    refuse(r"name must end in \.safetensors", micro.path, *timm_, "--output", tmp_path / "a.bin")
    refuse("is the checkpoint itself", micro.path, *upstream, "--output", micro.path, "--overwrite")
    refuse(r"full exists; add --overwrite", micro.path, "--format", "hf", "--output", tmp_path / "full")
    refuse("is a file, but --format hf writes a folder", micro.path, "--format", "hf", "--output", micro.path)
    refuse(r"--output .*: .*checkpoint-2\.pth is not a folder", micro.path, *upstream, "--output", micro.path / "a.pth")


def test_an_output_is_replaced_only_on_demand(program, export, micro, tmp_path):
    output = tmp_path / "out" / "new" / "a.pth"  # folders are made
    export(micro.path, "--format", "upstream", "--output", output)
    content = output.read_bytes()
    code, _, err = program(tools.export, micro.path, "--format", "upstream", "--encoder_only", "--output", output)
    assert code == 2
    assert f"{output} exists; add --overwrite" in err
    assert output.read_bytes() == content
    export(micro.path, "--format", "upstream", "--encoder_only", "--output", output, "--overwrite")
    assert "mask_token" not in load_checkpoint(output)["model"]


def test_a_folder_keeps_its_other_files(export, micro, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "notes.txt").touch()
    export(micro.path, "--format", "hf", "--output", folder, "--overwrite")
    files = ["README.md", "config.json", "model.safetensors", "notes.txt", "preprocessor_config.json"]
    assert sorted(os.listdir(folder)) == files
    assert (folder / "README.md").read_text() == "mine"
    (folder / "README.md").unlink()
    for _ in range(2):  # ours is replaced
        export(micro.path, "--format", "hf", "--output", folder, "--overwrite")
    assert "CL-MAE" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["timm", "hf", "upstream", "safetensors"])
def test_a_full_disk_leaves_nothing_half_written(program, micro, tmp_path, monkeypatch, name):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    code, _, err = program(tools.export, micro.path, "--format", name)
    assert code == 2
    assert "No space left on device" in err
    assert os.listdir(tmp_path) == [micro.path.name]


# --- The masking module ---


@pytest.mark.parametrize(
    ("masking", "kind"), [("curriculum", "CurriculumMaskingModule"), ("predictive", "ErrorPredictor")]
)
def test_the_masking_module_is_exported_alone(cli, export, monkeypatch, tmp_path, masking, kind):
    monkeypatch.setattr(main_pretrain, "git_commit", lambda: "123456789012")  # a hash need not look like one
    run, imgs = tmp_path / "run", torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert cli(*SMALL, "--masking", masking, "--cmm_dim", 32, "--output_dir", run)[0] == 0
    lines = export(run, "--format", "masking")
    told = header(run / "checkpoint-1-masking.safetensors")
    checkpoint = load_checkpoint(run / "checkpoint-1.pth")
    sizes = {"cmm_depth": "1", "cmm_dim": "32", "input_size": "[16, 16]", "patch_size": "4", "mask_ratio": "0.75"}
    assert {name: told[name] for name in sizes} == sizes
    assert (told["masking"], told["commit"]) == (masking, "123456789012")
    assert float(told["lambda_cl"]) == checkpoint["moment"]["lambda_cl"]
    loaded = execute(lines, imgs)
    weights = loaded["module"].state_dict()
    assert all(torch.equal(weights[key], value) for key, value in checkpoint["cmm"].items())
    for source in (run, run / "checkpoint-1-masking.safetensors"):
        module = hubconf.masking_module(str(source))
        assert type(module).__name__ == kind
        assert not module.training
        with torch.no_grad():
            assert torch.equal(module(imgs), loaded["values"])


def test_masks_that_are_not_learned_have_no_module(program, export, micro, tmp_path):
    save(tmp_path / "random.pth", micro.model, masking="random")
    code, _, err = program(tools.export, tmp_path / "random.pth", "--format", "masking")
    assert code == 2
    assert re.search(r"--format masking: .*random\.pth has no masking module", err)
    export(tmp_path / "random.pth", "--format", "safetensors")
    for name in ("random.pth", "random.safetensors"):
        with pytest.raises(Exception, match=rf"{name} has no masking module") as raised:
            hubconf.masking_module(str(tmp_path / name))
        assert type(raised.value).__name__ == "UserError", "of a copy of our modules"
