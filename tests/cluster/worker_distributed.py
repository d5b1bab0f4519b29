"""What test_distributed.py runs in each of several processes: one epoch of small variants, with everything recorded.

torchrun --nproc_per_node=2 tests/cluster/worker_distributed.py OUTPUT.pth
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from small_runs import SMALL

import util.misc
import util.program
from engine_pretrain import train_one_epoch
from main_pretrain import build_masking, build_networks, check_args, get_args_parser, settle_batch_and_rates
from util.datasets import build_pretrain_loader
from util.misc import NativeScalerWithGradNormCount, get_rank, get_world_size, init_distributed_mode, with_ddp
from util.training.progress import EpochLog, LossGuard, MetricBuffer
from util.training.resume import Start
from util.training.saver import StopRequest

GLOBAL_BATCH = 8  # of each iteration, whatever the number of processes
VARIANTS = {
    f"{name}, accum_iter {accum_iter}": (*flags, "--accum_iter", str(accum_iter))
    for name, flags in {
        "random": ("--masking", "random"),
        "threshold": ("--select", "threshold"),
        "topk": ("--select", "topk"),
    }.items()
    for accum_iter in (1, 2)
} | {
    "cheaper, accum_iter 1": ("--cmm_fraction", "0.5", "--cmm_every", "2", "--cmm_dim", "32"),
    "predictive, accum_iter 1": ("--masking", "predictive"),
    "distance, accum_iter 1": ("--diversity", "distance", "--soft", "attention"),
}


class Recorder(NativeScalerWithGradNormCount):
    """Notes the gradients of each update, and how many buckets of gradients processes exchange meanwhile."""

    def __init__(self):
        super().__init__("cpu", enabled=False)
        self.gradients, self.exchanges = [], []

    def __call__(self, loss, optimizer, clip_grad, parameters, update_grad=True):
        before, happened, parameters = exchanged[0], len(events), list(parameters)
        self._scaler.scale(loss).backward()
        events[happened:] = ["backward"]  # gradients travel meanwhile
        self.exchanges.append(exchanged[0] - before)
        if update_grad:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad]
            self.gradients.append(torch.cat([grad.flatten() for grad in grads]).clone())
            optimizer.step()
            optimizer.zero_grad()


exchanged = [0]
exchange = util.misc.mean_in_rank_order


def counted_exchange(state, bucket):
    exchanged[0] += 1
    return exchange(state, bucket)


util.misc.mean_in_rank_order = counted_exchange

events: list[str] = []  # passes, and what processes exchange, in the order in which they begin


def note(name, function):
    def noted(*args, **kwargs):
        events.append(name)
        return function(*args, **kwargs)

    return noted


for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"):
    setattr(dist, name, note(name, getattr(dist, name)))


def run(args):
    state, loader = build_networks(args, torch.device("cpu")), build_pretrain_loader(args)
    state.scaler, state.scaler_cmm = scaler, scaler_cmm = Recorder(), Recorder()
    losses, removed = [], []

    class Buffer(MetricBuffer):
        def add(self, step, values):
            events.append("logged")
            losses.append({name: value.item() for name, value in values.items()})
            super().add(step, values)

    model, masking = with_ddp(state.model), build_masking(state, args)
    log = EpochLog(Start(0), len(loader), LossGuard({}), None, args)
    log.buffer = Buffer()
    state.model.register_forward_pre_hook(lambda *_: events.append("forward"))
    state.model.register_forward_hook(lambda *call: removed.append(call[-1][2].sum().item()))
    events.clear()
    train_one_epoch(model, loader, masking, state, 0, log, args)
    return {
        "events": list(events),
        "losses": losses,
        "gradients": scaler.gradients,
        "gradients_cmm": scaler_cmm.gradients,
        "exchanges": scaler.exchanges,
        "exchanges_cmm": scaler_cmm.exchanges,
        "removed": removed,
    }


class Bucket:
    """As DDP hands it to whoever exchanges its gradients."""

    def __init__(self, values):
        self.values = values

    def buffer(self):
        return self.values


def mean_at(offset):
    """What processes make of their 1,000 random values, which lie `offset` places into a bucket."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(get_rank()))
    return exchange(None, Bucket(torch.cat([torch.zeros(offset), values]))).wait()[offset:]


def steps_that_stop():
    """What this process learns in each of four steps about a signal that the last process gets before its second."""
    stop, heard = StopRequest(), []
    for step in range(4):
        if step == 1 and get_rank() == get_world_size() - 1:
            stop.received.add(signal.SIGTERM)
        means = stop.mean_of_processes({"rank": torch.tensor(float(get_rank()))})
        assert means == {"rank": (get_world_size() - 1) / 2}
        heard.append(stop.agreed())
    return heard


def main(output):
    torch.set_num_threads(1)
    results = {}
    for name, flags in VARIANTS.items():
        batch = str(GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", 1)))
        rest = ("--shapes_images", "32", "--batch_size", batch, "--warmup_epochs", "0", "--lr", "1e-3")
        args = get_args_parser().parse_args([*SMALL, *rest, "--output_dir", "", *flags])
        check_args(args)
        if not results:
            init_distributed_mode(args)
        settle_batch_and_rates(args)
        results[name] = run(args)
    if get_world_size() > 1:
        results["means"] = [mean_at(offset) for offset in (0, 333)]
        results["stopping"] = steps_that_stop()
    torch.save(results, f"{output}.{get_rank()}")
    util.program.leave(0, together=True)


if __name__ == "__main__":
    main(sys.argv[1])
