"""Replay checkpointed blocks as CUDA graphs, so that the host need not launch their kernels one by one.

A training step of a large model at an ordinary resolution is thousands of small kernels; launching them
takes the host longer than running them takes the GPU, and a link that streams weights waits as well.
Every block of a checkpointed model runs twice forward and once backward in a step, with nothing in
between, and equal blocks do equal work. So a few recordings serve all of them: one for each place that
blocks' weights come to, see ``block_recording``.

A block's first call in a backward is watched (``block_reads``), its second is recorded, or meets a
recording made by another block, and proves it: outputs must be equal bit for bit to the block's own, and
gradients but for the order in which kernels add. What cannot be recorded runs as it is; ``obstacles`` says
why. The numbers are those of the block's own kernels in any case.

Limits: between steps a block's code, hooks and adapters stay as they are; ``clear`` after a change.
Recordings keep the memory of one block's activations for each shape of the inputs, at most eight shapes.

What this module does not do: it neither checkpoints nor moves weights; it is installed inside of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from ..log import get_logger
from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from .block_call import BlockCall
from .block_checkpointing import wanted_outputs
from .block_reads import watch_call
from .block_recording import BlockRecording, CudaGraphRecorder, Recorder, Signature, StaticMemory
from .replayed_block import Replay, ReplayedBlock, SeenCall, compute
from .targets import Block

_HOOK = "recorded"
_MAX_SIGNATURES = 8
# Calls that never come again; a block that makes so many is called with something new every time.
_MAX_SEEN = 32

_log = get_logger("training")


class RecordedBlocks:
    """Recordings of a model's checkpointed blocks.

    Args:
        blocks: Each of them runs within a backward only as a recomputation whose own backward follows at
            once, as ``BlockCheckpointing`` has it.
        device: Where they compute.
        recorder: Records; None: CUDA graphs.

    Attributes:
        is_active: Whether calls are looked at at all.
        may_record: Whether to record; while it is False, new calls are watched and nothing else.
        num_replays: Forwards that were replayed.
    """

    def __init__(
        self, blocks: Sequence[Block], device: torch.device | str, *, recorder: Recorder | None = None
    ) -> None:
        self.blocks = list(blocks)
        self.device = _with_index(torch.device(device))
        self.is_active = True
        self.may_record = True
        self.num_replays = 0
        self._make_recorder: Callable[[], Recorder] = (lambda: recorder) if recorder else CudaGraphRecorder
        self._recorder = self._make_recorder()
        self._memories: dict[Signature, StaticMemory] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._recordings: OrderedDict[tuple, BlockRecording] = OrderedDict()
        self._hooks: list[_RecordHook] = []
        self._turn = 0
        self._pool_seen = 0, 0

    def install(self) -> None:
        """Hook the blocks; after whatever moves their weights and before what rewrites them."""
        for block in self.blocks:
            hook = _RecordHook(self, block)
            install_hook(block.module, _HOOK, hook)
            self._hooks.append(hook)

    def remove(self) -> None:
        """Take the hooks off and give the recordings' memory back."""
        for hook in self._hooks:
            remove_hook(hook.block.module, _HOOK)
        self.clear()
        self._hooks.clear()

    def stop(self) -> bool:
        """Give all memory back and record nothing any more; return whether there was some."""
        had_some = bool(self._recordings or self._places)
        self.is_active = False
        self.clear()
        return had_some

    def clear(self) -> None:
        """Forget everything that was recorded and seen."""
        for hook in self._hooks:
            hook.seen.clear()
            hook.by_forward.clear()
        self._recordings.clear()
        self._memories.clear()
        self._places.clear()
        self._recorder = self._make_recorder()
        self._pool_seen = 0, 0

    @property
    def obstacles(self) -> dict[str, str]:
        """Why blocks are not recorded, by their path; of those that were called at least once."""
        found = {}
        for hook in self._hooks:
            for seen in hook.seen.values():
                if seen.reads.obstacle:
                    found[hook.block.path] = seen.reads.obstacle
        return found

    @property
    def needed_bytes(self) -> int:
        """Device memory that recording takes besides what the training takes without, from what was seen.

        Blocks of one kind share it; what those of another kind need has other sizes, and comes on top.
        """
        needed: dict[type, int] = {}
        for hook in self._hooks:
            found = (seen.reads.needed_bytes for seen in hook.seen.values() if not seen.reads.obstacle)
            kind = type(hook.block.module)
            needed[kind] = max(needed.get(kind, 0), *found, 0)
        return sum(needed.values())

    @property
    def pool_bytes(self) -> int:
        """Device memory that recordings keep for their kernels' results."""
        if isinstance(self._recorder, CudaGraphRecorder):
            if self._pool_seen[0] != len(self._recordings):
                self._pool_seen = len(self._recordings), self._recorder.pool_bytes()
            return self._pool_seen[1]
        return 0

    @property
    def num_recordings(self) -> int:
        """How many recordings there are."""
        return len(self._recordings)

    def call(self, hook: _RecordHook, call: BlockCall) -> Any:
        """Make a block's call, replayed if it can be."""
        if not torch.is_grad_enabled():
            return self._call_without_gradients(hook, call)
        wanted = wanted_outputs()
        if wanted is None:
            return call.run()  # the backward of this call is not the next thing to come
        seen = hook.seen.get((call.key, call.needs_gradient, wanted))
        if seen is None or not seen.is_current():
            return self._watch(hook, call, wanted)
        if seen.reads.obstacle or not self.may_record:
            return call.run()
        provided = seen.provided_for(call)
        recording = None if provided is None else self._recording_for(hook, seen, call)
        if recording is None or provided is None:
            return call.run()
        if recording not in seen.proven:
            if not self._prove(hook, seen, recording, call, provided):
                return call.run()
            seen.proven.add(recording)
        seen.load(recording, call, provided)
        replay = Replay(self, hook, seen, recording, call)
        return recording.join_outputs(ReplayedBlock.apply(replay, *replay.differentiable()))

    def _call_without_gradients(self, hook: _RecordHook, call: BlockCall) -> Any:
        seen = hook.by_forward.get(call.key)
        if seen is None or seen.reads.obstacle or not seen.is_current():
            return call.run()
        recording = self._recordings.get((seen.signature, seen.reads.addresses()))
        provided = seen.provided_for(call)
        if recording is None or provided is None or recording not in seen.proven:
            return call.run()
        seen.load(recording, call, provided)
        return recording.join_outputs([output.clone() for output in self.replay_forward(recording)])

    def replay_forward(self, recording: BlockRecording) -> list[Tensor]:
        """Replay a forward; what earlier ones kept for their backwards is overwritten."""
        self._turn += 1
        self.num_replays += 1
        return recording.replay_forward()

    @property
    def turn(self) -> int:
        """The number of the last replayed forward."""
        return self._turn

    def _watch(self, hook: _RecordHook, call: BlockCall, wanted: tuple[bool, ...]) -> Any:
        if len(hook.seen) >= _MAX_SEEN:
            return call.run()
        output, reads = watch_call(call.run, hook.block.module, call.tensors, device=self.device)
        seen = SeenCall(reads, call, wanted)
        hook.seen[call.key, call.needs_gradient, wanted] = seen
        hook.by_forward[call.key] = seen
        if reads.obstacle:
            self._note_obstacle(hook, seen, reads.obstacle)
        return output

    def _recording_for(self, hook: _RecordHook, seen: SeenCall, call: BlockCall) -> BlockRecording | None:
        """Return the recording for the place where the block's weights are now, made now if need be."""
        key = seen.signature, seen.reads.addresses()
        recording = self._recordings.get(key)
        if recording is not None:
            self._recordings.move_to_end(key)
            return recording
        try:
            recording = self._record(hook, seen, call)
        except (RuntimeError, TrainingError) as error:
            self._recorder = self._make_recorder()  # a recording that failed spoils its pool
            self._note_obstacle(hook, seen, f"recording it failed ({str(error).splitlines()[0]})")
            return None
        if recording is not None:
            self._recordings[key] = recording
            # Streamed blocks take turns in a few places; those that stay have one each.
            while len(self._recordings) > _MAX_SIGNATURES * (len(self.blocks) + 8):
                self._recordings.popitem(last=False)
        return recording

    def _record(self, hook: _RecordHook, seen: SeenCall, call: BlockCall) -> BlockRecording | None:
        memory = self._memories.get(seen.signature)
        if memory is None:
            if len(self._memories) >= _MAX_SIGNATURES:
                self._note_obstacle(hook, seen, f"there are recordings for {_MAX_SIGNATURES} shapes already")
                return None
            with torch.enable_grad():
                outputs = call.output_tensors(call.run_on(call.detached()))
            memory = StaticMemory(seen.signature, call.tensors, seen.reads, outputs, self._places)
            del outputs
        recording = BlockRecording(memory, call.needs_gradient)
        recording.record(call.run_on, seen.reads.trained, self._recorder)
        self._memories[seen.signature] = memory
        return recording

    def _prove(
        self,
        hook: _RecordHook,
        seen: SeenCall,
        recording: BlockRecording,
        call: BlockCall,
        provided: list[Tensor],
    ) -> bool:
        """Compare a replay with the block itself; a difference is an obstacle, for good."""
        expected = compute(call, seen, recording)
        if expected is None:
            return False  # nothing to compare with; the next call is as good
        seen.load(recording, call, provided)
        difference = expected.difference(self.replay_forward(recording), recording)
        if difference:
            self._note_obstacle(hook, seen, f"its replay differs from the block itself: {difference}")
        return not difference

    def _note_obstacle(self, hook: _RecordHook, seen: SeenCall, text: str) -> None:
        seen.reads.obstacle = text
        _log.info("the block %s is not recorded as a CUDA graph: %s", hook.block.path, text)


class _RecordHook(ModuleHook):
    def __init__(self, owner: RecordedBlocks, block: Block) -> None:
        self.owner = owner
        self.block = block
        self.seen: dict[Any, SeenCall] = {}
        self.by_forward: dict[Any, SeenCall] = {}
        self.is_bypassed = False

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        owner = self.owner
        if self.is_bypassed or not owner.is_active:
            return forward(*args, **kwargs)
        call = BlockCall.of(forward, module, (args, kwargs), device=owner.device)
        return forward(*args, **kwargs) if call is None else owner.call(self, call)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
