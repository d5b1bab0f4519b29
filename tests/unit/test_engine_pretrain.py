"""The two-step iteration: who changes when, what is computed for whom, and how often."""

import functools
import itertools

import pytest
import torch
from own_autoencoder import OwnAutoencoder
from timm.models.vision_transformer import Block

from engine_pretrain import frozen, train_one_epoch
from main_pretrain import (
    build_masking,
    build_networks,
    check_args,
    get_args_parser,
    settle_batch_and_rates,
    with_optimizer,
)
from masking import CurriculumMasking, Masking, MaskSettings
from models_mae import Autoencoder
from util.cli import TrainingDiverged
from util.datasets import build_pretrain_loader, count_steps, normalise
from util.misc import NativeScalerWithGradNormCount
from util.training.monitor import Monitor
from util.training.progress import EpochLog, LossGuard
from util.training.resume import Start, TrainingState


def setup(*flags):
    args = get_args_parser().parse_args(
        [
            *("--model", "mae_vit_micro_patch4", "--input_size", "16", "--norm_pix_loss", "--data_set", "shapes"),
            *("--shapes_images", "32", "--batch_size", "8", "--epochs", "2", "--warmup_epochs", "0", "--lr", "1e-3"),
            *("--num_workers", "0", "--cmm_depth", "1", "--device", "cpu", "--output_dir", "", *map(str, flags)),
        ]
    )
    check_args(args)
    settle_batch_and_rates(args)
    return args, build_networks(args, torch.device("cpu")), build_pretrain_loader(args)


def train(args, state, loader, epoch=0, guard=None):
    guard = guard or LossGuard(state.loss_scales())
    log = EpochLog(Start(epoch), count_steps(loader, args) * args.accum_iter, guard, None, args)
    return train_one_epoch(state.model, loader, build_masking(state, args), state, epoch, log, args)


def first_batch(loader):
    """Normalised images, and their indices."""
    pixels, _, index = next(iter(loader))
    return normalise(pixels), index


def module_losses(args, state, imgs, weight):
    """What the module learns from a batch at a given curriculum weight; the patch errors; Z."""
    masking = Masking(MaskSettings.of(args), state.model.patch_embed.grid_size, state.cmm)
    ask = masking.ask(imgs, torch.arange(len(imgs)), 0, 0.0)
    ask.lambda_cl = weight
    keep_prob = masking.values(imgs)
    _, pred, mask = state.model(imgs, args.mask_ratio, **masking.choose(ask, keep_prob))
    error, rows = masking.learned.errors(state.model, imgs, keep_prob, pred)
    return masking.learned.losses(keep_prob, error, mask, rows, ask), error, keep_prob


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).clone()


class Witness(NativeScalerWithGradNormCount):
    """Records, for a step, which of the two networks changed and whether the other one has gradients."""

    def __init__(self, state):
        super().__init__("cpu", enabled=False)
        self.networks = {"mae": state.model, "cmm": state.cmm}
        self.changed, self.with_gradient = [], []

    def __call__(self, loss, optimizer, *args, update_grad=True):
        before = {name: weights(network) for name, network in self.networks.items()}
        loss.backward()
        self.with_gradient.append(
            {name for name, net in self.networks.items() if any(p.grad is not None for p in net.parameters())}
        )
        optimizer.step()
        optimizer.zero_grad()
        after = {name: weights(network) for name, network in self.networks.items()}
        self.changed.append({name for name in before if not torch.equal(before[name], after[name])})


class PoisonedLoader:
    """Passes a loader's batches on, with the images of chosen iterations not finite."""

    def __init__(self, loader, poisoned, batches=None):
        self.batches, self.length, self.poisoned = batches or loader, len(loader), poisoned
        self.set_epoch = loader.set_epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        for i, (imgs, labels, index) in enumerate(self.batches):
            yield (imgs * torch.inf if i in self.poisoned else imgs), labels, index


def test_each_step_changes_its_own_network_and_computes_gradients_for_no_other():
    args, state, loader = setup()
    state.scaler, state.scaler_cmm = Witness(state), Witness(state)
    calls = []
    state.cmm.register_forward_hook(lambda *_: calls.append(1))
    train(args, state, loader)
    assert state.scaler.changed == [{"mae"}] * 4
    assert state.scaler_cmm.changed == [{"cmm"}] * 4
    assert state.scaler.with_gradient == [{"mae"}] * 4
    assert state.scaler_cmm.with_gradient == [{"cmm"}] * 4
    assert len(calls) == 4, "one forward of the CMM per iteration"


