"""titan-ft with torchft's own lighthouse and managers: replicas are `titan train` processes, on CPUs."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported

from torchft.coordination import LighthouseServer

from tests.run.conftest import Command, Finished, furnish, losses
from titan_ft import loop
from titan_ft.replicas import BUCKET_BYTES, buckets, fingerprint, had_company
from titan_ft.replicas import Replicas as ReplicasOfOne
from titan_ft.replicas import lighthouse as lighthouse_address
from titan_ft.transport import SafeTransport, packed, unpacked
from titan_testing import check_plugin
from titancli import TitanError

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield server.address().replace(socket.gethostname(), "localhost")
    server.shutdown()


class Replicas:
    """Starts replicas in one folder."""

    def __init__(self, here: Path, lighthouse: str) -> None:
        self.here = here
        self.lighthouse = lighthouse
        self.running: list[Command] = []

    def start(self, replica: int, *more: str, run: str | None = None) -> Command:
        folder = run or f"r{replica}"
        (self.here / "out" / folder).mkdir(parents=True, exist_ok=True)
        loop = ["loop.type=ft", "--env", f"TORCHFT_LIGHTHOUSE={self.lighthouse}", "loop.replicas=2"]
        (self.here / "tiny.toml").exists() or furnish(self.here)
        command = Command(
            self.here / "out" / folder,
            str(self.here / "tiny.toml"),
            *(f"dataset.paths={json.dumps([str(self.here / 'text.txt')])}", "--resume"),
            *(*loop, f"loop.replica={replica}", "--run-dir", str(self.here / folder), *more),
        )
        self.running.append(command)
        return command

    def run(self, replica: int) -> Path:
        return self.here / f"r{replica}"


@pytest.fixture
def replicas(tmp_path: Path, lighthouse: str) -> Iterator[Replicas]:
    started = Replicas(tmp_path, lighthouse)
    yield started
    for command in started.running:
        command.process.kill()
        command.process.wait()


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step}"
    return {f"{file.name} {name}": value for file in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(file).items()}  # fmt: skip


def assert_equal(replicas: Replicas, step: int) -> None:
    """All that two replicas have is equal, bit for bit."""
    a, b = (weights(replicas.run(number), step) for number in (0, 1))
    assert a.keys() == b.keys() and a
    assert all(torch.equal(a[name], b[name]) for name in a)


def finished(command: Command) -> Finished:
    done = command.wait()
    assert done.code == 0, done.err
    return done


def test_the_plugin_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    check_plugin("titan-ft")


def slowly(replicas: Replicas) -> list[str]:
    """Words for replicas that take their time: 40 steps, in which others come and go."""
    furnish(replicas.here)
    faulty = ["-p", str(replicas.here / "faulty.py"), "loss.type=faulty", "loss.sleep=0.15"]
    return [*faulty, "training.steps=40"]


@pytest.mark.slow  # two engines in one process: tests/engine/test_replicas.py
def test_two_replicas_are_one_run_with_twice_the_rows(replicas: Replicas) -> None:
    commands = [replicas.start(number, "loop.min_replicas=2") for number in (0, 1)]
    for command in commands:
        finished(command)
    assert_equal(replicas, 6)
    plain = Command(
        replicas.here, "tiny.toml", "--run-dir", "plain", "training.global_batch_size=4", "mesh.dp_shard=1"
    )
    finished(plain)
    one, both = losses(replicas.here / "plain"), losses(replicas.run(0))
    assert both == pytest.approx(one, rel=1e-5) and len(both) == 6
    reference, found = weights(replicas.here / "plain", 6), weights(replicas.run(0), 6)
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        if name.partition(" ")[2].startswith("model."):
            assert (found[name] - value).norm() <= 1e-4 * value.norm(), name
    manifests = [
        json.loads((run / "checkpoints" / "step-6" / "manifest.json").read_text())["state"]
        for run in (replicas.here / "plain", replicas.run(0), replicas.run(1))
    ]
    assert manifests[0]["data"] == manifests[1]["data"] == manifests[2]["data"]
    assert [state["engine"]["tokens_seen"] for state in manifests] == [6 * 4 * 32] * 3


def test_one_is_killed_and_comes_back(replicas: Replicas) -> None:
    slow = slowly(replicas)
    first, second = (replicas.start(number, *slow) for number in (0, 1))
    second.until_step(replicas.run(1) / "events.jsonl", 4)
    second.process.send_signal(signal.SIGKILL)
    second.wait()
    at = max(losses(replicas.run(1)))
    first.until_step(replicas.run(0) / "events.jsonl", at + 3)
    finished(replicas.start(1, *slow))
    finished(first)
    events = [json.loads(line) for line in (replicas.run(0) / "events.jsonl").read_text().splitlines()]
    there = {event["step"]: event["metrics"]["replicas"] for event in events if event["event"] == "step"}
    steps = [event["step"] for event in events if event["event"] == "step"]
    # Each step once, whatever happened; the other one may have begun before it.
    assert steps == list(range(steps[0], 41)) and steps[0] < at
    assert there[40] == 2 and there[at + 2] == 1
    again = losses(replicas.run(1))
    missed = {step for step in losses(replicas.run(0)) if step > at} - set(again)
    assert missed and missed == set(range(at + 1, max(missed) + 1))
    assert_equal(replicas, 40)


@pytest.mark.slow  # more gently than test_one_is_killed_and_comes_back
def test_one_is_stopped_and_resumed(replicas: Replicas) -> None:
    slow = slowly(replicas)
    first, second = (replicas.start(number, *slow) for number in (0, 1))
    first.until_step(replicas.run(0) / "events.jsonl", 3)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait().code == 75
    for command in (replicas.start(0, *slow), second):
        finished(command)
    assert_equal(replicas, 40)


@pytest.mark.slow  # the same with one rank each: test_one_is_killed_and_comes_back
def test_replicas_of_several_ranks(replicas: Replicas) -> None:
    slow = slowly(replicas)
    first, second = (replicas.start(number, *slow, "--nproc", "2") for number in (0, 1))
    second.until_step(replicas.run(1) / "events.jsonl", 4)
    second.process.send_signal(signal.SIGKILL)
    second.wait()
    finished(replicas.start(1, *slow, "--nproc", "2"))
    finished(first)
    assert_equal(replicas, 40)


@pytest.mark.slow  # see test_what_all_have_is_compared
def test_replicas_that_do_not_fit_are_refused(replicas: Replicas) -> None:
    both = ["loop.min_replicas=2", "loop.quorum_timeout_seconds=8"]  # or the first would train on alone
    commands = [replicas.start(0, *both), replicas.start(1, *both, "optimizer.lr=1e-3")]
    told = [command.wait() for command in commands]
    assert [done.code for done in told] == [1, 1]
    assert all("the replicas run different recipes" in done.err for done in told)
    commands = [replicas.start(1, *both, run=name) for name in ("twin-a", "twin-b")]
    assert all("there is another replica 1" in command.wait().err for command in commands)
    commands = [replicas.start(0, *both, run="narrow"), replicas.start(1, *both, "model.dim=64", run="wide")]
    told = [command.wait() for command in commands]
    assert sorted(done.code for done in told) == [1, 5]
    assert any("does not fit this one" in done.err for done in told)
    assert any("1 of at least 2 replicas are there" in done.err for done in told)  # and gives up


def test_without_a_lighthouse_it_ends_with_an_error(replicas: Replicas) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    replicas.lighthouse = f"http://localhost:{port}"
    done = replicas.start(0, "loop.timeout_seconds=2", "loop.quorum_timeout_seconds=2").wait()
    assert done.code == 5 and f"localhost:{port}" in done.err and "Traceback" not in done.err


class Lighthouse:
    """One in a process of its own, which can be killed, at an address that stays."""

    def __init__(self) -> None:
        with socket.create_server(("localhost", 0)) as server:
            self.port = server.getsockname()[1]
        self.address = f"http://localhost:{self.port}"
        self.start()

    def start(self) -> None:
        limits = ("--min_replicas", "1", "--join_timeout_ms", "2000", "--quorum_tick_ms", "20")
        program = Path(sys.executable).with_name("torchft_lighthouse")
        words = [str(program), "--bind", f"[::]:{self.port}", *limits, "--heartbeat_timeout_ms", "1000"]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            try:
                socket.create_connection(("localhost", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"torchft_lighthouse ended with {self.process.returncode}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def own_lighthouse(replicas: Replicas) -> Iterator[Lighthouse]:
    made = Lighthouse()
    replicas.lighthouse = made.address
    yield made
    made.stop()


def newest(run: Path) -> int:
    return max(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*"))


@pytest.mark.slow  # torchft pauses for up to half a minute between two attempts to reach a lighthouse
def test_a_lighthouse_that_restarts_costs_nothing_and_one_that_is_gone_no_step(
    replicas: Replicas, own_lighthouse: Lighthouse
) -> None:
    # Neither goes on alone while torchft pauses on the way back to the lighthouse.
    rare = [*slowly(replicas), "checkpoint.interval=1000", "loop.min_replicas=2"]
    rare += ["loop.quorum_timeout_seconds=40"]
    commands = [replicas.start(number, *rare) for number in (0, 1)]
    events = replicas.run(0) / "events.jsonl"
    commands[0].until_step(events, 3)
    own_lighthouse.stop()
    own_lighthouse.start()
    commands[0].until_step(events, max(losses(replicas.run(0))) + 4)
    own_lighthouse.stop()
    for number, command in enumerate(commands):
        done = command.wait()
        assert done.code == 5 and "too few replicas have met" in done.err
        # No step that it has taken is lost; one that it took over from the other is in no log of its own.
        assert newest(replicas.run(number)) >= max(losses(replicas.run(number)))
    own_lighthouse.start()
    last = str(newest(replicas.run(0)) + 2)
    for command in [replicas.start(n, *rare, f"training.steps={last}", "loss.sleep=0") for n in (0, 1)]:
        finished(command)
    assert_equal(replicas, int(last))


def test_a_replica_that_returns_after_the_others_have_finished_does_not_train_alone(
    replicas: Replicas, own_lighthouse: Lighthouse
) -> None:
    short = "loop.quorum_timeout_seconds=3"
    finished(replicas.start(0, short))  # the first of all may be alone
    late = replicas.start(1, short).wait()
    assert late.code == 5 and "no other replica is at" in late.err and "loop.alone=true" in late.err
    assert losses(replicas.run(1)) == {}
    finished(replicas.start(1, short, "loop.alone=true"))
    assert max(losses(replicas.run(1))) == 6


def test_a_run_folder_tells_whether_there_were_others(tmp_path: Path) -> None:
    assert not had_company(None) and not had_company(tmp_path)
    lines = [{"event": "step", "step": step, "metrics": {"replicas": step}} for step in (1, 2)]
    (tmp_path / "events.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert not had_company(tmp_path)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert had_company(tmp_path)


class Exchange:
    """What `step` asks of the others, as a test says; and an engine, and a run, that do nothing."""

    def __init__(self, counts: list[bool], *, newer: bool = False, stop: bool = False) -> None:
        self.counts, self.newer, self.stop = counts, newer, stop
        self.calls: list[str] = []
        self.count, self.step = 2, 7

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {"forward_backward": {}, "failure": "gone", "should_stop": self.stop}
        answers |= {"meet": self.newer}

        def call(*given: Any) -> Any:
            self.calls.append(name)
            return self.counts.pop(0) if name == "agree" else answers.get(name)

        return call


@pytest.mark.parametrize(
    ("exchange", "calls", "taken"),
    [
        (Exchange([True]), [], True),
        (Exchange([False, False, True]), ["meet", "forward_backward", "agree"] * 2, True),
        (Exchange([False], newer=True), ["meet"], False),
        (Exchange([False], stop=True), ["abandon"], False),
    ],
    ids=["counts", "again", "others have gone on", "stop"],
)
def test_a_step_that_does_not_count_is_computed_again_or_left(
    exchange: Exchange, calls: list[str], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "reduce_gradients", lambda engine, add: {"loss": 1.0})
    found = loop.step(exchange, exchange, [], exchange)  # type: ignore[arg-type]
    assert found == ({"loss": 1.0, "replicas": 2} if taken else None)
    others = ("clear_gradients", "failure", "should_stop")
    assert [call for call in exchange.calls if call not in others] == ["forward_backward", "agree", *calls]
    # The gradients of a step that did not count are never left to the next.
    assert exchange.calls.count("clear_gradients") == exchange.calls.count("agree") - taken


@pytest.mark.parametrize(
    ("own", "found", "error"),
    [
        (0, [1.0, 1.0, 14.0], None),
        (0, [1.0, 0.0, 7.0], None),
        (0, [1.0, 1.0, 15.0], "different recipes"),
        (1, [0.0, 2.0, 14.0], "another replica 1"),
        (0, [1.0, 2.0, 21.0], "reported"),
    ],
)
def test_what_all_have_is_compared(own: int, found: list[float], error: str | None) -> None:
    one = object.__new__(ReplicasOfOne)
    reported: list[Exception] = []
    one._config = SimpleNamespace(replica=own)  # type: ignore[assignment]
    one._is_known = False
    one._recipe, one._manager = 7, SimpleNamespace(report_error=reported.append)  # type: ignore[assignment]
    if error in (None, "reported"):
        one._check(found)
        assert bool(reported) is (error is not None)
    else:
        with pytest.raises(TitanError, match=error):
            one._check(found)
    if error:  # who has been there before stays
        one._is_known = True
        one._check(found)
        assert reported


def test_recipes_are_the_same_but_for_the_replica(tmp_path: Path) -> None:
    def number(text: str) -> int:
        (tmp_path / "recipe.lock.toml").write_text(text)
        return fingerprint(tmp_path)

    a = number('name = "a"\n[loop]\nreplica = 0\nreplicas = 2\n[optimizer]\nlr = 1.0')
    assert a == number('name = "b"\n[loop]\nreplica = 1\nreplicas = 2\n[optimizer]\nlr = 1.0')
    assert a != number('name = "a"\n[loop]\nreplica = 0\nreplicas = 2\n[optimizer]\nlr = 2.0')


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loop.replica=2", "numbered from 0 to 1"),
        ("loop.min_replicas=3", "never more than 2"),
        ("model.moe.aux_loss_coeff=0.1", "model.moe.aux_loss_coeff multiplies a mean over all tokens"),
    ],
)
def test_wrong_settings_are_said_at_once(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from titancli.cli import main

    loop = ["loop.type=ft", "loop.replicas=2"]
    replica = [] if "replica=" in override else ["loop.replica=0"]
    recipe = "qwen3_moe_debug" if "moe" in override else "llama3_debug"
    assert main(["validate", recipe, *loop, *replica, override]) == 3
    assert words in capsys.readouterr().err


def test_buckets_hold_every_tensor_once_and_one_dtype() -> None:
    quarter = BUCKET_BYTES // 16
    tensors = [torch.empty(quarter, device="meta") for _ in range(9)]
    tensors += [torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(BUCKET_BYTES, device="meta")]
    found = list(buckets(tensors))
    assert [len(bucket) for bucket in found] == [4, 4, 1, 1, 1]
    assert [tensor for bucket in found for tensor in bucket] == tensors or sum(map(len, found)) == 11


# -------------------------------------------------------------------------------------- what a replica sends


STATE = {
    "user": {
        "default": {"tensors": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}}
    },
    "torchft": {"step": 7, "batches_committed": 14},
    "data": {"epoch": 0, "rows": [1, 2], "none": None, "tensor": 0, "table": {"json": 1}},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def test_a_state_is_received_as_sent() -> None:
    sender, receiver = (SafeTransport(timedelta(seconds=10), lambda: 1 << 20) for _ in range(2))
    found: list[Any] = []

    def receive() -> None:
        found.append(receiver.recv_checkpoint(0, sender.metadata(), 7, timedelta(seconds=10)))

    asking = threading.Thread(target=receive)
    asking.start()  # before there is one
    sender.send_checkpoint([1], 6, {"old": 1}, timedelta(seconds=10))
    sender.send_checkpoint([1], 7, STATE, timedelta(seconds=10))
    asking.join(10)
    assert same(found[0], STATE)
    for one in (sender, receiver):
        one.shutdown()


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch bomb",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()),
        b"",
        b"\xff" * 64,
        (4).to_bytes(8, "big") + b"nope",
        (13).to_bytes(8, "big") + b'{"tensor": 0}' + save({}),
        (11).to_bytes(8, "big") + b'{"json": 1}' + save({}),
        packed(STATE)[:-3],
    ],
)
def test_nothing_else_is_taken_or_run(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TitanError, match="something else than a state"):
        unpacked(data)
    assert not list(tmp_path.iterdir())


def test_a_state_has_a_size_and_an_address() -> None:
    sender = SafeTransport(timedelta(seconds=1), lambda: 0)
    sender.send_checkpoint([1], 7, {"x": "y" * (65 << 20)}, timedelta(seconds=5))
    receiver = SafeTransport(timedelta(seconds=1), lambda: 0)
    with pytest.raises(TitanError, match="sends more than"):
        receiver.recv_checkpoint(0, sender.metadata(), 7, timedelta(seconds=30))
    with pytest.raises(TitanError, match="has no state of step 8"):
        receiver.recv_checkpoint(0, sender.metadata(), 8, timedelta(seconds=30))
    for wrong in ("file:///etc/passwd?", "http:///state/", "ftp://host/"):
        with pytest.raises(TitanError, match="is not the address"):
            receiver.recv_checkpoint(0, wrong, 7, timedelta(seconds=1))
    for one in (sender, receiver):
        one.shutdown()


def test_the_plugin_unpickles_nothing() -> None:
    import titan_ft

    text = "".join(file.read_text() for file in Path(titan_ft.__file__).parent.glob("*.py"))
    assert not re.search(r"\bpickle\.|torch\.load|HTTPTransport", text)


def test_a_recipe_names_no_lighthouse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from titancli.cli import main

    loop = ["loop.type=ft", "loop.replicas=2", "loop.replica=0"]
    assert main(["validate", "llama3_debug", *loop, "loop.lighthouse='http://evil:1'"]) == 3
    assert main(["validate", "llama3_debug", *loop, "env.TORCHFT_LIGHTHOUSE='http://evil:1'"]) == 3
    assert "it is not on the list" in capsys.readouterr().err
    for value in ("", "evil:1"):
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", value)
        with pytest.raises(TitanError, match="TORCHFT_LIGHTHOUSE"):
            lighthouse_address()
