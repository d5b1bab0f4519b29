"""The networks of a run with their optimizers and scalers: everything that training changes."""

from argparse import Namespace
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import Block
from timm.optim import param_groups_weight_decay

from models_cmm import CurriculumMaskingModule, build_cmm
from models_mae import build_mae
from util import checkpoint as ckpt
from util.misc import NativeScalerWithGradNormCount, UserError, amp_dtype, derive_seed

SETTINGS = ("weight_decay", "lr_scale")  # of parameter groups: a resumed run has its own, which may be others


@dataclass
class TrainingState:
    """Everything that training changes. For vanilla MAE, and for a classifier, the CMM's three are None."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: NativeScalerWithGradNormCount
    cmm: CurriculumMaskingModule | None = None
    optimizer_cmm: torch.optim.Optimizer | None = None
    scaler_cmm: NativeScalerWithGradNormCount | None = None

    def state_dict(self) -> dict[str, dict]:
        return {name: part.state_dict() for name, part in vars(self).items() if part is not None}

    def load(self, checkpoint: dict, source: str) -> None:
        for name, part in vars(self).items():
            if part is None:
                continue
            if name not in checkpoint:
                raise UserError(
                    f"{source} has no {name!r}; was it trained with another --masking, or not by this program?"
                )
            if isinstance(part, torch.nn.Module):
                ckpt.load_weights(part, checkpoint[name], source)
            elif isinstance(part, torch.optim.Optimizer):
                own = [{key: group[key] for key in SETTINGS if key in group} for group in part.param_groups]
                part.load_state_dict(checkpoint[name])
                for group, values in zip(part.param_groups, own, strict=True):
                    group.update(values)
            else:
                part.load_state_dict(checkpoint[name])


def build_state(args: Namespace, device: torch.device) -> TrainingState:
    """The MAE is drawn first, so that a seed gives CL-MAE and vanilla MAE the same one."""
    torch.manual_seed(derive_seed("weights", args.seed))
    try:
        model = build_mae(
            args.model, img_size=tuple(args.input_size), in_chans=args.in_chans, norm_pix_loss=args.norm_pix_loss
        )
    except ValueError as error:
        raise UserError(f"--model {args.model} with --input_size {args.input_size}: {error}") from None
    kept = int(model.patch_embed.num_patches * (1 - args.mask_ratio))
    if not 0 < kept < model.patch_embed.num_patches:
        raise UserError(f"--mask_ratio {args.mask_ratio} keeps {kept} of {model.patch_embed.num_patches} patches")
    if args.compile or device.type == "cuda":
        model.pad_to = 8  # few shapes to compile and to allocate, and ones that tensor cores like
    state = TrainingState(*with_optimizer(model, args.lr, args, device))
    if args.masking == "curriculum":
        try:
            cmm = build_cmm(model, args.cmm_depth, args.cmm_dim)
        except ValueError as error:
            raise UserError(f"--cmm_dim {args.cmm_dim}: {error}") from None
        state.cmm, state.optimizer_cmm, state.scaler_cmm = with_optimizer(cmm, args.cmm_lr, args, device)
    return state


def with_optimizer(network: torch.nn.Module, lr: float, args: Namespace, device: torch.device) -> tuple:
    """The network on its device, with an AdamW and a gradient scaler of its own."""
    network.to(device)
    network.set_grad_checkpointing(args.grad_checkpointing)
    if args.compile:
        # Block by block: the first compiles in seconds and all others of its shape reuse it.
        for module in network.modules():
            if isinstance(module, Block):
                module.compile(dynamic=True)
    groups = param_groups_weight_decay(network, args.weight_decay, no_weight_decay_list=network.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    fp16 = amp_dtype(args.amp, device) == torch.float16
    return network, optimizer, NativeScalerWithGradNormCount(device.type, enabled=fp16)