def test_between_its_updates_the_cmm_is_only_asked():
    args, state, loader = setup("--cmm_every", 3, "--epochs", 1)
    state.scaler, state.scaler_cmm = Witness(state), Witness(state)
    graphs = []
    state.cmm.register_forward_hook(lambda *call: graphs.append(call[-1].requires_grad))
    stats = train(args, state, loader)
    assert state.scaler.changed == [{"mae"}] * 4
    assert state.scaler_cmm.changed == [{"cmm"}] * 2, "in the first and in the fourth iteration"
    assert graphs == [True, False, False, True], "no graph is built in between"
    assert stats["lambda_cl"] == pytest.approx(sum(1 - 1.1 * step / 4 for step in range(4)) / 4)


def test_a_share_of_the_images_teaches_the_curriculum_and_all_the_rest():
    args, state, loader = setup("--cmm_fraction", 0.25)
    imgs, _ = first_batch(loader)
    losses, error, keep_prob = module_losses(args, state, imgs, 0.5)
    assert error.shape == (2, 16)
    removed = 1 - keep_prob[[0, 4]]
    assert losses["cmm/curriculum"].item() == pytest.approx((0.5 * (removed * error).sum() / removed.sum()).item())
    args.cmm_fraction = 1.0
    whole, all_errors, _ = module_losses(args, state, imgs, 0.5)
    assert torch.allclose(all_errors[[0, 4]], error, atol=1e-5)
    for part in ("cmm/gauss", "cmm/kl", "cmm/div"):
        assert losses[part] == whole[part]
    args.cmm_fraction = 0.25
    seen = []
    state.model.patch_embed.register_forward_hook(lambda *call: seen.append(len(call[1][0])))
    train(args, state, loader)
    assert seen == [8, 2] * 4


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.99, 1])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_the_share_of_images_is_spread_and_never_none(n, fraction):
    strategy = CurriculumMasking(MaskSettings(cmm_fraction=fraction))
    rows = torch.arange(n)[strategy.rows(n, torch.device("cpu"))[1]].tolist()
    assert len(rows) == len(set(rows)) == max(round(fraction * n), 1)
    assert max(b - a for a, b in itertools.pairwise([*rows, n])) <= -(-n // len(rows))


def test_checkpointing_changes_memory_and_nothing_else():
    plain, checked = setup("--clip_grad", 1), setup("--clip_grad", 1, "--grad_checkpointing")
    for args, state, loader in (plain, checked):
        state.scaler_cmm = Witness(state)
        train(args, state, loader)
        assert state.scaler_cmm.with_gradient == [{"cmm"}] * 4
    for network in ("model", "cmm"):
        assert torch.equal(weights(getattr(plain[1], network)), weights(getattr(checked[1], network)))
    imgs, _ = first_batch(plain[2])

    def kept(state):
        """Numbers kept for the backward pass of an MAE step."""
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            state.model(imgs)
        return sum(sizes)

    assert kept(checked[1]) < 0.5 * kept(plain[1])


@pytest.mark.parametrize("soft", ["tokens", "attention"])
def test_the_soft_pass_keeps_nothing_that_only_weight_gradients_need(soft):
    """The second layer of an MLP needs its input, 4 times as wide, only for its weights: only GELU's input is kept."""
    _, state, loader = setup()
    imgs, _ = first_batch(loader)
    keep_prob = state.cmm(imgs)

    def wide_tensors(**masking):
        found = []
        hidden = {block.mlp.fc1.out_features for block in [*state.model.blocks, *state.model.decoder_blocks]}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            state.model(imgs, **masking)
        return len({t.data_ptr() for t in found if t.ndim >= 2 and t.shape[-1] in hidden and t.shape[0] in (8, 136)})

    blocks = len(state.model.blocks) + len(state.model.decoder_blocks)
    assert wide_tensors(visible=torch.ones(8, 16, dtype=torch.bool)) == 2 * blocks
    with frozen(state.model):
        assert wide_tensors(keep_prob=keep_prob, soft=soft) == blocks


@pytest.mark.parametrize(
    "flags",
    [
        ("--masking", "random"),
        ("--masking", "predictive"),
        ("--soft", "tokens"),
        ("--soft", "attention"),
        ("--soft", "attention", "--select", "topk", "--grad_checkpointing"),
        ("--cmm_every", "2", "--cmm_fraction", "0.25", "--cmm_dim", "32", "--amp", "bf16", "--knn_every", "1"),
    ],
    ids=" ".join,
)
def test_every_variant_is_compiled_once(monkeypatch, flags):
    """With `fullgraph`, a graph break in a block is an error, and so is a block that torch gives up compiling. Training
    and monitoring have compiled all they need after an epoch; other numbers of visible tokens need nothing new."""
    most_visible = iter([5, 64, 40, 17, 9, 30, 60, 2])

    def choose(self, ask, values):
        return torch.arange(64) < torch.linspace(1, next(most_visible), len(values)).round()[:, None]

    monkeypatch.setattr(Block, "compile", functools.partialmethod(Block.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    args, state, loader = setup("--compile", "--input_size", 32, *flags)
    masking, monitor = build_masking(state, args), Monitor(args, torch.device("cpu"))
    compiled = []
    for epoch in range(2):
        with monkeypatch.context() as patch:
            if args.masking == "curriculum" and args.select == "threshold":
                patch.setattr(CurriculumMasking, "choose", choose)
            train(args, state, loader, epoch)
        monitor.after_epoch(epoch, state.model, masking, None)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1] > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("masking", ["curriculum", "predictive"])
def test_biases_and_norms_have_no_weight_decay(masking):
    """Tokens have it, as upstream's (test_models_mae.py holds the names)."""
    _, state, _ = setup("--weight_decay", 0.3, "--masking", masking)
    for network, optimizer in ((state.model, state.optimizer), (state.cmm, state.optimizer_cmm)):
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        for name, p in network.named_parameters():
            if p.requires_grad:
                assert decay[id(p)] == (0.0 if p.ndim == 1 else 0.3), name
        assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_frozen_gives_the_weights_back():
    _, state, _ = setup()
    trainable = [name for name, p in state.model.named_parameters() if p.requires_grad]
    with frozen(state.model):
        assert not any(p.requires_grad for p in state.model.parameters())
    assert [name for name, p in state.model.named_parameters() if p.requires_grad] == trainable


def test_joint_loss_weighs_its_parts():
    args, state, loader = setup("--lambda_gauss", 3, "--lambda_kl", 5, "--lambda_div", 7, "--lambda_pos", 11)
    losses, _, _ = module_losses(args, state, first_batch(loader)[0], -0.5)
    parts = {name.split("/")[1]: value.item() for name, value in losses.items()}
    assert parts["loss"] == pytest.approx(
        parts["curriculum"] + 3 * parts["gauss"] + 5 * parts["kl"] + 7 * parts["div"] + 11 * parts["pos"], rel=1e-5
    )
    assert parts["curriculum"] < 0


def test_a_further_loss_is_a_function_and_an_entry():
    args, state, loader = setup("--lambda_pos", 0)
    imgs, index = first_batch(loader)
    masking = build_masking(state, args)
    masking.learned.terms["entropy"] = (lambda z, ratio: ratio * torch.special.entr(z).mean(), 3.0)
    ask, keep_prob = masking.ask(imgs, index, 0, 0.0), masking.values(imgs)
    losses = masking.learned.losses(keep_prob, torch.ones(8, 16), torch.ones(8, 16), slice(None), ask)
    assert losses["cmm/entropy"].item() == pytest.approx(-0.75 * (keep_prob * keep_prob.log()).mean().item(), rel=1e-5)
    without, _, _ = module_losses(args, state, imgs, 1.0)
    assert set(losses) - set(without) == {"cmm/entropy"}
    assert "cmm/pos" not in losses, "what has no weight is not computed"
    weights = {"curriculum": 1, "gauss": 10, "kl": 1, "div": 2, "entropy": 3}
    expected = sum(weight * losses[f"cmm/{name}"].item() for name, weight in weights.items())
    assert losses["cmm/loss"].item() == pytest.approx(expected, rel=1e-5)


def test_what_stays_visible():
    args, state, loader = setup("--mask_ratio", 0.6)
    imgs, index = first_batch(loader)
    masking, keep_prob = build_masking(state, args), torch.rand(8, 16)
    assert torch.equal(masking.choose(masking.ask(imgs, index, 0, 0.0), keep_prob)["visible"], keep_prob >= 0.5)

    args, state, loader = setup("--select", "topk", "--mask_ratio", 0.6)
    masking = build_masking(state, args)
    keep_prob = masking.values(imgs)  # 16 patches, int(16 * 0.4) = 6 stay
    _, _, mask = state.model(imgs, 0.6, **masking.choose(masking.ask(imgs, index, 0, 0.0), keep_prob))
    largest = keep_prob.topk(6).indices
    assert torch.equal((mask == 0).sum(dim=1), torch.full((8,), 6))
    assert (mask.gather(1, largest) == 0).all()


def test_the_predictor_learns_from_the_errors_of_step_one_and_nothing_else():
    args, state, loader = setup("--masking", "predictive")
    state.scaler, state.scaler_cmm = Witness(state), Witness(state)
    passes = []
    state.model.register_forward_hook(lambda *_: passes.append(1))
    stats = train(args, state, loader)
    assert state.scaler.changed == state.scaler.with_gradient == [{"mae"}] * 4
    assert state.scaler_cmm.changed == state.scaler_cmm.with_gradient == [{"cmm"}] * 4
    assert len(passes) == 4, "one forward of the MAE per iteration"
    assert {name for name in stats if name.startswith("cmm/")} == {"cmm/loss", "cmm/lr"}
    assert stats["mask/visible"] == 0.25


@pytest.mark.parametrize("masking", ["curriculum", "random"])
def test_accumulation_averages_over_micro_batches(masking):
    """One update from two micro-batches equals one from the mean of their losses."""
    args, state, loader = setup("--masking", masking, "--accum_iter", 2, "--batch_size", 16)
    _, expected, _ = setup("--masking", masking, "--accum_iter", 2, "--batch_size", 16)
    chooser, total = build_masking(expected, args), 0
    for pixels, _, index in loader:
        imgs = normalise(pixels)
        ask = chooser.ask(imgs, index, 0, 0.0)
        total = total + expected.model(imgs, args.mask_ratio, **chooser.choose(ask, chooser.values(imgs)))[0] / 2
    expected.scaler(total, expected.optimizer)
    train(args, state, loader)
    assert torch.allclose(weights(state.model), weights(expected.model), atol=1e-6)
    assert not torch.allclose(weights(state.model), weights(build_networks(args, torch.device("cpu")).model), atol=1e-6)


@pytest.mark.parametrize("flags", ["random", "predictive", "curriculum", "curriculum --select topk --soft attention"])
def test_an_autoencoder_of_ones_own_trains_with_any_masks(flags):
    args, _, loader = setup("--masking", *flags.split(), "--epochs", 1)
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    own: Autoencoder = OwnAutoencoder()
    state = TrainingState(*with_optimizer(own, args.lr, args, cpu))
    masking = Masking(MaskSettings.of(args), own.patch_embed.grid_size)
    if masking.learned is not None:
        module = masking.learned.build(own)
        state.cmm, state.optimizer_cmm, state.scaler_cmm = with_optimizer(module, args.cmm_lr, args, cpu)
    before = {name: weights(network) for name, network in (("model", state.model), ("cmm", state.cmm)) if network}
    stats = train(args, state, loader)
    assert 0 < stats["loss"] < 10
    for name, initial in before.items():
        assert not torch.equal(weights(getattr(state, name)), initial), name
    assert ("cmm/loss" in stats) == ("cmm" in before) == (flags != "random")


def test_incomplete_accumulation_is_left_out():
    args, state, loader = setup("--accum_iter", 3)  # 4 micro-batches: one update, one left over
    state.scaler = Witness(state)
    stats = train(args, state, loader)
    assert len(state.scaler.changed) == 3
    assert stats["lambda_cl"] == 1.0, "the schedule counts updates: this is the first of two"


def test_curriculum_falls_over_the_run_and_can_be_switched_off():
    args, state, loader = setup("--lambda_cl_end", -1)
    stats = [train(args, state, loader, epoch) for epoch in range(2)]  # 4 steps each: 1, 0.75, 0.5, 0.25; 0, ...
    assert [s["lambda_cl"] for s in stats] == pytest.approx([0.625, -0.375])
    args, state, loader = setup("--no_curriculum")
    stats = train(args, state, loader)
    assert stats["lambda_cl"] == stats["cmm/curriculum"] == 0


def test_learning_rates_follow_their_schedules():
    args, state, loader = setup("--warmup_epochs", 1)
    first, second = (train(args, state, loader, epoch) for epoch in range(2))
    assert first["lr"] == first["cmm/lr"] == pytest.approx(1e-3 * (0 + 0.25 + 0.5 + 0.75) / 4)
    assert second["cmm/lr"] == pytest.approx(1e-3), "constant after warm-up"
    assert second["lr"] < 0.7e-3, "half a cosine"
    args, state, loader = setup("--warmup_epochs", 1, "--cmm_schedule", "cosine")
    second = train(args, state, loader, 1)
    assert second["cmm/lr"] == second["lr"]


@pytest.mark.parametrize(
    "flags",
    [
        *[("--masking", name) for name in ("random", "block", "grid", "noise", "predictive")],
        ("--select", "topk", "--amp", "fp16"),
        ("--select", "topk", "--soft", "attention"),
    ],
    ids=" ".join,
)
def test_no_step_waits_for_the_device(monkeypatch, flags):
    """Values leave the device once per report, and nothing else does. (With --select threshold the length of the
    sequence does too, once per step: there is no other way to know it.)"""
    args, state, loader = setup(*flags, "--batch_size", 2)
    loader = PoisonedLoader(loader, set(), batches=list(loader))  # what the loader does is on the host anyway
    guard, waits = LossGuard(state.loss_scales()), []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(tensor, *args, _name=name, _original=original, **kwargs):
            waits.append(_name)
            return _original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    train(args, state, loader, guard=guard)  # 16 iterations, one report
    assert waits == ["tolist"]


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("soft", ["tokens", "attention"])
def test_mixed_precision_computes_the_losses_in_float32(amp, soft):
    args, state, loader = setup("--amp", amp, "--soft", soft)
    dtypes = set()
    for scaler in (state.scaler, state.scaler_cmm):
        original = scaler._scaler.scale
        scaler._scaler.scale = lambda loss, original=original: (dtypes.add(loss.dtype), original(loss))[1]
    stats = train(args, state, loader)
    assert dtypes == {torch.float32}
    args, state, loader = setup("--amp", "off", "--soft", soft)
    exact = train(args, state, loader)
    assert stats["loss"] == pytest.approx(exact["loss"], rel=0.05)
    assert stats["loss"] != exact["loss"], "mixed precision was in use"


def test_loss_that_is_not_finite_stops_the_run():
    args, state, loader = setup()
    with pytest.raises(TrainingDiverged, match=r"step 2 .*last finite losses were: loss [\d.]+, cmm/loss"):
        train(args, state, PoisonedLoader(loader, {2}))


def test_under_fp16_the_step_is_skipped_and_counted():
    args, state, loader = setup("--amp", "fp16")
    guard = LossGuard(state.loss_scales())
    stats = train(args, state, PoisonedLoader(loader, {0, 2}), guard=guard)
    assert (guard.skipped, stats["skipped"]) == (2, 0.5)
    assert torch.isfinite(weights(state.model)).all()
    assert torch.isfinite(weights(state.cmm)).all()
    assert 0 < stats["loss"] < 10
    assert stats["loss_scale"] == stats["cmm/loss_scale"] == 2.0**15 * 3 / 4, "the mean of the two finite iterations"


def test_gradients_that_overflow_behind_finite_losses_are_counted_and_stop_the_run():
    """The MAE learns nothing, its losses look healthy, and the masking module, whose gradients fit, learns on."""
    args, state, loader = setup("--amp", "fp16", "--shapes_images", 144)
    state.scaler._scaler._init_scale = 2.0**80
    before, guard = weights(state.model), LossGuard(state.loss_scales())
    stats = train(args, state, loader, guard=guard)  # 18 iterations
    assert (guard.skipped, stats["skipped"]) == (18, 1)
    assert torch.equal(weights(state.model), before)
    assert 0 < stats["loss"] < 10
    assert guard.scales == {"loss_scale": 2.0**62, "cmm/loss_scale": 2.0**16}

    args, state, loader = setup("--amp", "fp16", "--shapes_images", 144)
    state.model.mask_token.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingDiverged, match=r"overflow fp16 at step 16 \(loss_scale 0\.5, cmm/loss_scale 6"):
        train(args, state, loader)
