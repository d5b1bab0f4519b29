"""Config files: the one that a run writes reproduces it, and their values are checked like flags."""

from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from processes import ROOT
from small_runs import DATA, SMALL, assert_same_training, checkpoint

import main_finetune
import main_knn
import main_pretrain
from experiments.plan import parse
from experiments.recipes import RELEASED_FLAGS, SCALES
from util.cli import PLACES
from util.training.launcher import add_job_arguments, program_args

CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


def parsed(*flags, program=main_pretrain) -> Namespace:
    return program.get_args_parser().parse_args([str(flag) for flag in flags])


def settled(*flags) -> dict:
    """On eight processes."""
    args = parsed(*flags)
    main_pretrain.check_args(args)
    main_pretrain.settle_batch_and_rates(args)
    return vars(args)


# --- The files in configs/ ---


def test_the_papers_config_is_the_bare_command(monkeypatch):
    """With the paper's batch and classes, which have no default."""
    monkeypatch.setattr(main_pretrain, "get_world_size", lambda: 8)
    for size in ("base", "large", "huge"):
        ours = settled("--config", f"configs/clmae_vit_{size}.yaml")
        assert ours.pop("global_batch_size") == 4096
        bare = settled("--model", f"mae_vit_{size}", "--batch_size", 512, "--num_classes", 200)
        assert ours == {name: value for name, value in bare.items() if name != "global_batch_size"}
        assert ours["lr"] == pytest.approx(0.0024)
        assert not main_pretrain.departures_from_paper(Namespace(**ours, classes=["one"] * 200))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_tells_its_cost_and_what_to_expect(name, monkeypatch):
    text = (ROOT / "configs" / name).read_text()
    assert "\n# Cost: " in text
    assert "\n# Expect: " in text
    monkeypatch.setattr(main_pretrain, "get_world_size", lambda: 8)
    settled("--config", f"configs/{name}")


def test_recipes_and_presets_are_the_configs():
    base = SCALES["full"].pretrain.split()
    assert parse([*base, *RELEASED_FLAGS, "--epochs", "200"]) == parse(["--config", "configs/released.yaml"])
    cheap = ["--cmm_every", "2", "--cmm_fraction", "0.25", "--cmm_dim", "384"]
    assert parse([*base, *cheap]) == parse(["--config", "configs/cheap.yaml"])


# --- A round trip ---

ODD = (
    *("--amp", "off", "--no_norm_pix_loss", "--input_size", "32", "64", "--lr", "1e-07", "--lambda_cl_end", "-0.3"),
    *("--data_path", "2024-01-01", "--class_list", "é: [x] #1", "--track", "--num_classes", "0", "--init", "null"),
    *("--masking", "x.py:no", "--no_pin_mem", "--compile"),
)


@pytest.mark.parametrize("program", [main_pretrain, main_finetune])
@pytest.mark.parametrize("case", ["bare", "odd"])
def test_a_config_repeats_the_flags(program, case, tmp_path):
    odd = (
        ODD
        if program is main_pretrain
        else ("--cls_token", "--aa", "", "--cutmix_minmax", "0.1", "0.5", "--mixup", "1")
    )
    elsewhere = ["--output_dir", "runs/a", "--resume", "auto", "--device", "cuda", "--local_rank", "3"]
    args = parsed(*(odd if case == "odd" else ()), *elsewhere, program=program)
    file = tmp_path / "config.yaml"
    file.write_text(program.get_args_parser().config_text(args), encoding="utf-8")
    again = parsed("--config", file, program=program)
    kept = {name: value for name, value in vars(args).items() if name not in PLACES}
    found = {name: value for name, value in vars(again).items() if name not in PLACES}
    kept["input_size"] = [kept["input_size"]] if isinstance(kept["input_size"], int) else kept["input_size"]
    assert found == kept
    assert (again.output_dir, again.resume, again.device) == ("./output_dir", "", None), "a copy is a run of its own"
    assert "config" not in again


