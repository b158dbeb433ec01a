"""The engine on a GPU: parity, streams, pinned memory, and memory that is really freed.

Tolerance: kernels and shapes are the same with and without offloading, so losses and first gradients
agree to the last bits (atomics in embedding and convolution backward move them); an optimizer step
on the CPU rounds differently from one on the GPU, which the later steps then carry.
"""

from __future__ import annotations

import random

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload import OffloadTrainingManager
from ferry_support.offload_cases import (
    CASES,
    WIDTH,
    Residual,
    Stack,
    assert_close,
    assert_same_run,
    build,
    inputs,
    train,
)
from torch import nn

pytestmark = pytest.mark.gpu

SAME_DEVICE_RTOL = 1e-6
HOST_STEP_RTOL = 2e-4


@pytest.fixture(autouse=True)
def exact_matmul():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("threshold", [None, 1.0], ids=["leaf", "whole"])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_model(name, threshold, on_host, checkpointing):
    expected = train(build(name, checkpointing).cuda(), optimizer="SGD", device="cuda")
    model = build(name, checkpointing)
    manager = OffloadTrainingManager(model, "cuda", on_host, threshold)

    def nothing_leaked():
        assert manager.resident_bytes == manager.resident_set_bytes

    actual = train(model, manager, optimizer="SGD", device="cuda", after_each_backward=nothing_leaked)
    assert_same_run(actual, expected, HOST_STEP_RTOL if on_host else SAME_DEVICE_RTOL)
    for mine, other in zip(actual.losses[:1], expected.losses[:1], strict=True):
        assert_close(mine, other, SAME_DEVICE_RTOL)
    manager.remove()
    assert all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()])
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
def test_accumulation(on_host, checkpointing):
    expected = train(build("tied", checkpointing).cuda(), micro_batches=3, steps=1, device="cuda")
    model = build("tied", checkpointing)
    manager = OffloadTrainingManager(model, "cuda", on_host)
    actual = train(model, manager, micro_batches=3, steps=1, device="cuda")
    for name, gradient in expected.gradients[0].items():
        assert_close(actual.gradients[0][name], gradient, 1e-5)


@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "host"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_delays_on_either_stream_change_nothing(monkeypatch, on_host, checkpointing):
    """Copies that come late, and kernels that are late when the next copy wants their slot."""
    from comfyui_ferry.core.offload.transfer import CudaTransfer

    width = 512

    def make():
        torch.manual_seed(0)
        model = Stack(*(Residual(width) for _ in range(6)))
        model.checkpointing = checkpointing
        return model

    def run(model, manager):
        stepper = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(64, width, generator=generator).cuda().requires_grad_()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if manager is not None:
                manager.after_backward()
            stepper.step()
            stepper.zero_grad()
        return torch.stack(losses).cpu(), [p.detach().cpu().clone() for p in model.parameters()]

    expected = run(make().cuda(), None)
    rng = random.Random(0)
    plain_start = CudaTransfer.start

    def late_start(self, source, destination, lease, **options):
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(rng.randrange(0, 2_000_000))
        plain_start(self, source, destination, lease, **options)
        # A copy that did not wait for its slot would overwrite weights in use by what follows this.
        torch.cuda._sleep(rng.randrange(0, 1_000_000))

    monkeypatch.setattr(CudaTransfer, "start", late_start)
    model = make()
    manager = OffloadTrainingManager(model, "cuda", on_host)
    losses, weights = run(model, manager)
    assert_close(losses, expected[0], 1e-5)
    for mine, other in zip(weights, expected[1], strict=True):
        assert_close(mine, other, 1e-5)


def test_a_copy_that_waits_for_nothing_is_caught(monkeypatch):
    """The delays above can fail: without the events, results change."""
    from comfyui_ferry.core.offload import transfer

    monkeypatch.setattr(transfer.CudaTransfer, "wait", lambda self, lease: None)
    plain_start = transfer.CudaTransfer.start

    def late_start(self, source, destination, lease, **options):
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(200_000_000)  # 0.1 s: later than the kernels of a host that is busy
        plain_start(self, source, destination, lease, **options)

    monkeypatch.setattr(transfer.CudaTransfer, "start", late_start)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).requires_grad_(False)
    x = torch.randn(8, 256)
    expected = model(x)
    with OffloadTrainingManager(model, "cuda"):
        actual = model(x.cuda()).cpu()
        torch.cuda.synchronize()
    assert not torch.allclose(actual, expected, rtol=1e-3)


