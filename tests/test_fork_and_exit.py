"""A child after fork is inert; a process ends as it would without fencepool; Ctrl-C works."""

from __future__ import annotations

import signal

import pytest

from support import children

# Each runs in the child of a fork; `pool`, `block` and `fence` are the parent's.
CALLS = {
    "pool()": "fp.pool('new', DEVICE)",
    "pool() again": "fp.pool('t', DEVICE, backup='host')",
    "pause": "fp.pause('t')",
    "pause all": "fp.pause()",
    "resume": "fp.resume('t')",
    "paused": "fp.paused('t').__enter__()",
    "status": "fp.status()",
    "pool.status": "pool.status()",
    "pool.state": "pool.state",
    "allocate": "pool._core.allocate(10)",
    "contains": "pool._core.contains(block.address)",
    "prepare": "pool.prepare()",
    "prepare without backup": "bare.prepare()",
    "trim": "pool.trim()",
    "close": "pool.close()",
    "fence.done": "fence.done()",
    "fence.synchronize": "fence.synchronize()",
    "fence.wait": "fence.wait(0)",
    "memory_info": "fp.memory_info(DEVICE)",
    "driver_info": "fp.driver_info(PROVIDER)",
    "configure": "fp.host_driver.configure(memory_limit=0)",
}

PARENT = """
DEVICE, PROVIDER = {device!r}, {provider!r}
pool = fp.pool("t", DEVICE, backup="host")
bare = fp.pool("u", DEVICE)
block = pool._core.allocate(1 << 20)
fp.pause("t")
fence = fp.resume("t").fence
child = os.fork()
if child == 0:
{body}
_, ended = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(ended) == {status}, os.waitstatus_to_exitcode(ended)
fp.pause("t")
fp.resume("t")
assert _core.problems() == [], _core.problems()
"""


def parent(device: str, body: str, status: int = 0) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    provider = "cuda" if device.startswith("cuda") else "host"
    return PARENT.format(device=device, provider=provider, body=lines, status=status)


@pytest.mark.parametrize("call", list(CALLS), ids=lambda name: name.replace(" ", "-"))
def test_in_a_forked_child_the_call_raises(device, call):
    children.run_silently(
        parent(
            device,
            f"""
try:
    {CALLS[call]}
except fp.ForkedError as error:
    assert "spawn" in str(error), error
    os._exit(0)
os._exit(3)
""",
        )
    )


@pytest.mark.parametrize("state", ["active", "paused"])
def test_a_forked_child_ends_as_it_would_without(device, state):
    pause = 'fp.pause("t")\n' if state == "paused" else ""
    code = parent(
        device, "del block, fence, pool, bare\nimport gc; gc.collect()\nraise SystemExit(7)", status=7
    )
    children.run_silently(code.replace("child = os.fork()", f"{pause}child = os.fork()"))


def test_a_forked_child_leaves_the_parents_memory_alone(device):
    children.run_silently(
        parent(
            device,
            """
del block
import gc; gc.collect()
assert _core.is_forked_child()
os._exit(0)
""",
        )
        + """
if PROVIDER == "host":
    ctypes.memset(block.address, 9, 1 << 20)
    fp.pause("t")
    fp.resume("t")
    assert is_filled(block, 1 << 20, 9)
assert pool.status().segments == 1
assert not _core.is_forked_child()
"""
    )


def test_a_fork_during_a_pause(device):
    """The child's copy of every lock may be held by a thread that it does not have."""
    children.run_silently(
        f"""
        device = {device!r}
        provider = "cuda" if device.startswith("cuda") else "host"
        pool = fp.pool("t", device, backup="host")
        block = pool._core.allocate(1 << 20)
        driver = raw.Driver(provider)
        driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
        stream, latch = driver.stream_create(1)[1], raw.Latch()
        driver.hold(latch, stream)
        latch.wait_until_held(1)
        pausing = threading.Thread(target=fp.pause, args=("t",))
        pausing.start()
        while pool.state != "pausing":
            pass
        child = os.fork()
        if child == 0:
            for call in (fp.pause, fp.resume, fp.status, pool.status, pool.close):
                try:
                    call()
                except fp.ForkedError:
                    continue
                os._exit(3)
            del block
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        latch.open()
        pausing.join()
        fp.resume("t")
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        """
    )


