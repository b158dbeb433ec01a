"""Turn a MODEL into one whose denoiser calls run on several GPUs.

The result is an ordinary MODEL: the sampler loop, noise, guidance, previews and progress stay in
ComfyUI. ``ParallelPatcher`` never moves the model's own weights; it loads and frees the workers'
copies when ComfyUI's memory manager asks it to.
"""

from __future__ import annotations

from typing import Any

import comfy.patcher_extension

from ..errors import RequestError
from ..parallel import ParallelDims, refuse_inputs, validate_model
from ..plans import find_plan
from .acceleration import check_acceleration
from .cfg_branches import BranchWrapper
from .devices import cluster_devices, worker_devices
from .model_export import class_path, describe_model
from .model_stream import release_stream, stream_of
from .parallel_run import ParallelRun
from .patch_messages import encode_patches
from .quantized_parts import check_sharing
from .remote_forward import RemoteInjection, sendable_options
from .remote_patcher import RemotePatcher
from .running_trainings import executing_node_id
from .text_layers import TextLayersInjection
from .worker_memory import worker_memory
from .worker_parts import denoiser_part
from .worker_room import StreamRequest

_KEY = "ferry_parallel"


def make_parallel(
    model: Any,
    *,
    gpus: int,
    cfg_degree: int,
    ulysses_degree: int,
    ring_degree: int = 1,
    tensor_parallel_degree: int = 1,
    ray_address: str = "",
    acceleration: str = "auto",
    batch_degree: int = 1,
) -> Any:
    """Return a clone of ``model`` that computes on ``gpus`` worker processes; starts none yet.

    Args:
        model: A ComfyUI MODEL (``ModelPatcher``).
        gpus: Number of GPUs, one process each.
        cfg_degree: Groups that evaluate different conditionings at the same time.
        ulysses_degree: GPUs that share one sequence (DeepSpeed-Ulysses, arXiv:2309.14509).
        ring_degree: Likewise (Ring Attention, arXiv:2310.01889); with both above 1 their product does.
        tensor_parallel_degree: GPUs that share the weights (Megatron-LM, arXiv:1909.08053).
        ray_address: ``host:port`` of a Ray cluster whose GPUs are meant, or ``auto``; "": this machine's.
        acceleration: A value of ``Acceleration``.
        batch_degree: Groups that evaluate different samples of a batch at the same time.

    Raises:
        RequestError: If the model, the number of GPUs, a degree or the acceleration is not supported.
    """
    dims, devices = check_degrees(
        gpus=gpus,
        cfg_degree=cfg_degree,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        tensor_parallel_degree=tensor_parallel_degree,
        ray_address=ray_address,
        batch_degree=batch_degree,
    )
    if isinstance(model, ParallelPatcher):
        raise RequestError(
            "a MODEL that is parallel already was given",
            limit="One MODEL has one set of degrees",
            way_out="Keep one Parallel Model or Parallel Sampler in the chain",
        )
    diffusion_model = model.model.diffusion_model
    request = _stream_request(model)
    release_stream(model)
    plan = find_plan(class_path(diffusion_model))
    check_sharing(diffusion_model, plan=plan, tensor_degree=dims.tp)
    validate_model(plan, diffusion_model, dims)
    chosen = check_acceleration(acceleration, devices)
    run = ParallelRun(
        dims,
        devices,
        node_id=executing_node_id(),
        request=request,
        ray_address=ray_address,
        acceleration=chosen,
    )
    parallel = attach_run(model, run, ParallelPatcher)
    parallel.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING, _KEY, _note_size)
    if dims.cfg > 1:
        wrapper = comfy.patcher_extension.WrappersMP.CALC_COND_BATCH
        parallel.add_wrapper_with_key(wrapper, _KEY, BranchWrapper(run))
    return parallel


def attach_run(model: Any, run: Any, patcher_class: type[ParallelPatcher]) -> Any:
    """Return a clone of ``model`` whose denoiser calls go to ``run.forward``.

    Raises:
        RequestError: If the model holds what cannot be sent there.
    """
    parallel = model.clone()
    # A clone through the base class keeps whatever subclass the loader made (dynamic VRAM), which
    # would move weights itself; the workers need none of that.
    parallel.__class__ = patcher_class
    parallel.attachments[_KEY] = run
    injection = RemoteInjection(run)
    injections = [injection, TextLayersInjection()]
    parallel.set_injections(
        _KEY, [comfy.patcher_extension.PatcherInjection(each.inject, each.eject) for each in injections]
    )
    check_supported(parallel)
    return parallel


def _stream_request(model: Any) -> StreamRequest:
    """Return what an offload node asked of the VRAM, which each worker keeps to.

    Raises:
        RequestError: If it asked for less host memory than the weights.
    """
    stream = stream_of(model.model)
    if stream is None:
        return StreamRequest()
    config = stream.streamer.pool.config
    if config.ram_limit_bytes is not None:
        raise RequestError(
            "a MODEL with a RAM budget was made parallel",
            limit="Workers read the weights from RAM that they share, so all of them must be there",
            way_out="Set the RAM budget of the offload node to 0",
        )
    return StreamRequest(config.vram_limit_bytes, config.prefetch_depth)