def test_memory_is_freed_and_bounded():
    width, count = 1024, 16
    one = width * width * 4
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).requires_grad_(False)
    x = torch.randn(4, width, device="cuda", requires_grad=True)
    model[0].cuda()(x).sum().backward()  # workspaces of the libraries
    model[0].cpu()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    manager = OffloadTrainingManager(model, "cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model(x).square().mean().backward()
    assert manager.resident_bytes == 0
    assert torch.cuda.max_memory_allocated() - before < 5 * one
    manager.remove()
    del manager
    assert torch.cuda.memory_allocated() - before < one


def test_masters_are_pinned_and_unpinned():
    model = build("residual").requires_grad_(False)
    manager = OffloadTrainingManager(model, "cuda")
    stats = manager.stats()
    assert stats.pinned_bytes == stats.host_bytes > 0
    assert all(p.is_pinned() for p in model.parameters())
    manager.remove()
    assert not any(p.is_pinned() for p in model.parameters())
    manager = OffloadTrainingManager(model, "cuda")  # the same memory's neighbours can be pinned again
    assert all(p.is_pinned() for p in model.parameters())
    manager.remove()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", ["tied", "views", "batch norm", "plain subclass"])
def test_a_model_on_the_gpu_comes_back_there(name, on_host):
    model = build(name).cuda()
    model(inputs(0, "cuda")).sum().backward()
    before = {
        key: (id(t), t.detach().clone()) for key, t in [*model.named_parameters(), *model.named_buffers()]
    }
    kept = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    with OffloadTrainingManager(model, "cuda", on_host):
        homes = {p.device.type for p in model.parameters() if p.requires_grad}
        assert homes == {"cpu" if on_host else "cuda"}
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert id(tensor) == before[key][0] and tensor.is_cuda
        assert torch.equal(tensor, before[key][1])
    for key, p in model.named_parameters():
        if key in kept:
            assert p.grad.is_cuda and torch.equal(p.grad, kept[key])


def test_an_exception_and_a_retry_on_another_stream():
    plain, model = build("residual").cuda(), build("residual")
    manager = OffloadTrainingManager(model, "cuda", True)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5, device="cuda"))
    assert manager.resident_bytes == manager.resident_set_bytes
    stream = torch.cuda.Stream()
    for m in (plain, model):
        with torch.cuda.stream(stream):
            m(inputs(0, "cuda")).square().mean().backward()
        torch.cuda.synchronize()
    manager.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad.cpu(), 1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_an_exception_in_a_backward_leaves_nothing(checkpointing):
    model = build("residual", checkpointing)
    manager = OffloadTrainingManager(model, "cuda", True)

    def fail(gradient):
        raise ArithmeticError("stop")

    h = model.blocks[1](model.blocks[0](inputs(0, "cuda")))
    h.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model.blocks[3](model.blocks[2](h)).square().mean().backward()
    del h
    assert manager.resident_bytes == manager.resident_set_bytes
    model.zero_grad()
    model(inputs(0, "cuda")).square().mean().backward()
    manager.after_backward()
    plain = build("residual", checkpointing).cuda()
    plain(inputs(0, "cuda")).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad.cpu(), 1e-5)


def test_moving_the_managed_model_is_undone_by_the_engine():
    plain, model = build("batch norm").cuda().eval(), build("batch norm").eval()
    model.requires_grad_(False)
    with OffloadTrainingManager(model, "cuda") as manager:
        model.to("cuda")
        assert_close(model(inputs(0, "cuda")).detach(), plain(inputs(0, "cuda")).detach(), 1e-5)
        assert manager.resident_bytes == manager.resident_set_bytes
        assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(t.device.type == "cpu" for t in model.buffers())


def test_a_second_manager_and_a_graph_between():
    plain, model = build("residual").cuda(), build("residual")
    OffloadTrainingManager(model, "cuda", True)
    losses = [m(inputs(0, "cuda")).square().mean() for m in (plain, model)]
    second = OffloadTrainingManager(model, "cuda", True)
    for loss in losses:
        loss.backward()
    second.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad.cpu(), 1e-5)


def test_loading_and_stepping_use_the_host():
    model = build("residual")
    manager = OffloadTrainingManager(model, "cuda", True)
    model.load_state_dict(build("residual", seed=3).state_dict())
    plain = build("residual", seed=3).cuda()
    assert_close(model(inputs(0, "cuda")).detach().cpu(), plain(inputs(0, "cuda")).detach().cpu(), 1e-5)
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    manager.remove()


