"""Child processes end with the process that started them, however it ended."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap

import psutil
import pytest

from drafthead.config import REPO_ROOT
from drafthead.processes import WAITING

PATIENCE = 20.0  # seconds

# Each starts a child that would sleep for an hour, and prints its process id.
STARTERS = {
    "a subprocess": """
        import subprocess
        from drafthead.processes import ends_with_parent
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], preexec_fn=ends_with_parent())
        print(child.pid, flush=True)
        """,
    "a worker of a pool": """
        from concurrent.futures import ProcessPoolExecutor
        from drafthead.processes import ends_with_parent
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), ends_with_parent())
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 3600)
        """,
    "a rank of a launcher": """
        import subprocess
        rank = "from drafthead.processes import *; end_with_launcher(); print(os.getpid(), flush=True);"
        subprocess.Popen([sys.executable, "-c", rank + "import time; time.sleep(3600)"])
        """,
    "a forked engine": """
        with drafthead.processes.children_end_with_us():
            multiprocessing.get_context("fork").Process(target=sleep).start()
        """,
    "a spawned engine": """
        with drafthead.processes.children_end_with_us():
            multiprocessing.get_context("spawn").Process(target=sleep).start()
        """,
}
# The child of multiprocessing imports the main module again, as that of a recipe.
SCRIPT = """
import multiprocessing, os, sys, time
import drafthead.processes

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
"""
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}  # set by accelerate's launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked for it")


@pytest.mark.parametrize(
    ("script", "option", "given", "looks"),
    [
        ("train/eagle3.py", "--dry-run", {}, "3000"),
        ("eval/compare.py", "--help", {}, "3000"),
        ("eval/compare.py", "--help", {"OMP_WAIT_POLICY": "active"}, "30000000000"),
    ],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_so(script, option, given, looks):
    """By libgomp's own word, which it gives when it is loaded: it looks 300,000 times before it sleeps, by default."""
    # vLLM, started in this process before, leaves an LD_PRELOAD that loads libgomp ahead of the script.
    environment = {key: value for key, value in os.environ.items() if key not in (*WAITING, "LD_PRELOAD")}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(REPO_ROOT), **given}
    done = subprocess.run(
        [sys.executable, script, option], cwd=REPO_ROOT, env=environment, capture_output=True, text=True
    )
    assert set(re.findall("GOMP_SPINCOUNT = '(.*)'", done.stderr)) == {looks}


@pytest.mark.parametrize("name", STARTERS)
def test_nothing_outlives_a_process_that_was_killed(name, tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(SCRIPT + textwrap.indent(textwrap.dedent(STARTERS[name]) + "time.sleep(3600)\n", "    "))
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | LAUNCHED)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    try:
        child.wait(timeout=PATIENCE)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_a_rank_goes_on_whose_launcher_is_process_1(tmp_path):
    """As in a container."""
    rank = "from drafthead.processes import end_with_launcher; end_with_launcher(); print('went on')"
    (tmp_path / "rank.py").write_text(rank)
    launch = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    command = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", launch, sys.executable, tmp_path / "rank.py"]
    try:
        subprocess.run([*command[:3], "true"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make processes of their own numbers")
    done = subprocess.run(command, env=os.environ | LAUNCHED, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.stdout == "went on\n", done.stderr


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_whose_launcher_was_killed_while_python_loaded_ends_at_once(launched):
    """One that was started by hand, and whose shell is gone, goes on."""
    rank = """
import os, time
from drafthead.processes import end_with_launcher
while os.getppid() == {launcher}:
    time.sleep(0.01)
print("orphan of", os.getppid(), flush=True)
end_with_launcher()
print("went on", flush=True)
"""
    launcher = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}.format(launcher=os.getpid())])\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED} | (LAUNCHED if launched else {})
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPO_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout.read()  # until the rank has ended, too
    if "orphan of 1\n" not in output:
        pytest.skip("orphans of this machine are not process 1's")
    assert ("went on" in output) is not launched