def test_a_fork_while_another_thread_has_a_pool_to_itself():
    """Python's locks too are held for good in the child."""
    children.run_silently(
        """
        import signal
        pool = fp.pool("t", "cpu", backup="host")
        inside, go_on = threading.Event(), threading.Event()
        pool.on_pause(lambda _: (inside.set(), go_on.wait(60)))
        pausing = threading.Thread(target=fp.pause, args=("t",))
        pausing.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            for call in (lambda: pool.region().__enter__(), pool.close, fp.pause, fp.resume):
                try:
                    call()
                except fp.ForkedError:
                    continue
                os._exit(3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        pausing.join()
        """
    )


def test_a_fork_before_the_first_use_is_no_fork():
    children.run_silently(
        """
        child = os.fork()
        if child == 0:
            pool = fp.pool("t", "cpu", backup="host")
            block = block_of(pool, 1 << 20, 5)
            fp.pause("t"); fp.resume("t")
            os._exit(0 if is_filled(block, 1 << 20, 5) else 3)
        assert os.waitpid(child, 0)[1] == 0
        assert not _core.is_forked_child()
        """
    )


# --- the end of the process -------------------------------------------------------------------------

ENDS = {
    "active": "",
    "paused": 'fp.pause("t")',
    "paused-all": "fp.pause()",
    "cycled": 'fp.pause("t"); fp.resume("t")',
    "explicit": 'fp.pause("t"); fence = fp.resume("t", order="explicit").fence',
    "in-paused-block": 'block = fp.paused("t"); block.__enter__()',
    "latch-held": """
driver = raw.Driver(PROVIDER)
driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
stream, latch = driver.stream_create(1)[1], raw.Latch()
driver.hold(latch, stream)
""",
}


@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("policy", ["backup='none'", "backup='host'", "backup='host', retain=False"])
def test_the_process_ends_silently(device, end, policy):
    if end == "latch-held" and device != "cpu":
        pytest.skip("the driver waits for host functions when a process ends")
    children.run_silently(
        f"DEVICE = {device!r}\nPROVIDER = 'host' if DEVICE == 'cpu' else 'cuda'\n"
        f"pool = fp.pool('t', DEVICE, {policy})\n"
        f"blocks = [pool._core.allocate(size) for size in (100, 1 << 20)]\n{ENDS[end]}"
    )


@pytest.mark.parametrize("end", ["", 'fp.pause("t")'])
def test_a_tensor_outlives_the_interpreter(device, end):
    children.run_silently(
        f"""
        import torch
        pool = fp.pool("t", {device!r}, backup="host")
        tensor = pool.empty((100,))
        module = pool.adopt(torch.nn.Linear(3, 3))
        sys.modules["keeper"] = type(sys)("keeper")
        sys.modules["keeper"].cycle = [tensor, module]
        sys.modules["keeper"].cycle.append(sys.modules["keeper"].cycle)
        {end}
        """
    )


# A thread is in the middle of a call while the interpreter is taken down, which is stretched by a finaliser:
# long enough for the thread to look for signals, for which it needs the interpreter.
MIDWAY = """
DEVICE = {device!r}
PROVIDER = "host" if DEVICE == "cpu" else "cuda"
pool = fp.pool("t", DEVICE, backup="host")
other = fp.pool("u", DEVICE)
block = pool._core.allocate(4 << 20)
driver = raw.Driver(PROVIDER)
driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
stream, latch = driver.stream_create(1)[1], raw.Latch()

class Stretch:
    def __init__(self):
        self.wait = threading.Event().wait
    def __del__(self):
        self.wait({stretch})

def midway(call, *arguments, **options):
    thread = threading.Thread(target=call, args=arguments, kwargs=options, daemon=True)
    thread.start()
    return thread

{body}
sys.stretch = Stretch()
"""


@pytest.mark.parametrize("stretch", [0.0, 0.3])
def test_the_process_ends_in_the_middle_of_a_pause(stretch):
    children.run_silently(
        MIDWAY.format(
            device="cpu",
            stretch=stretch,
            body="""
driver.hold(latch, stream)
latch.wait_until_held(1)
keep = latch
sys.keep = latch  # the latch opens when it dies
thread = midway(fp.pause, "t", timeout=None)
while pool.state != "pausing":
    pass
""",
        )
    )


@pytest.mark.parametrize("stretch", [0.0, 0.3])
def test_the_process_ends_in_the_middle_of_a_resume(stretch):
    children.run_silently(
        MIDWAY.format(
            device="cpu",
            stretch=stretch,
            body="""
fp.pause("t")
fp.host_driver.configure(memory_limit=1 << 20)
thread = midway(fp.resume, "t", wait=1000)
while pool.state != "resuming":
    pass
""",
        )
    )


