"""Models that offloading has to get right, and one way to train each with and without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
BATCH = 4


class Stack(nn.Module):
    """Blocks in a row, each checkpointed or not."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Orphans(nn.Module):
    """Parameters and buffers of its own besides children; called by keyword only, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
        self.inner = Residual()

    def forward(self, *, x):
        return {"out": [self.inner(x) * self.scale + self.shift + self.hidden]}


class CallsOrphans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.orphans = Orphans()

    def forward(self, x):
        return self.orphans(x=x)["out"][0]


@dataclass
class Output:
    sample: torch.Tensor
    extras: dict = field(default_factory=dict)


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states=None):
        return Output(self.proj(input=hidden_states))


class CallsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsDataclass()

    def forward(self, x):
        return self.inner(hidden_states=x).sample


class InPlace(nn.Module):
    """Adds to its stream in place, as Flux blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gate", torch.randn(WIDTH))

    def forward(self, x):
        img = x + 0
        img += self.gate * self.attention(x)
        img += self.mlp(torch.tanh(img + 0))
        return img


class Modulated(nn.Module):
    """A frozen layer whose input has no gradient, beside a trainable adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        shift, scale = self.modulation(torch.ones(1, WIDTH, device=x.device)).chunk(2, dim=-1)
        h = x * (1 + scale) + shift
        return x + self.base(h) + self.up(self.down(h))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x[None], x[None], x[None])[0][0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return x + self.lstm(x[:, None])[0][:, 0]


class Convolution(nn.Module):
    """Batch normalisation writes its running statistics without telling anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x):
        return x + self.instance(self.norm(self.conv(x[:, None]))).mean(1)


class Tied(nn.Module):
    """One weight in an embedding and a head; the same module twice; the same parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.once = nn.Linear(WIDTH, WIDTH)
        self.again = self.once
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.once.bias

    def forward(self, x):
        tokens = torch.arange(x.shape[0], device=x.device) % 7
        h = self.again(self.once(x + self.embedding(tokens)))
        return x + self.other(h) + self.embedding(self.head(h).argmax(-1))


class Views(nn.Module):
    """Buffers and a parameter that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3 * WIDTH)
        self.register_buffer("first", flat[:WIDTH])
        self.register_buffer("overlap", flat[WIDTH // 2 : WIDTH // 2 + WIDTH])
        self.register_buffer("strided", flat[::3])
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.register_buffer("expanded", torch.randn(1).expand(WIDTH))

    def forward(self, x):
        total = self.first + self.overlap + self.strided + self.expanded + self.empty.sum()
        return x + 0.01 * (x @ self.transposed * total)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})

    def forward(self, x):
        for weight in self.weights:
            x = x + x @ weight
        return x * self.named["a"] + sum(self.named.values())