def _note_size(executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """PREPARE_SAMPLING wrapper: note what one evaluation will take, for the workers' VRAM.

    Raises:
        RequestError: If a conditioning holds what the model cannot take in parallel; no worker runs yet.
    """
    run = model.run
    if run.dims.sequence_size > 1:
        module = model.model.diffusion_model
        entries = [entry for each in conds.values() for entry in each]
        given = {name for entry in entries for name, value in entry.items() if value is not None}
        refuse_inputs(find_plan(class_path(module)), module, given)
    prompts = 1 if run.dims.cfg > 1 else 2  # ComfyUI evaluates both at once where there is room
    shape = [noise_shape[0] * prompts, *noise_shape[1:]]
    run.compute_bytes = int(model.model.memory_required(shape)) // (run.dims.ring * run.dims.ulysses)
    return executor(model, noise_shape, conds, *args, **kwargs)


def check_degrees(
    *,
    gpus: int,
    cfg_degree: int,
    ulysses_degree: int,
    ring_degree: int = 1,
    tensor_parallel_degree: int = 1,
    ray_address: str = "",
    batch_degree: int = 1,
) -> tuple[ParallelDims, tuple[str, ...]]:
    """Return degrees and devices if they fit this machine, or could fit a cluster (which is not asked yet).

    Raises:
        RequestError: Otherwise, with the numbers and what would fit.
    """
    degrees = {
        "cfg_degree": cfg_degree,
        "ulysses_degree": ulysses_degree,
        "ring_degree": ring_degree,
        "tensor_parallel_degree": tensor_parallel_degree,
        "batch_degree": batch_degree,
    }
    for name, value in {"gpus": gpus, **degrees}.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(
                f"{name}={value!r} was asked",
                limit="It is a number of GPUs, so a whole number",
                way_out="Type a number, or connect an INT",
            )
    devices = worker_devices(gpus) if ray_address == "" else cluster_devices(gpus, ray_address)
    dims = ParallelDims(
        cfg=cfg_degree,
        batch=batch_degree,
        tp=tensor_parallel_degree,
        ring=ring_degree,
        ulysses=ulysses_degree,
    )
    dims.validate(num_gpus=gpus)
    return dims, devices


def check_supported(patcher: ParallelPatcher) -> None:
    """Refuse what the workers could not honour, before any of them is started.

    Raises:
        RequestError: Naming the node's change to the model.
    """
    sendable_options(patcher.model_options.get("transformer_options", {}))
    describe_model(patcher.model)
    diffusion_model = patcher.model.diffusion_model
    plan = find_plan(class_path(diffusion_model))
    check_sharing(diffusion_model, plan=plan, tensor_degree=patcher.run.dims.tp)
    encode_patches(patcher.patches)
    foreign = [key for key in patcher.injections if key != _KEY]
    compiled = patcher.model_options.get("torch_compile_kwargs") or {}
    objects = [key for key in patcher.object_patches if key.startswith("diffusion_model")]
    for what, names in (
        ("injections", foreign),
        ("object patches", objects),
        ("weight wrappers", list(patcher.weight_wrapper_patches)),
        ("copies for other GPUs (MultiGPU CFG Split)", patcher.additional_models.get("multigpu", [])),
        ("torch.compile", [compiled.get("backend")] if compiled else []),
    ):
        if names:
            raise RequestError(
                f"a node gave this model {what}: {_names(names)}",
                limit="They live in this process and the workers would compute without them",
                way_out="Remove that node (workers compile by the parallel node's own acceleration), "
                "or sample with a stock KSampler",
            )


def _names(values: list) -> str:
    return ", ".join(value if isinstance(value, str) else type(value).__name__ for value in values)


class ParallelPatcher(RemotePatcher):
    """A ``ModelPatcher`` whose weights live in worker processes."""

    @property
    def run(self) -> ParallelRun:
        """What this patcher shares with its clones."""
        return self.attachments[_KEY]

    def get_nested_additional_models(self) -> list:
        """Return what ComfyUI loads together with this MODEL; the workers' copy is one of them."""
        entry = worker_memory(denoiser_part(self.model, self.run.dims), self)
        return [*super().get_nested_additional_models(), entry]

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load the workers instead of this process; called by ComfyUI before every sampling.

        Returns:
            0: this process gained no bytes.
        """
        if force_patch_weights:
            raise RequestError(
                "saving a parallel MODEL was asked",
                limit="Its patched weights live in the workers",
                way_out="Connect the saving node before Parallel Model",
            )
        release_stream(self)
        check_supported(self)
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            self._give_back_local_weights()
            self.patch_model(load_weights=False)
        self.run.load(self.model, self.patches, self.patches_uuid, force_cast=self.force_cast_weights)
        return 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Undo object patches; no weight of this process was patched."""
        super().unpatch_model(None, unpatch_weights=False)

    def cleanup(self) -> None:
        """Let go of one sampling's prompts; called by ComfyUI after it."""
        super().cleanup()
        self.run.end_sampling()

    def register_all_hook_patches(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse conditionings that bring their own weights (LoRA hooks)."""
        registered = super().register_all_hook_patches(*args, **kwargs)
        if self.hook_patches:
            raise RequestError(
                "a conditioning with hooked weights (Create Hook LoRA / Model as LoRA) was given",
                limit="Workers keep one set of weights during a sampling",
                way_out="Apply the LoRA to the MODEL, or sample with a stock KSampler",
            )
        return registered

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse ComfyUI's own MultiGPU split of a model that is split already."""
        raise RuntimeError("This MODEL is parallel already (ComfyUI-Ferry). Remove the MultiGPU node.")

    def _give_back_local_weights(self) -> None:
        """Bring the model's own weights back to the host, unpatched, if ComfyUI loaded them before."""
        base = super()
        if self.model.model_loaded_weight_memory or self.model.current_weight_patches_uuid is not None:
            base.unpatch_model(self.offload_device, unpatch_weights=True)
        else:
            base.unpatch_model(None, unpatch_weights=False)
