from comfyui_ferry.core.errors import FerryError, RequestError


def test_a_request_error_says_what_the_limit_and_the_way_out():
    error = RequestError("gpus=5 was asked", limit="This machine has 2 GPUs.", way_out="Use 1 or 2")
    assert str(error) == "gpus=5 was asked. This machine has 2 GPUs. Use 1 or 2."
    assert isinstance(error, ValueError)
    assert isinstance(error, FerryError)
