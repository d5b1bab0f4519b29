"""Models of transformers and timm, in files that these libraries wrote, start our runs and evaluations."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch
import transformers

import hubconf
import main_finetune
import tools.export
from main_pretrain import get_args_parser
from models_mae import mae_vit_micro_patch4
from models_vit import load_encoder, load_mae
from tools.huggingface import hf_weights
from util import hub
from util.checkpoint import load_checkpoint, resolve_checkpoint, settings_of
from util.cli import UserError
from util.plots.snapshot import load_snapshot
from util.training.resume import start_pretraining

ENCODER = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
ENCODER |= dict(image_size=32, patch_size=4, layer_norm_eps=1e-6)
DECODER = dict(decoder_hidden_size=48, decoder_num_hidden_layers=2, decoder_num_attention_heads=3)
DECODER |= dict(decoder_intermediate_size=192, mask_ratio=0.6, norm_pix_loss=True)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def noisy(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def saved(name, folder, **changes):
    """A model of transformers, and its folder as `save_pretrained` writes it."""
    of_mae = name.startswith("ViTMAE")
    config = {**ENCODER, **(DECODER if of_mae else {}), **changes}
    config = (transformers.ViTMAEConfig if of_mae else transformers.ViTConfig)(**config)
    model = noisy(getattr(transformers, name)(config))
    model.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(image_mean=MEAN, image_std=STD, size=size).save_pretrained(folder)
    return model


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ViTMAEForPreTraining", "ViTMAEModel", "ViTModel", "ViTForImageClassification"])
@pytest.mark.parametrize("file", hub.WEIGHTS)
def test_an_encoder_of_transformers_gives_its_features(tmp_path, name, file):
    theirs = saved(name, tmp_path)
    if file == "pytorch_model.bin":
        torch.save(safetensors.torch.load_file(tmp_path / "model.safetensors"), tmp_path / file)
        (tmp_path / "model.safetensors").unlink()
    path = resolve_checkpoint(str(tmp_path))
    assert path == tmp_path / file
    encoder = getattr(theirs, "vit", theirs)
    whole = {"noise": torch.linspace(0, 1, 64).expand(2, -1)} if "MAE" in name else {}  # patches in their own order
    encoder.config.mask_ratio = 0.0
    with torch.no_grad():
        close(load_encoder(path).forward_features(IMAGES), encoder(IMAGES, **whole).last_hidden_state[:, 0])
    told = settings_of(load_checkpoint(path))
    assert (told["mean"], told["std"], told["input_size"]) == (MEAN, STD, 32)


@pytest.mark.parametrize("hub_names", [True, False])  # the Hub's files, and those that transformers 5 saves
def test_an_autoencoder_of_transformers_is_ours(tmp_path, hub_names):
    theirs = saved("ViTMAEForPreTraining", tmp_path)
    mae = load_mae(resolve_checkpoint(str(tmp_path)))
    if hub_names:
        safetensors.torch.save_file(hf_weights(mae), tmp_path / "model.safetensors")
        mae = load_mae(resolve_checkpoint(str(tmp_path)))
    noise = torch.rand(2, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        (loss, pred, mask), output = mae(IMAGES, 0.6, noise=noise), theirs(IMAGES, noise=noise)
    close(pred, output.logits)
    close(loss, output.loss)
    assert torch.equal(mask, output.mask)
    snapshot = load_snapshot(resolve_checkpoint(str(tmp_path)), "theirs")  # as the notebook does
    assert snapshot.masking.settings.mask_ratio == 0.6
    assert snapshot.model.norm_pix_loss is True


def save_timm(folder):
    """As timm's `save_for_hf` does, without asking huggingface_hub for a repository."""
    sizes = dict(patch_size=4, embed_dim=64, depth=4, num_heads=4, img_size=32)
    model = noisy(timm.create_model("vit_base_patch16_224.mae", **sizes))
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return model


def test_an_encoder_of_timm_gives_its_features(tmp_path):
    theirs = save_timm(tmp_path)
    path = resolve_checkpoint(str(tmp_path))
    with torch.no_grad():
        close(load_encoder(path).forward_features(IMAGES), theirs(IMAGES))
    assert settings_of(load_checkpoint(path))["mean"] == pytest.approx([0.485, 0.456, 0.406])


