"""Frames come at the asked rate, whatever the file's own is."""

from __future__ import annotations

import io

import numpy
import pytest
from comfyui_ferry.core.training.dataset import UnreadablePictureError
from comfyui_ferry.core.training.dataset.videos import decode_frames

av = pytest.importorskip("av")


def video(num_frames, rate_hz):
    """A video whose frame ``i`` has the brightness ``8 i``."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate_hz)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for index in range(num_frames):
            pixels = numpy.full((16, 32, 3), 8 * index, numpy.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def shown(content, **options):
    frames = decode_frames(content, **options)
    assert frames.shape[1:] == (16, 32, 3)
    return [round(float(frame.mean()) * 255 / 8) for frame in frames]


def test_the_rate_decides_which_frames_are_taken():
    content = video(24, 24)
    assert shown(content, num_frames=5, rate_hz=0) == [0, 1, 2, 3, 4]
    assert shown(content, num_frames=6, rate_hz=12) == [0, 2, 4, 6, 8, 10]
    assert shown(content, num_frames=4, rate_hz=16) == [0, 1, 3, 4]
    assert shown(video(6, 8), num_frames=5, rate_hz=16) == [0, 0, 1, 1, 2]


def test_a_video_that_changes_its_size_is_refused():
    parts = []
    for width in (32, 48):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mpeg2video") as container:
            stream = container.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = width, 32, "yuv420p"
            for _ in range(4):
                pixels = numpy.zeros((32, width, 3), numpy.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        parts.append(buffer.getvalue())
    with pytest.raises(UnreadablePictureError, match=r"changes its size from \(32, 32\) to \(48, 32\)"):
        decode_frames(b"".join(parts), num_frames=8, rate_hz=0)


def test_a_video_that_is_too_short_is_refused():
    assert len(shown(video(8, 8), num_frames=8, rate_hz=0)) == 8
    assert len(shown(video(8, 8), num_frames=16, rate_hz=16)) == 16
    with pytest.raises(UnreadablePictureError, match="has 16 frames at 16 frames a second, fewer than 17"):
        decode_frames(video(8, 8), num_frames=17, rate_hz=16)
    with pytest.raises(UnreadablePictureError, match="cannot be read"):
        decode_frames(b"nothing", num_frames=1, rate_hz=0)
