"""`titan launch slurm` with commands of Slurm that record how they are called; `test_real_slurm.py` shows
what Slurm itself makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Titan
from titan_slurm import command as launch
from titan_slurm import seconds_of
from titan_slurm.jobs import SlurmFiles
from titancli.locks import hold_file
from titancli.run.prepare import Plan
from titancli.runs import RunFolder

FAKE = r"""#!/bin/bash
# `calls`: each call, one a line. `NAME.out`, `NAME.err`, `NAME.code`: what the program NAME answers.
here=$(dirname "$0"); name=$(basename "$0")
(printf '%s' "$name"; printf ' %q' "$@"; echo) >> "$here/calls"
[ "$name" = srun ] && printf '%s\0' "$@" > "$here/srun.args"
cat "$here/$name.out" 2> /dev/null
cat "$here/$name.err" >&2 2> /dev/null
exit "$(cat "$here/$name.code" 2> /dev/null || echo 0)"
"""
NODES = ["launcher.nproc=1", "training.steps=2"]
AGAIN = ["launcher.max_restarts=9"]
ODD = 'odd \'dir "x" $y #ü'


class Slurm:
    """Programs of Slurm on PATH, that do what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "scontrol", "scancel", "sacct", "srun"):
            (folder / name).write_text(FAKE)
            (folder / name).chmod(0o755)
        self.answer("sbatch", "41")
        self.job("PENDING")

    def answer(self, name: str, out: str = "", *, err: str = "", code: int = 0) -> None:
        for what, text in (("out", out), ("err", err), ("code", str(code))):
            (self.folder / f"{name}.{what}").write_text(f"{text}\n" if text else "")

    def job(self, state: str, code: str = "0:0", reason: str = "None") -> None:
        self.answer(
            "scontrol", f"JobId=41 JobName=x JobState={state} Reason={reason} Restarts=0 ExitCode={code}"
        )

    def forget(self) -> None:
        self.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)

    def calls(self, *names: str) -> list[str]:
        """Calls since the last time."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if line.partition(" ")[0] in names]


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    programs = Slurm(tmp_path_factory.mktemp("slurm") / "bin")
    monkeypatch.setenv("PATH", f"{programs.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    return programs


def submit(titan: Titan, *arguments: str):
    return titan("launch", "slurm", "llama3_debug", "--nodes", "2", *NODES, *arguments)


# ------------------------------------------------------------------------------------------------ the script


def test_dry_run_prints_the_script_and_makes_nothing(titan: Titan, tmp_path: Path) -> None:
    done = submit(
        titan, "--dry-run", "--run-dir", "r", "launcher.partition=main", "launcher.time=1-00",
        "launcher.gpus_per_node=8", "launcher.sbatch.exclusive=true", "launcher.sbatch.contiguous=false",
        'launcher.sbatch.comment=a "b"', "launcher.sbatch.dependency=afterok:7",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = [line.removeprefix("#SBATCH --") for line in done.out.splitlines() if line.startswith("#SBATCH")]
    assert set(lines) >= {
        "nodes=2", "ntasks-per-node=1", "signal=USR1@300", "requeue", "open-mode=append", "partition=main",
        "time=1-00", "gpus-per-node=8", "exclusive", 'comment="a \\"b\\""', "dependency=singleton,afterok:7",
        f"output={tmp_path}/r/logs/slurm-%j.log",
    }  # fmt: skip
    assert not any("contiguous" in line for line in lines)
    assert list(tmp_path.iterdir()) == []
    done = submit(titan, "--dry-run", "--run-dir", "r", "tokenizer.type=hf", "tokenizer.path=nowhere")
    assert f"missing: tokenizer.path: {tmp_path}/nowhere does not exist" in done.err
    document = json.loads(submit(titan, "--dry-run", "--run-dir", "r", "--json").out)
    assert (document["job"], document["nodes"]) == (None, 2) and document["script"].startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("code", "nodes", "term", "ends", "again"),
    [
        (75, (75, 75), False, 75, True),
        (75, (75, 75), True, 75, False),  # the job was cancelled
        (1, (1, 1), False, 1, False),
        (75, (1, 75), False, 75, True),  # one node was asked to stop before the others had met it
        (137, (75,), False, 75, True),  # one is gone, the other has saved
        (137, (75,), True, 75, False),
        (137, (0,), False, 0, False),  # one is gone, the others have finished
        (137, (137, 75), False, 75, True),  # one was killed, so that the others have saved and stopped
        (137, (1,), False, 137, True),  # one is gone, and the others cannot go on without it
        (137, (137, 1), False, 137, False),
        (1, (), False, 1, False),  # it could not even be started
    ],
)
def test_the_script_starts_titan_and_is_requeued_where_the_run_goes_on(
    titan: Titan,
    slurm: Slurm,
    tmp_path: Path,
    code: int,
    nodes: tuple[int, ...],
    term: bool,
    ends: int,
    again: bool,
) -> None:
    """By what the nodes say; with quotes and blanks where a user may have them."""
    folder = tmp_path / ODD
    done = submit(titan, "--detach", "--run-dir", str(folder), "--env", "NCCL_DEBUG=IN FO")
    assert done.code == 0, done.err
    slurm.answer("srun", code=code)
    while_titan_runs = "".join(f'echo {said} > "$CODES-{node}"; ' for node, said in enumerate(nodes))
    while_titan_runs += "kill -TERM $PPID; " if term else ""
    (slurm.folder / "srun").write_text(FAKE.replace("exit", f"{while_titan_runs}exit"))
    slurm.calls()
    env = {**os.environ, "SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "lost": "x"}
    script = subprocess.run(["bash", folder / "slurm" / "job.sh"], env=env, capture_output=True, text=True)
    assert (script.returncode, script.stderr) == (ends, "")
    assert ("scontrol requeue 41" in slurm.calls("scontrol")) is again
    given = (slurm.folder / "srun.args").read_text().split("\0")
    options, (output, bash, c, loop, node, python, *words, end) = given[:3], given[3:]
    assert options == ["--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"]
    assert (output, bash, c, node) == (f"--output={folder}/logs/slurm-%j-node-%n.log", "bash", "-c", "node")
    env |= {"CODES": str(tmp_path / "of"), "SLURM_NODEID": "1"}
    done = subprocess.run([bash, c, loop, node, "sh", "-c", f"exit {code}"], env=env)
    assert (done.returncode, (tmp_path / "of-1").read_text()) == (code, f"{code}\n")
    train = ["train", f"{folder}/slurm/recipe.toml", "--run-dir", f"{folder}", "--resume"]
    rest = ["--env", "NCCL_DEBUG=IN FO", "--nproc", "1", "--nnodes", "2"]
    assert [*words, end] == ["-m", "titancli", *train, *rest, ""] and Path(python).exists()


def test_what_was_submitted_is_kept_in_the_run_folder(titan: Titan, slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "titan:llama3_debug"\nname = "mine"\n')
    document = titan("launch", "slurm", "./mine.toml", "--nodes=3", "--run-dir=r", "--detach", "--json")
    (tmp_path / "mine.toml").unlink()  # the job may start tomorrow
    assert json.loads(document.out)["job"] == "41"
    [call] = slurm.calls("sbatch")
    assert call == f"sbatch --parsable {tmp_path}/r/slurm/job.sh"
    [job] = SlurmFiles(RunFolder(tmp_path / "r")).jobs()
    assert (job["id"], job["nodes"]) == ("41", 3)
    assert titan("recipe", "show", "r/slurm/recipe.toml").code == 0
    told = titan("train", "r/slurm/recipe.toml", "--run-dir", "r", "--resume", "--step", "1")
    assert "does not exist" in told.err  # the folder counts as that of a run which is still to be made


def test_nothing_is_submitted_for_a_finished_run(
    titan: Titan, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "finished", True)
    done = submit(titan, "--run-dir", "r", "--json")
    assert (done.code, json.loads(done.out)["job"]) == (0, None) and "is finished" in done.err
    assert slurm.calls("sbatch") == []


def test_one_node_looks_for_no_others(titan: Titan) -> None:
    out = titan("launch", "slurm", "llama3_debug", "--nodes", "1", "--dry-run").out
    assert "nnodes" not in out and "--nproc" not in out  # nobody has said how many there are


@pytest.mark.parametrize(
    ("nodes", "more", "asked", "nnodes"),
    [("4", [], "4", "4"), ("2", [*AGAIN, "launcher.spare_nodes=1"], "3", "2"),
     ("2:4", [*AGAIN, "launcher.spare_nodes=1", "training.global_batch_size=96"], "2-5", "2:4")],
)  # fmt: skip
def test_nodes_may_be_lost_where_there_are_more_of_them_than_the_run_needs(
    titan: Titan, nodes: str, more: list[str], asked: str, nnodes: str
) -> None:
    out = titan("launch", "slurm", "llama3_debug", "--nodes", nodes, *NODES, *more, "--dry-run").out
    assert f"#SBATCH --nodes={asked}\n" in out and f"--nnodes {nnodes}\n" in out
    assert out.count("--no-kill") == (2 if more else 0)  # of the job, and of its step


def test_a_batch_that_some_of_the_nodes_cannot_share_is_refused_before_anything_waits(titan: Titan) -> None:
    line = ("launch", "slurm", "llama3_debug", "--nodes", "2:4", *NODES, "training.global_batch_size=32")
    done = titan(*line, *AGAIN)
    assert done.code == 3 and "numbers of nodes that fit: 2, 4" in done.err
    done = titan(*line)
    assert done.code == 2 and "--nodes MIN:MAX needs launcher.max_restarts" in done.err
    done = titan(*line, "launcher.spare_nodes=1")
    assert done.code == 3 and "set launcher.max_restarts" in done.err
    alone = ("launch", "slurm", "llama3_debug", "--nodes", "1", *NODES, *AGAIN, "launcher.spare_nodes=1")
    done = titan(*alone, "--dry-run")
    assert done.code == 2 and "launcher.spare_nodes needs --nodes 2 or more" in done.err


def test_how_to_resume_is_said_in_the_words_of_this_command(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/recipe.lock.toml").touch()
    done = submit(titan, "--run-dir", "r", "--dry-run")
    assert done.code == 5
    assert "to resume it: titan launch slurm --nodes N llama3_debug --run-dir r --resume" in done.err


# -------------------------------------------------------------------------------------------- the submission


def test_without_slurm_it_says_so(titan: Titan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit(titan)
    assert done.code == 5 and "sbatch is not on PATH" in done.err and "--dry-run" in done.err
    done = submit(titan, "training.global_batch_size=8")  # what is wrong with the run itself comes first
    assert done.code == 3 and "global_batch_size" in done.err and "sbatch" not in done.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert submit(titan, "--dry-run").code == 0


def test_a_refused_job_leaves_nothing(titan: Titan, slurm: Slurm, tmp_path: Path) -> None:
    slurm.answer("sbatch", err="sbatch: error: invalid partition specified: gpu", code=1)
    done = submit(titan, "--run-dir", "new")
    assert done.code == 5 and "invalid partition specified: gpu" in done.err
    assert not (tmp_path / "new").exists()
    (tmp_path / "there" / "logs").mkdir(parents=True)
    assert submit(titan, "--run-dir", "there").code == 5
    assert (tmp_path / "there" / "logs").is_dir()
    slurm.answer("sbatch", "Submitted batch job 41")  # no id: who knows what answered
    assert submit(titan, "--run-dir", "new").code == 5


def test_a_run_has_one_job_at_a_time(titan: Titan, slurm: Slurm, tmp_path: Path) -> None:
    assert submit(titan, "--run-dir", "r", "--detach").code == 0
    done = submit(titan, "--run-dir", "r", "--detach")
    assert done.code == 5 and "job 41" in done.err and "is PENDING" in done.err
    slurm.job("FAILED", "1:0")
    hold = hold_file(tmp_path / "r" / "slurm" / "lock", "another submission")
    done = submit(titan, "--run-dir", "r", "--detach")
    assert done.code == 5 and "in use by process" in done.err
    hold.release()
    assert len(slurm.calls("sbatch")) == 1
    slurm.answer("sbatch", "42;here")
    assert submit(titan, "--run-dir", "r", "--detach").code == 0
    assert [job["id"] for job in SlurmFiles(RunFolder(tmp_path / "r")).jobs()] == ["41", "42"]


def test_a_job_that_cannot_be_recorded_is_named(
    titan: Titan, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r" / "slurm" / "jobs.json").mkdir(parents=True)
    done = submit(titan, "--run-dir", "r", "--detach")
    assert done.code == 5 and "cannot read" in done.err and not slurm.calls("sbatch")
    (tmp_path / "r" / "slurm" / "jobs.json").rmdir()

    def full(path: Path, text: str) -> None:
        from titancli.errors import EnvironmentProblem

        if path.name == "jobs.json":
            raise EnvironmentProblem("cannot write: No space left on device")

    monkeypatch.setattr("titan_slurm.jobs.write_atomically", full)
    assert "job 41 is submitted, but cannot write" in submit(titan, "--run-dir", "r").err


def test_wrong_settings_are_said_before_anything_is_submitted(titan: Titan, slurm: Slurm) -> None:
    done = submit(titan, "launcher.time=4:00", "launcher.sbatch.nodes=3", "launcher.sbatch.qos=x",
                  "launcher.sbatch._x=1", 'launcher.account="a\\nb"')  # fmt: skip
    for words in (
        "just after it begins",
        "--nodes cannot be set",
        "launcher.qos",
        "long name",
        "one line",
    ):
        assert words in done.err
    assert done.code == 3
    assert "global_batch_size" in submit(titan, "training.global_batch_size=8").err  # 2 ranks of 8 rows
    done = submit(titan, "--run-dir", "50%j", "--detach")
    assert done.code == 5 and "contains '%'" in done.err
    assert submit(titan, "launcher=local").code == 2
    assert submit(titan, "--from-scratch").code == 2
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "export='ALL,BASH_ENV=/tmp/x'",
            "allowed; give it on the command line: titan launch slurm … --sbatch export=…",
        ),
        ("export-file='/tmp/x'", "a recipe cannot set --export-file"),
        ("container='/tmp/x'", "a recipe cannot set --container"),
        ("container-image='evil/image'", "a recipe cannot set --container-image"),
        ("task-prolog='/tmp/x'", "a recipe cannot set --task-prolog"),
        ("get-user-env=true", "a recipe cannot set --get-user-env"),
        ("bcast='/tmp/x'", "a recipe cannot set --bcast"),
        ("input='/etc/passwd'", "a recipe cannot set --input"),
        ("bb='/tmp/x'", "a recipe cannot set --bb"),
        ("x11=true", "a recipe cannot set --x11"),
        ("constrain='h100'", "did you mean 'constraint'?"),
        ("nodelist='/etc/passwd'", "would be read as the name of a file"),
        ("exclude='./hosts'", "would be read as the name of a file"),
        ("mail-user='-a/etc/passwd'", "neither a user nor an address"),
    ],
)
def test_a_recipe_chooses_no_program_environment_or_file_for_the_job(
    titan: Titan, tmp_path: Path, option: str, words: str
) -> None:
    done = titan("validate", "llama3_debug", "launcher=slurm", f"launcher.sbatch.{option}")
    assert done.code == 3 and words in done.err, done


def test_a_person_gives_any_option_on_the_command_line(titan: Titan, tmp_path: Path) -> None:
    words = ("--sbatch", "export=ALL,A=b c", "--sbatch", "dependency=afterok:7", "--sbatch", "x11")
    done = submit(titan, "--dry-run", "launcher.sbatch.dependency=afterok:6", *words)
    assert done.code == 0, done.err
    for line in ('--export="ALL,A=b c"', "--dependency=singleton,afterok:7", "--x11"):
        assert f"#SBATCH {line}\n" in done.out
    for wrong in ("nodes=3", "wrap=x", "time=5", "--export=x", "export=", "export=a\nb", "a\nb=1"):
        done = submit(titan, "--dry-run", "--sbatch", wrong)
        assert done.code == 2 and "--sbatch" in done.err, wrong


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:00:00", 3600), ("1-0", 86400), ("1-2:30", 95400), ("1-0:0:5", 86405),
     ("UNLIMITED", float("inf")), ("soon", None), ("1:2:3:4", None), ("-1", None), ("", None), ("1-", None)],
)  # fmt: skip
def test_time_limits_are_read_as_by_sbatch(time: str, seconds: float | None) -> None:
    assert seconds_of(time) == seconds


# --------------------------------------------------------------------------------------------------- the job


@pytest.mark.parametrize(
    ("state", "code", "expected"), [("COMPLETED", "0:0", 0), ("FAILED", "5:0", 5), ("TIMEOUT", "0:15", 1)]
)
def test_the_job_is_followed_to_its_end(
    titan: Titan, slurm: Slurm, tmp_path: Path, state: str, code: str, expected: int
) -> None:
    logs = tmp_path / "r" / "logs"
    logs.mkdir(parents=True)
    (logs / "slurm-41.log").write_text("from the script\n")
    (logs / "slurm-41-node-0.log").write_text("step 1/2\nno end of line")
    (logs / "slurm-41-node-1.log").write_text("of another node\n")
    slurm.job(state, code)
    done = submit(titan, "--run-dir", "r")
    assert done.code == expected
    assert done.out.splitlines() == ["from the script", "step 1/2", "no end of line"]
    assert f"job 41: {state}" in done.err
    assert titan("launch", "logs", "r", "-f", "--node", "1").out.splitlines() == [
        "from the script", "of another node"
    ]  # fmt: skip
    found = json.loads(titan("launch", "logs", "r", "--json").out)["logs"]
    assert [log["name"] for log in found] == ["slurm-41", "slurm-41-node-0"]


def test_a_controller_that_fails_for_a_moment_ends_nothing(
    titan: Titan, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(seconds: float) -> None:
        slurm.job("COMPLETED")

    slurm.answer("scontrol", err="Unable to contact slurm controller (connect failure)", code=1)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=later))
    done = submit(titan, "--run-dir", "r")
    assert done.code == 0 and "Unable to contact" in done.err and "COMPLETED" in done.err


def test_ctrl_c_leaves_the_job_alone(titan: Titan, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pressed))
    done = submit(titan, "--run-dir", "r")
    assert done.code == 130 and "job 41 continues" in done.err and not slurm.calls("scancel")


def test_cancel_has_a_running_job_save(titan: Titan, slurm: Slurm) -> None:
    assert titan("launch", "cancel", "r").code == 5
    submit(titan, "--run-dir", "r", "--detach")
    slurm.calls()
    slurm.job("RUNNING")
    assert "saves and stops" in titan("launch", "cancel", "r").err
    # The script first: it must know before titan ends.
    assert slurm.calls("scancel") == ["scancel --batch --signal=TERM 41", "scancel --signal=USR1 41"]
    assert "is cancelled" in titan("launch", "cancel", "r", "--now").err
    slurm.job("PENDING")
    assert json.loads(titan("launch", "cancel", "r", "--json").out)["saves"] is False
    assert slurm.calls("scancel") == ["scancel 41", "scancel 41"]
    slurm.answer("scancel", err="scancel: error: Access/permission denied", code=1)
    assert "permission denied" in titan("launch", "cancel", "r").err
    slurm.job("COMPLETED")
    slurm.calls()
    assert json.loads(titan("launch", "cancel", "r", "--json").out)["cancelled"] is False
    assert not slurm.calls("scancel")


def test_status_says_what_slurm_says(titan: Titan, slurm: Slurm) -> None:
    submit(titan, "--run-dir", "r", "--detach")
    slurm.job("PENDING", reason="Resources")
    assert titan("launch", "status", "r").out == "job 41: PENDING, reason Resources\nrun r: not started yet\n"
    slurm.forget()
    slurm.answer("sacct", "CANCELLED by 0|75:0|n[1-2]")
    document = json.loads(titan("launch", "status", "r", "--json").out)
    assert (document["job"]["state"], document["job"]["exit_code"]) == ("CANCELLED", 75)
    slurm.answer("sacct", err="Slurm accounting storage is disabled", code=1)
    assert "no longer knows it" in titan("launch", "status", "r").out
    slurm.answer("scontrol", err="Unable to contact slurm controller", code=1)
    assert titan("launch", "status", "r").code == 5
    (Path("r") / "slurm" / "jobs.json").write_text('{"format": 2}')
    assert "another version" in titan("launch", "status", "r").err
