from __future__ import annotations

from pathlib import Path

from comfyui_ferry.core.workers.report import RankReport, compose, describe_exit, log_tail


def report(rank: int, tmp_path: Path, **changes) -> RankReport:
    return RankReport(rank, "cpu", 1000 + rank, tmp_path / f"rank{rank}.log", **changes)


def test_the_rank_that_died_is_blamed_before_those_that_raised_because_of_it(tmp_path):
    reports = [
        report(1, tmp_path, raised="RuntimeError: Connection closed by peer", traceback="Traceback one"),
        report(0, tmp_path, ended=describe_exit(-9)),
    ]
    text = compose(None, reports, [])
    assert text.startswith("worker rank 0 was killed by SIGKILL")
    assert text.index("--- rank 0") < text.index("--- rank 1") < text.index("Traceback one")


def test_a_noticed_cause_comes_first_and_every_log_is_shown(tmp_path):
    (tmp_path / "rank0.log").write_text("\n".join(f"line {i}" for i in range(200)))
    text = compose("job 'x' was late", [report(0, tmp_path, stacks_dumped=True)], [])
    assert text.startswith("job 'x' was late. ")
    assert "was still running and has been ended; its stacks are in its log below" in text
    assert "line 199" in text
    assert "line 100" not in text


def test_exits_are_named():
    assert describe_exit(7) == "exited with code 7"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert "memory runs out" in describe_exit(-9)
    assert describe_exit(None) == "closed its connection"


def test_a_log_that_is_gone_or_not_text_is_no_error(tmp_path):
    assert log_tail(tmp_path / "none.log") == ""
    (tmp_path / "bytes.log").write_bytes(b"\xff\xfe ok")
    assert log_tail(tmp_path / "bytes.log").endswith("ok")