@pytest.mark.parametrize("stretch", [0.0, 0.3])
def test_the_process_ends_while_a_thread_waits_for_a_fence(stretch):
    children.run_silently(
        MIDWAY.format(
            device="cpu",
            stretch=stretch,
            body="""
fp.pause("t")
fp.host_driver.configure(bandwidth=1 << 20)
fence = fp.resume("t", order="explicit").fence
thread = midway(fence.synchronize)
""",
        )
    )


def test_a_pause_on_a_thread_that_is_no_daemon_is_finished_first():
    children.run_silently(
        MIDWAY.format(
            device="cpu",
            stretch=0,
            body="""
driver.hold(latch, stream)
latch.wait_until_held(1)
threading.Thread(target=fp.pause, args=("t",)).start()
while pool.state != "pausing":
    pass
latch.open()
""",
        )
    )


# --- Ctrl-C -----------------------------------------------------------------------------------------

INTERRUPTED = """
DEVICE = {device!r}
PROVIDER = "host" if DEVICE == "cpu" else "cuda"
pool = fp.pool("t", DEVICE, backup="host", retain={retain})
block = pool._core.allocate(4 << 20)
if PROVIDER == "host":
    ctypes.memset(block.address, 5, 4 << 20)
driver = raw.Driver(PROVIDER)
driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
stream, latch = driver.stream_create(1)[1], raw.Latch()
{before}

queries = _core.call_counts(PROVIDER)["cuEventQuery"]

def interrupt():
    while not ({until}):
        pass
    os.kill(os.getpid(), {signal})

import time
start = time.monotonic()
interrupting = threading.Thread(target=interrupt)
interrupting.start()
try:
    {call}
except KeyboardInterrupt:
    assert time.monotonic() - start < 60
else:
    raise SystemExit("it was not interrupted")
assert pool.state == {state!r}, pool.state
{after}
assert is_filled(block, 4 << 20, 5)
assert _core.problems() == [], _core.problems()
driver.stream_destroy(stream)
"""


@pytest.mark.parametrize("retain", [True, False])
def test_ctrl_c_ends_a_resume_that_waits_and_the_pool_is_still_paused(retain):
    children.run_silently(
        INTERRUPTED.format(
            device="cpu",
            retain=retain,
            signal=int(signal.SIGINT),
            before='fp.pause("t")\nfp.host_driver.configure(memory_limit=1 << 20)',
            until='pool.state == "resuming"',
            call='fp.resume("t", wait=1000)',
            state="paused",
            after='fp.host_driver.configure(memory_limit=0)\nfp.resume("t")',
        )
    )


@pytest.mark.parametrize("retain", [True, False])
def test_ctrl_c_ends_a_pause_that_waits_and_the_pool_is_still_active(retain):
    children.run_silently(
        INTERRUPTED.format(
            device="cpu",
            retain=retain,
            signal=int(signal.SIGINT),
            before="driver.hold(latch, stream)\nlatch.wait_until_held(1)",
            until='pool.state == "pausing"',
            call='fp.pause("t", timeout=None)',
            state="active",
            after='latch.open()\nfp.pause("t")\nfp.resume("t")',
        )
    )


def test_ctrl_c_ends_a_wait_for_a_fence():
    children.run_silently(
        INTERRUPTED.format(
            device="cpu",
            retain=True,
            signal=int(signal.SIGINT),
            before=(
                'fp.pause("t")\nfp.host_driver.configure(bandwidth=1 << 20)\n'
                'fence = fp.resume("t", order="explicit").fence'
            ),
            until='_core.call_counts(PROVIDER)["cuEventQuery"] > queries + 3',
            call="fence.synchronize(1000)",
            state="active",
            after="fp.host_driver.configure(bandwidth=0)\nfence.synchronize()",
        )
    )


def test_ctrl_c_during_a_context_ordered_resume_that_holds_the_host():
    """The copies are under way: they are ended, and the pool is paused again with its contents."""
    children.run_silently(
        INTERRUPTED.format(
            device="cpu",
            retain=True,
            signal=int(signal.SIGINT),
            before='fp.pause("t")\nfp.host_driver.configure(bandwidth=2 << 20)',
            until='_core.call_counts(PROVIDER)["cuMemcpyHtoDAsync"] > 0',
            call='fp.resume("t")',
            state="paused",
            after='fp.host_driver.configure(bandwidth=0)\nfp.resume("t")',
        )
    )