def test_a_run_is_repeated_by_its_own_config(cli, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli(*SMALL, "--no_norm_pix_loss", "--output_dir", first)[0] == 0
    assert cli("--config", first / "config.yaml", "--output_dir", second, "--device", "cpu")[0] == 0
    before = (first / "config.yaml").read_text()
    assert yaml.safe_load(before) == yaml.safe_load((second / "config.yaml").read_text())
    one, two = checkpoint(first), checkpoint(second)
    assert_same_training(one, two)
    places = ("output_dir", "log_dir")
    assert {**one["args"], **dict.fromkeys(places)} == {**two["args"], **dict.fromkeys(places)}
    assert cli("--config", first / "config.yaml", "--output_dir", first, "--seed", 1, "--device", "cpu")[0] == 2
    assert (first / "config.yaml").read_text() == before, "a run that is refused overwrites nothing"


def test_processes_read_and_the_first_writes(two_processes, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": "vit_micro_patch4", "epochs": 1, "input_size": 16}))
    flags = ("--config", tmp_path / "mine.yaml", *DATA, "--batch_size", "8", "--output_dir", tmp_path / "out")
    codes, _, err = two_processes("main_finetune", *flags)
    assert codes == [0, 0], err
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["epochs"] == 1


def test_a_job_takes_a_config_and_leaves_its_own_flags_out():
    parser = main_pretrain.get_args_parser()
    add_job_arguments(parser)
    args = program_args(parser.parse_args(["--config", "configs/laptop.yaml", "--nodes", "1", "--epochs", "3"]))
    assert (args.model, args.epochs, args.device) == ("mae_vit_micro_patch4", 3, "cuda")
    assert vars(args).keys() == vars(parsed()).keys()
    text = main_pretrain.get_args_parser().config_text(args)
    assert not {"nodes", "device", "output_dir"} & yaml.safe_load(text).keys()


# --- Files that users write ---


def test_flags_win_and_configs_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = parsed("--config", "configs/laptop.yaml", "--epochs", 3, "--input-size", 16, 32)
    assert (args.epochs, args.input_size, args.batch_size, args.blr) == (3, [16, 32], 64, 4e-3)
    assert parsed("--epochs", 3, "--config=configs/laptop.yaml").epochs == 3, "in any order"
    Path("configs").mkdir()
    Path("configs/laptop.yaml").write_text("# nothing\n")
    assert parsed("--config", "configs/laptop.yaml") == parsed(), "a file that is here comes first"
    Path("mine.yaml").write_text("global_pool: true\nbatch_size: 7\n")
    assert parsed("--config", "mine.yaml", "--cls_token", program=main_knn).global_pool is False


BAD = {
    "epoch: 3": "epoch is unknown; did you mean epochs?",
    "zzzz: 3": "zzzz is unknown (",
    "7: 3": "7 is unknown",
    "config: x.yaml": "config is unknown",
    "help: true": "help is unknown",
    "lambda_kl: .nan": "lambda_kl: nan must be at least 0",
    "lambda_kl: .inf": "lambda_kl: inf must be finite",
    "epochs: 3.5": "epochs: '3.5' is not a whole number",
    "epochs: many": "epochs: 'many' is not a whole number",
    "epochs: true": "epochs must be a number or text",
    "epochs:": "epochs must be a number or text",
    "epochs: [3]": "epochs must be a number or text;",
    "epochs: {a: 3}": "epochs must be a number or text",
    "input_size: []": "input_size must be a number or text, or a list of them",
    "input_size: [[3]]": "input_size must be a number or text, or a list of them",
    "input_size: [32, -1]": "input_size: -1 must be at least 1",
    "data_path: 2024-01-01": "data_path must be a number or text; quote",
    "amp: off": "amp must be a number or text; quote what YAML reads otherwise, as in 'off'",
    "amp: bf8": "amp: invalid choice: 'bf8'",
    "compile: 1": "compile must be true or false",
    "track: [tensorboard, mlflow]": "track: invalid choice: 'mlflow'",
    'data_path: "a\\0b"': "'a\\x00b': names and paths must be valid UTF-8",
    "epochs": "every line must be a flag and its value",
    "- epochs": "every line must be a flag and its value",
    "epochs: [": "is not valid YAML",
    "epochs: !!python/object/apply:os.getcwd []": "is not valid YAML",
    "data_path: 2024-99-99": "is not valid YAML",
    "epochs: " + "[" * 1500: "is not valid YAML",
    "seed: 0x" + "f" * 5000: "seed: ",
    b"data_path: \xff": "is not valid YAML",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: str(text)[:40])
def test_a_mistake_in_a_config_names_file_and_key(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as stop:
        parsed("--config", "mine.yaml")
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n")) == (2, 1)
    assert BAD[text] in err
    assert "--config mine.yaml" in err


@pytest.mark.parametrize(
    ("path", "reason"), [("none.yaml", "No such file"), (".", "not a file"), ("/dev/zero", "not a file")]
)
def test_a_config_that_cannot_be_read_is_named(path, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parsed("--config", path)
    assert f"--config {path}: {reason}" in capsys.readouterr().err