class ReadsChild(nn.Module):
    """Reads its children's tensors, also in another method."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def normalise(self, x):
        return F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias) * self.gain

    def forward(self, x):
        return x + F.linear(self.normalise(x), self.child.weight.t().contiguous().t(), self.child.bias)


class ReturnsParameter(nn.Module):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(WIDTH))

        def forward(self):
            return self.position

    def __init__(self) -> None:
        super().__init__()
        self.holder = ReturnsParameter.Holder()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        position = self.holder()
        return self.proj(x + position) * position


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.old(torch.tanh(self.new(x)))


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.complex_weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)

    def forward(self, x):
        return _Scale.apply(x, self.weight) + (x * self.complex_weight.conj()).real


class Int8Weight(torch.Tensor):
    """A traceable wrapper subclass: int8 values and a scale that pose as a float weight."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device, strides=values.stride()
        )

    def __init__(self, values, scale) -> None:
        self.values = values
        self.scale = scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int8Weight(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int8Weight(args[0].values, args[0].scale)
        if func is torch.ops.aten.clone.default:
            return Int8Weight(args[0].values.clone(), args[0].scale.clone())
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return Int8Weight(args[0].values.to(device), args[0].scale.to(device))
        plain = torch.utils._pytree.tree_map_only(
            Int8Weight, lambda t: t.values * t.scale, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
        weight = Int8Weight(values, torch.rand(WIDTH, 1) / 127)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("codes", torch.randint(-5, 5, (WIDTH,), dtype=torch.int8))
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.linear(x, self.weight) + self.adapter(x) * self.codes


class TaggedParameter(nn.Parameter):
    """A plain subclass with an attribute of its own, as GGUF loaders use."""

    tag = "kept"


class PlainSubclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = TaggedParameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(x @ self.weight)


class Counter(nn.Module):
    """Writes to its buffers: in place, and by putting a new tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.count += 1
        self.mean.lerp_(x.detach().mean(0).expand(WIDTH, WIDTH), 0.1)
        y = self.proj(x) + self.mean[0] + self.last
        self.last = y.detach().mean(0)
        return y


class Dtypes(nn.Module):
    """A buffer of every kind of element."""

    KINDS = (
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
        torch.int64,
        torch.uint8,
        torch.float16,
        torch.float64,
        torch.complex128,
    )

    def __init__(self) -> None:
        super().__init__()
        for kind in self.KINDS:
            self.register_buffer(f"of_{kind}".replace(".", "_"), torch.rand(5).mul(3).to(kind))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        total = sum(
            getattr(self, f"of_{kind}".replace(".", "_")).to(torch.complex128).real for kind in self.KINDS
        )
        return self.proj(x) + total.sum().float() / 50


CASES: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "orphans, keyword-only, dict": CallsOrphans,
    "dataclass": CallsDataclass,
    "in-place": InPlace,
    "modulated adapter": Modulated,
    "multi-head attention": Attention,
    "encoder layer": Encoder,
    "lstm": Recurrent,
    "batch norm": Convolution,
    "tied": Tied,
    "views": Views,
    "parameter list and dict": Lists,
    "reads child": ReadsChild,
    "returns parameter": ReturnsParameter,
    "parametrized": Parametrized,
    "custom function": CustomFunction,
    "wrapper subclass": Quantized,
    "plain subclass": PlainSubclass,
    "writes buffers": Counter,
    "dtypes": Dtypes,
}


def build(name: str, checkpointing: str = "none", seed: int = 0) -> Stack:
    """Two blocks of the case between two plain layers."""
    torch.manual_seed(seed)
    make = CASES[name]
    model = Stack(nn.Linear(WIDTH, WIDTH), make(), make(), nn.Linear(WIDTH, WIDTH))
    model.checkpointing = checkpointing
    return model


@dataclass
class Run:
    """What a training run produced, on the CPU."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def inputs(step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(BATCH, WIDTH, generator=generator).to(device).requires_grad_()


def train(
    model: nn.Module,
    manager: Any = None,
    *,
    optimizer: str = "AdamW",
    steps: int = 3,
    micro_batches: int = 1,
    device: torch.device | str = "cpu",
    after_each_backward: Callable[[], None] | None = None,
) -> Run:
    """Train and record; ``manager`` is an attached manager or None.

    AdamW uses its fused kernel everywhere: gradients that are all rounding error (of a bias before a
    normalisation) turn another rounding into another sign of its step.
    """
    run = Run()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = {"fused": True} if optimizer == "AdamW" else {}
    stepper = getattr(torch.optim, optimizer)(trainable.values(), lr=1e-2, **options)
    for step in range(steps):
        for micro in range(micro_batches):
            loss = model(inputs(step * micro_batches + micro, device)).square().mean()
            loss.backward()
            run.losses.append(loss.detach().cpu())
            if after_each_backward is not None:
                after_each_backward()
        if manager is not None:
            manager.after_backward()
        run.gradients.append(
            {name: p.grad.detach().cpu().clone() for name, p in trainable.items() if p.grad is not None}
        )
        stepper.step()
        stepper.zero_grad()
    run.state = {name: dequantized(value) for name, value in model.state_dict().items()}
    return run


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Int8Weight):
        return (tensor.values * tensor.scale).cpu()
    return tensor.detach().cpu().clone()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-6) -> None:
    """Largest difference relative to the largest entry: a sum in another order moves the last bit only."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if expected.numel() and (expected.is_floating_point() or expected.is_complex()):
        wide = torch.complex128 if expected.is_complex() else torch.float64
        actual, expected = actual.to(wide), expected.to(wide)
        assert expected.isfinite().all()
        difference = (actual - expected).abs().max().item()
        assert difference <= rtol * max(expected.abs().max().item(), 1e-30), difference
    else:
        assert torch.equal(actual, expected)


def assert_same_run(actual: Run, expected: Run, rtol: float = 1e-6) -> None:
    """Losses, gradients of every step and the final state agree."""
    for mine, other in zip(actual.losses, expected.losses, strict=True):
        assert_close(mine, other, rtol)
    for mine, other in zip(actual.gradients, expected.gradients, strict=True):
        assert mine.keys() == other.keys()
        for name in other:
            assert_close(mine[name], other[name], rtol)
    assert actual.state.keys() == expected.state.keys()
    for name in expected.state:
        assert_close(actual.state[name], expected.state[name], rtol)
