"""What runs is listed while it runs; requests arrive once; progress goes out as plain values."""

from __future__ import annotations

import json
import threading

import pytest
from comfyui_ferry.core.errors import RequestError

pytestmark = pytest.mark.comfy


@pytest.fixture
def trainings():
    from comfyui_ferry.core.comfy_adapter import running_trainings

    return running_trainings


def test_it_is_listed_while_it_runs(trainings):
    training = trainings.RunningTraining("p1", "7", steps=5)
    with pytest.raises(KeyError), trainings.registered(training):
        assert trainings.find_training("p1") is training
        assert trainings.running_trainings() == [training]
        raise KeyError
    assert trainings.find_training("p1") is None


def test_requests_from_other_threads_are_taken_once(trainings):
    training = trainings.RunningTraining("p1", None, steps=5)
    threads = [threading.Thread(target=training.ask, args=(name,)) for name in ("save", "stop", "save")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert training.take() == {"save", "stop"}
    assert training.take() == set()
    with pytest.raises(RequestError, match="delete"):
        training.ask("delete")


def test_progress_goes_out_at_most_a_few_times_a_second(trainings, monkeypatch):
    sent = []
    monkeypatch.setattr(trainings, "send_event", lambda event, data: sent.append((event, json.dumps(data))))
    training = trainings.RunningTraining("p1", "7", steps=99)
    for step in range(50):
        training.tell(trainings.TrainingProgress(step, 99, loss=0.5))
    assert len(sent) < 5
    training.tell(trainings.TrainingProgress(99, 99), now=True)
    event, data = sent[-1]
    assert event == "ferry.training"
    message = json.loads(data)
    assert (message["prompt_id"], message["node_id"], message["step"]) == ("p1", "7", 99)