def test_an_absent_device_is_refused():
    with pytest.raises(RequestError, match="CUDA device"):
        OffloadTrainingManager(nn.Linear(WIDTH, WIDTH), f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("on_host", [False, True])
def test_out_of_memory_while_fetching_frees_the_cache_and_goes_on(monkeypatch, on_host):
    from comfyui_ferry.core.offload.transfer import CudaTransfer

    plain, model = build("residual").cuda(), build("residual")
    manager = OffloadTrainingManager(model, "cuda", on_host, recompute_cache_mb=1.0)
    allocate, state = CudaTransfer.allocate, {"calls": 0}

    def sometimes(self, nbytes):
        state["calls"] += 1
        if state["calls"] % 3 == 0:
            raise torch.OutOfMemoryError("none left")
        return allocate(self, nbytes)

    monkeypatch.setattr(CudaTransfer, "allocate", sometimes)
    for m in (plain, model):
        m(inputs(0, "cuda")).square().mean().backward()
    manager.after_backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad.cpu(), other.grad.cpu(), 1e-5)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("delays", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("finish", ["step", "next use"])
def test_overlapped_steps_and_staged_gradients(monkeypatch, delays, micro_batches, finish):
    """Late gradients: every sum and every step on the host must wait for its own arrival."""
    from comfyui_ferry.core.offload.transfer import CudaTransfer

    plain_send, rng = CudaTransfer.send_gradient, random.Random(0)

    def late_send(self, gradient, host):
        with torch.cuda.stream(self.gradient_stream):
            torch.cuda._sleep(rng.randrange(0, 2_000_000))
        return plain_send(self, gradient, host)

    if delays:
        monkeypatch.setattr(CudaTransfer, "send_gradient", late_send)
    plain, model = build("residual").cuda(), build("residual")
    manager = OffloadTrainingManager(model, "cuda", True)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)
        if m is model:
            manager.overlap_optimizer(optimizer, accumulation_steps=micro_batches, finish=finish)
        for step in range(4):
            for micro in range(micro_batches):
                m(inputs(step * micro_batches + micro, "cuda")).square().mean().backward()
            manager.after_backward()
            optimizer.step()
            optimizer.zero_grad()
    assert manager.stats().pinned_bytes == manager.stats().host_bytes
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach().cpu(), HOST_STEP_RTOL)


def test_stalls_are_timed(monkeypatch):
    """A copy held up for a known time is seen as waiting; the next step, with prompt copies, is not."""
    from comfyui_ferry.core.offload.transfer import CudaTransfer

    plain_start = CudaTransfer.start

    def late_start(self, source, destination, lease, **options):
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms
        plain_start(self, source, destination, lease, **options)

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    manager = OffloadTrainingManager(model, "cuda", True)
    x = torch.randn(8, 256, device="cuda")
    for delayed in (False, True):
        monkeypatch.setattr(CudaTransfer, "start", late_start if delayed else plain_start)
        model(x).square().mean().backward()
        manager.after_backward()
        stats = manager.stats()
        assert stats.last_step.stalled_s <= stats.last_step.step_s
    assert stats.num_steps == 2
    assert stats.last_step.stalled_s > 0.01 and stats.last_step.bound == "link-bound"


def test_layer_major_accumulation():
    from comfyui_ferry.core.offload import BlockSequence, backward_layer_major

    plain, model = build("residual").cuda(), build("residual")
    batches = [inputs(step, "cuda") for step in range(3)]
    for batch in batches:
        plain(batch).square().mean().backward()
    for on_host in (False, True):
        manager = OffloadTrainingManager(model, "cuda", on_host)
        sequence = BlockSequence(lambda x: x, list(model.blocks), lambda x, _: x.square().mean())
        moved = []
        for count in (1, 3):
            model.zero_grad()
            before = manager.stats().moved_to_target_bytes
            backward_layer_major(manager, sequence, batches[:count])
            manager.after_backward()
            moved.append(manager.stats().moved_to_target_bytes - before)
        # At most a block that is still there from the pass before is not copied again; nothing is offloaded
        # where all that is trained stays on the GPU.
        assert moved[0] <= moved[1] < 1.5 * moved[0] if on_host else moved == [0, 0]
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad.cpu(), other.grad.cpu(), 1e-5)
        manager.remove()
        model.zero_grad()


def test_out_of_memory_for_real_is_retried():
    """The whole card but a little is taken by a tensor that the first try's frames hold."""
    from comfyui_ferry.core.offload import retry_on_oom

    model = build("residual")
    manager = OffloadTrainingManager(model, "cuda", True)
    tries = []

    def step():
        tries.append(1)
        if len(tries) == 1:
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(int(0.6 * free), dtype=torch.uint8, device="cuda")
            torch.empty_like(hog)
        model(inputs(0, "cuda")).square().mean().backward()
        manager.after_backward()

    retry_on_oom(manager, step)
    assert len(tries) == 2
    assert all(p.grad is not None for p in model.parameters())
