from __future__ import annotations

import ast
import enum
import math
from pathlib import Path

import comfyui_ferry.core.workers as workers
import pytest
import torch
from comfyui_ferry.core.workers.decoding import decode
from comfyui_ferry.core.workers.protocol import PayloadEncoder
from comfyui_ferry.core.workers.shared_memory import SharedFile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def round_trip(value, *, copy=True):
    encoder = PayloadEncoder()
    content = encoder.encode(value, "payload")
    view = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(view)
    return decode(content, view, files=encoder.files, copy=copy)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**80),
        1.0,
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "\u00e9\u4e2d\U0001f600\ud800\x00",
        b"",
        bytes(range(256)),
        [],
        (),
        {},
        [1, [2.0, (3, "x")]],
        (1,),
        {"a": 1, 2: "b", None: (), (1, "t"): [], True: 0, 1.5: {}},
        {"x": {"t": 1}},
        torch.float8_e4m3fn,
        torch.device("cuda:1"),
        torch.device("cpu"),
        torch.Size([]),
        torch.Size([2, 3]),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_itself_with_its_type(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)
    assert repr(result) == repr(value)  # tells -0.0 from 0.0, True from 1


def test_nan_comes_back():
    assert math.isnan(round_trip({"x": [math.nan]})["x"][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_a_tensor_of_any_dtype_comes_back_bit_for_bit(dtype, shape):
    tensor = random_bits(dtype, shape)
    result = round_trip([tensor])[0]
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert bits(result) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.mT,
        lambda t: t[:, ::2],
        lambda t: t[1:2].expand(4, -1),
        lambda t: t[1, 1].expand(1),  # one element, stride 0: contiguous to PyTorch
        lambda t: t[1, 1:2].as_strided((1, 1), (0, 0)),
    ],
    ids=["transposed", "strided", "expanded", "broadcast", "broadcast twice"],
)
def test_a_view_arrives_contiguous_with_its_own_values(dtype, view):
    tensor = view(random_bits(dtype, (4, 6)))
    result = round_trip(tensor)
    assert result.is_contiguous()
    assert result.shape == tensor.shape
    assert bits(result) == bits(tensor)


def test_conjugated_and_negated_views_arrive_resolved():
    tensor = torch.randn(3, dtype=torch.complex64)
    results = round_trip([tensor.conj(), tensor.conj().imag])
    assert torch.equal(results[0], tensor.conj().resolve_conj())
    assert torch.equal(results[1], -tensor.imag)
    assert not results[0].is_conj()


def test_a_parameter_arrives_as_a_plain_tensor_without_gradient():
    result = round_trip(torch.nn.Parameter(torch.ones(2)))
    assert type(result) is torch.Tensor
    assert not result.requires_grad


def test_an_object_that_occurs_twice_is_written_once_and_is_one_object_again():
    tensor = torch.randn(1000)
    encoder = PayloadEncoder()
    content = encoder.encode({"a": tensor, "b": [tensor, tensor.clone()]}, "payload")
    assert encoder.size_bytes < 3 * tensor.nbytes
    view = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(view)
    result = decode(content, view)
    assert result["a"] is result["b"][0]
    assert result["a"] is not result["b"][1]


def test_payloads_of_several_ranks_share_one_copy_of_a_tensor():
    tensor = torch.randn(1000)
    encoder = PayloadEncoder()
    contents = [encoder.encode({"rank": rank, "x": tensor}, "payload") for rank in range(3)]
    assert encoder.size_bytes < 2 * tensor.nbytes
    view = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(view)
    for rank, content in enumerate(contents):
        result = decode(content, view)
        assert result["rank"] == rank
        assert torch.equal(result["x"], tensor)


def test_short_lived_objects_do_not_take_each_others_place():
    encoder = PayloadEncoder()
    contents = [encoder.encode(torch.full((4,), float(i)), "payload") for i in range(50)]
    view = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(view)
    assert [decode(content, view)[0].item() for content in contents] == [float(i) for i in range(50)]


def test_without_copy_tensors_are_views_and_with_copy_they_are_not():
    encoder = PayloadEncoder()
    content = encoder.encode(torch.zeros(4), "payload")
    view = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(view)
    borrowed, owned = decode(content, view, copy=False), decode(content, view)
    view.fill_(255)
    assert bits(borrowed) == b"\xff" * 16
    assert torch.equal(owned, torch.zeros(4))


def test_what_is_read_under_inference_mode_is_usable_under_autograd():
    with torch.inference_mode():
        result = round_trip(torch.ones(2))
    assert not result.is_inference()
    (result.requires_grad_() * 2).sum().backward()


class Colour(enum.IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), r"payload cannot"),
        (
            {"kwargs": {"transformer_options": {"foo": lambda: 0}}},
            r"payload\.kwargs\.transformer_options\.foo ",
        ),
        ({"a": [1, (2, {3})]}, r"payload\.a\[1\]\[1\] .*builtins\.set"),
        ({1: {"b": bytearray(b"x")}}, r"payload\[1\]\.b .*bytearray"),
        ([Colour.RED], r"payload\[0\] .*Colour"),
        ([torch.ones(2).as_subclass(Subclass)], r"payload\[0\] .*subclass, Subclass"),
        ([torch.empty(2, device="meta")], r"payload\[0\] .*meta tensor"),
        ([torch.eye(2).to_sparse()], r"payload\[0\] .*sparse"),
        ([torch.float32, torch.strided], r"payload\[1\] .*layout"),
    ],
)
def test_what_may_not_be_sent_is_refused_by_its_path(value, path):
    with pytest.raises(TypeError, match=path):
        PayloadEncoder().encode(value, "payload")


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(TypeError, match="nested deeper"):
        PayloadEncoder().encode(value, "payload")


def test_a_shared_file_goes_along_once():
    file = SharedFile.create("test", 100)
    result = round_trip({"a": file, "b": file})
    assert result["a"] is file
    assert result["b"] is file


def test_a_place_outside_the_buffer_is_refused():
    encoder = PayloadEncoder()
    content = encoder.encode(torch.zeros(100), "payload")
    with pytest.raises(ValueError, match="outside the message's buffer"):
        decode(content, torch.empty(64, dtype=torch.uint8))


def test_nothing_in_the_package_can_turn_a_message_into_code():
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
    calls = {"eval", "exec", "load", "broadcast_object_list", "all_gather_object", "scatter_object_list"}
    for file in Path(workers.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            assert not {name.split(".")[0] for name in names} & banned, file
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, file
            if isinstance(node, ast.Call):
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                assert called not in calls, f"{file}: {called}"
