"""However a process ends, in whatever state its pools are, it ends as it would without fencepool."""

from __future__ import annotations

import signal

import pytest

from support import children

BEGIN = """
DEVICE = {device!r}
SIZE = 256 << 20 if DEVICE == "cpu" else 4 << 30  # never touched
pool = fp.pool("t", DEVICE)
kept = fp.pool("kept", DEVICE, backup="host")
blocks = [pool._core.allocate(SIZE), kept._core.allocate(1 << 20)]
"""

STATES = {
    "active": "",
    "paused": "fp.pause()",
    "pausing": """
inside = threading.Event()
pool.on_pause(lambda _: (inside.set(), threading.Event().wait()))
threading.Thread(target=fp.pause, args=("t",), daemon=True).start()
inside.wait()
""",
    # Another pool takes all but half of what the resume needs.
    "resuming": """
fp.pause("t")
others = fp.pool("others", DEVICE)._core.allocate(fp.memory_info(DEVICE)[0] - SIZE // 2)
threading.Thread(target=fp.resume, args=("t",), kwargs={"wait": 1000}, daemon=True).start()
while pool.state != "resuming":
    pass
""",
}

# The statement, the status, and the last line that is written to the standard error.
ENDS = {
    "return": ("", 0, ""),
    "exception": ('raise LookupError("as meant")', 1, "LookupError: as meant"),
    "sys.exit": ("sys.exit(5)", 5, ""),
    "os._exit": ("os._exit(4)", 4, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "SIGTERM-handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nos.kill(os.getpid(), signal.SIGTERM)",
        9,
        "",
    ),
}


def ends_with(status: int, code: str, last: str = "") -> None:
    done = children.run(code)
    lines = done.stderr.splitlines() or [""]
    assert (done.returncode, done.stdout, lines[-1]) == (status, "", last), done.stderr
    if not last:
        assert done.stderr == ""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ENDS)
def test_the_process_ends_as_it_would_without(device, state, end):
    statement, status, last = ENDS[end]
    ends_with(status, f"{BEGIN.format(device=device)}\n{STATES[state]}\n{statement}", last)


@pytest.mark.parametrize("event", ["pause", "resume"])
def test_a_callback_may_end_the_process(device, event):
    code = f"""
{BEGIN.format(device=device)}
import atexit
def is_as_before():
    assert pool.state == "active", pool.state
    assert _core.problems() == [], _core.problems()
atexit.register(is_as_before)
pool.on_{event}(lambda _: sys.exit(6))
fp.pause()
fp.resume()
raise SystemExit("the callback was passed over")
"""
    ends_with(6, code)


@pytest.mark.parametrize("state", ["active", "paused"])
def test_what_the_interpreter_takes_down_last_may_still_pause_and_resume(device, state):
    code = f"""
{BEGIN.format(device=device)}
import atexit
{STATES[state]}

class Late:
    def __init__(self):
        self.fp, self.pool, self.block = fp, pool, blocks[0]

    def __del__(self):
        self.fp.resume("t")
        self.fp.pause("t")
        del self.block
        self.pool.status()

atexit.register(fp.resume)
atexit.register(fp.pause)
sys.late = Late()
"""
    ends_with(0, code)


# A process of its own, by any way but fork alone, has pools of its own.
CYCLE = """
import fencepool as fp
pool = fp.pool("t", {device!r}, backup="host")
block = pool._core.allocate(1 << 20)
fp.pause(); fp.resume(); fp.pause()
"""

STARTS = {
    "fork and exec": """
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-c", CYCLE])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "subprocess": """
import subprocess
subprocess.run([sys.executable, "-c", CYCLE], check=True)
""",
    "spawn": "START, PRELOADED = 'spawn', []",
    "forkserver": "START, PRELOADED = 'forkserver', []",
    "forkserver that has imported": "START, PRELOADED = 'forkserver', ['fencepool']",
}

WITH_MULTIPROCESSING = """
import multiprocessing
context = multiprocessing.get_context(START)
context.set_forkserver_preload(PRELOADED)
process = context.Process(target=exec, args=(CYCLE, {}))
process.start()
process.join()
assert process.exitcode == 0, process.exitcode
"""


@pytest.mark.parametrize("state", ["active", "paused"])
@pytest.mark.parametrize("start", STARTS)
def test_a_process_that_is_started_with_pools_alive_has_its_own(device, start, state):
    way = STARTS[start] + (WITH_MULTIPROCESSING if "START" in STARTS[start] else "")
    code = f"""
CYCLE = {CYCLE.format(device=device)!r}
{BEGIN.format(device=device)}
{STATES[state]}
before = [one.state for one in fp.status()]
{way}
assert [one.state for one in fp.status()] == before
fp.pause()
fp.resume()
assert _core.problems() == [], _core.problems()
"""
    ends_with(0, code)