def start(init):
    """A new pretraining's autoencoder after `--init`."""
    args = get_args_parser().parse_args(["--init", str(init), "--output_dir", ""])
    args.start_epoch = 0
    mae = mae_vit_micro_patch4()
    start_pretraining(SimpleNamespace(model=mae, cmm=None), 1, args)
    return mae


@pytest.mark.parametrize("name", ["ViTMAEForPreTraining", "ViTMAEModel", "ViTModel", "timm"])
def test_they_start_a_pretraining(tmp_path, name):
    theirs = save_timm(tmp_path) if name == "timm" else saved(name, tmp_path)
    mae = start(tmp_path)
    norm = theirs.norm if name == "timm" else getattr(theirs, "vit", theirs).layernorm
    assert torch.equal(mae.norm.weight, norm.weight)
    if name == "ViTMAEForPreTraining":
        assert torch.equal(mae.decoder_pred.weight, theirs.decoder.decoder_pred.weight)


def test_what_would_mean_another_thing_is_refused(tmp_path):
    saved("ViTModel", tmp_path, num_attention_heads=8)
    for load in (load_encoder, start):
        with pytest.raises(UserError, match="num_heads 8, but this model has 4"):
            load(resolve_checkpoint(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged or is not a checkpoint"):
        load_encoder(resolve_checkpoint(str(tmp_path)))


def test_a_hub_name_is_fetched_once(tmp_path, monkeypatch):
    """Only what is needed, and what is cached needs no network: a fake Hub, with files that transformers wrote."""
    theirs, cache = tmp_path / "theirs", tmp_path / "cache"
    saved("ViTMAEModel", theirs)
    (theirs / "tf_model.h5").touch()
    asked = []

    def snapshot_download(repository, local_files_only=False, allow_patterns=()):
        asked.append(repository)
        if not cache.exists():
            if local_files_only:
                raise FileNotFoundError
            cache.mkdir()
            for name in allow_patterns:
                shutil.copy(theirs / name, cache)
        return str(cache)

    class HfApi:
        def model_info(self, repository, timeout):
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in theirs.iterdir()])

    fake = SimpleNamespace(snapshot_download=snapshot_download, HfApi=HfApi)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.chdir(tmp_path)
    assert hubconf.encoder("hf-hub:facebook/vit-mae-base").embed_dim == 64
    assert sorted(path.name for path in cache.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    del fake.HfApi
    assert resolve_checkpoint("timm/vit_base_patch16_224.mae") == cache / "model.safetensors"
    assert asked == ["facebook/vit-mae-base"] * 2 + ["timm/vit_base_patch16_224.mae"]


def test_without_network_one_sentence_says_so(program, tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("no route to host.\nmore")

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, _, err = program(main_finetune, "--finetune", "hf-hub:nobody/nothing-at-all", "--data_set", "shapes")
    assert (code, len(err.splitlines())) == (2, 1)
    assert re.search(r"--finetune hf-hub:nobody/nothing-at-all is not cached .* \(no route to host\); check", err)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        start("timm/nothing.at_all")


def test_our_exports_come_back(tmp_path):
    """Names map both ways: nothing is lost, renamed or reordered."""
    ours = noisy(mae_vit_micro_patch4()).state_dict()
    back = hub.our_weights(hf_weights(load(ours)))
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_an_export_keeps_what_their_files_say(program, tmp_path):
    saved("ViTMAEForPreTraining", tmp_path / "theirs")
    for form, name in (("safetensors", "ours.safetensors"), ("hf", "hf")):
        assert program(tools.export, tmp_path / "theirs", "--format", form, "--output", tmp_path / name)[0] == 0
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        header = file.metadata()
    assert [json.loads(header[name]) for name in ("mean", "std", "mask_ratio")] == [MEAN, STD, 0.6]
    assert "command" not in header
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "main_pretrain.py --" not in card
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    assert (list(processor.image_mean), list(processor.image_std)) == (MEAN, STD)


def load(weights):
    mae = mae_vit_micro_patch4()
    mae.load_state_dict(weights)
    return mae
