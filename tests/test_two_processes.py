"""Two processes on one GPU, of which only one at a time has room: what one pauses the other resumes into.

On a GPU only: the embedded driver keeps an account for each process, so there two never compete.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

import fencepool as fp
from support import children
from support.machine import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.soak, pytest.mark.timeout(400)]

TURNS = 200  # hand-overs, in both processes together
SETTLED = 20  # turns until arenas, modules and caches have their size
RACES = 10  # cycles of each process without taking turns
PATIENCE = 120.0  # seconds that a resume waits for memory
LIMIT = 300.0  # seconds for a whole program
SLACK = 64 * MIB  # what allocators, here and in the driver, may keep for themselves; not 1 MiB a cycle

# A program has the first device's memory but for a tenth while it is active, in segments of 1 GiB.
PROGRAM = """
import json, select, time

DEVICE, BYTES, ME, PATIENCE = {device!r}, {bytes}, {me}, {patience}
PROVIDER = "host" if DEVICE == "cpu" else "cuda"
SMALL, SPOT, SEGMENT = 8 << 20, 1 << 20, {segment}
mine, other = (os.open({fifos!r} + str(number), os.O_RDWR) for number in (ME, 1 - ME))
driver = raw.Driver(PROVIDER)

def ok(result):
    status, *outputs = result if isinstance(result, tuple) else (result,)
    assert status == 0, f"CUresult {{status}}"
    return outputs[0] if len(outputs) == 1 else tuple(outputs)

ok(driver.push(ok(driver.primary_retain(ok(driver.device_get(0))))))
stream = ok(driver.stream_create(1))

def tell(word):
    os.write(other, word)

def hear(word):
    assert select.select([mine], [], [], 2 * PATIENCE)[0], f"the other has not said {{word}}"
    said = os.read(mine, 1)
    assert said == word, f"heard {{said}} instead of {{word}}"

def write(address, size, value):
    ok(driver.memset_d8(address, value, size, stream))

def read(address, size):
    buffer = ctypes.create_string_buffer(size)
    ok(driver.memcpy_dtoh(ctypes.addressof(buffer), address, size, stream))
    ok(driver.stream_synchronize(stream))
    return buffer.raw

big = fp.pool("big", DEVICE, fill="zero")
small = fp.pool("small", DEVICE, backup="host")

def allocate():
    global pages, kept, spots
    pages = big._core.allocate_batch([SEGMENT] * (BYTES // SEGMENT))
    kept = small._core.allocate_batch([SMALL, SMALL])
    spots = [place for page in (pages[0], pages[len(pages) // 2], pages[-1])
             for place in (page.address, page.address + SEGMENT - SPOT)]

def dirty(turn):
    for spot in spots:
        write(spot, SPOT, 0xA5)
    for number, block in enumerate(kept):
        write(block.address, SMALL, (2 * turn + number) % 256)

def check(turn):
    for spot in spots:
        assert read(spot, SPOT) == bytes(SPOT), "not zero after a resume"
    for number, block in enumerate(kept):
        value = (2 * turn + number) % 256
        assert read(block.address, SMALL) == bytes([value]) * SMALL, "the contents are lost"

def use(turn):
    check(turn - 1)
    dirty(turn)

def process():
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {{
        "resident": int(fields["VmRSS"].split()[0]) * 1024,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }}

def meet():
    "What is held while both are paused."
    tell(b"p"); hear(b"p")
    held = {{**process(), "free": fp.memory_info(DEVICE)[0]}}
    tell(b"m"); hear(b"m")
    return held

def begin():
    "Both have their memory in turn, and are paused then."
    if ME == 1:
        hear(b"b")
    allocate()
    dirty(0)
    fp.pause()
    if ME == 0:
        tell(b"b")
    return meet()
"""

TAKE_TURNS = """
begin()
before = _core.call_counts(PROVIDER)["cuMemCreate"]
cycles = 0

def take_turns(first, last):
    global cycles
    for turn in range(first, last):
        if turn % 2 == ME:
            if turn > first:
                hear(b"g")
            fp.resume(wait=PATIENCE)
            cycles += 1
            use(cycles)
            if turn + 1 < last:
                tell(b"g")  # before the pause: the other asks for memory that is still held
            fp.pause()
    return meet()

early = take_turns(0, {settled})
late = take_turns({settled}, {turns})
creates = _core.call_counts(PROVIDER)["cuMemCreate"] - before

# Without turns: whoever loses asks again until the other has done all of its cycles.
for _ in range({races}):
    fp.resume(wait=PATIENCE)
    cycles += 1
    use(cycles)
    fp.pause()
last = meet()
tries = creates / sum(pool.status().segments for pool in (big, small))
print(json.dumps({{"early": early, "late": late, "last": last, "tries": tries}}))
assert _core.problems() == [], _core.problems()
"""

HOLD_UNTIL_KILLED = """
begin()
fp.resume(wait=PATIENCE)
tell(b"g")
threading.Event().wait(PATIENCE)
"""

OUTLIVE = """
begin()
hear(b"g")
try:
    fp.resume()
except fp.OutOfMemoryError:
    pass
else:
    raise SystemExit("there was room for both")
print("short", flush=True)
fp.resume(wait=PATIENCE)
check(0)
print("resumed")
"""


def start(tmp_path, me: int, program: str, share: int, device="cuda:0", segment=1 << 30):
    code = PROGRAM.format(
        device=device, bytes=share, me=me, patience=PATIENCE, segment=segment, fifos=f"{tmp_path}/to-"
    )
    return children.start(code + program)


def room(segment: int = 1 << 30) -> int:
    """Nine tenths of what is free, in whole segments."""
    return fp.memory_info("cuda:0")[0] * 9 // 10 // segment * segment


@pytest.fixture
def pair(tmp_path):
    """Starts a program in each of two processes, which end with the test."""
    for number in range(2):
        os.mkfifo(f"{tmp_path}/to-{number}")
    started = []

    def begin(first: str, second: str, share: int, **options):
        for me, program in enumerate((first, second)):
            started.append(start(tmp_path, me, program, share, **options))
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def results(processes) -> list[dict]:
    """What each says at its end."""
    with ThreadPoolExecutor(len(processes)) as threads:
        ends = {threads.submit(process.communicate, timeout=LIMIT): process for process in processes}
        for end in as_completed(ends):
            if ends[end].returncode != 0:
                for process in processes:  # the others would wait for it
                    process.kill()
            assert ends[end].returncode == 0, end.result()[1][-3000:]
    return [json.loads(end.result()[0]) for end in ends]


def take_turns(pair, share: int, turns: int, settled: int, races: int, **options) -> list[dict]:
    program = TAKE_TURNS.format(turns=turns, settled=settled, races=races)
    return results(pair(program, program, share, **options))


def test_two_processes_resume_into_what_the_other_pauses(pair):
    said = take_turns(pair, room(), TURNS, SETTLED, RACES)
    for one in said:
        for later in (one["late"], one["last"]):
            assert later["free"] >= one["early"]["free"] - SLACK
            assert later["resident"] <= one["early"]["resident"] + SLACK
            assert later["threads"] <= one["early"]["threads"]
            assert later["descriptors"] <= one["early"]["descriptors"]
    # They did compete: memory was asked for more often than once a turn.
    assert sum(one["tries"] for one in said) > TURNS


def test_what_a_killed_process_held_is_there_for_the_other(pair):
    holder, waiter = pair(HOLD_UNTIL_KILLED, OUTLIVE, room())
    said = waiter.stdout.readline()
    assert said == "short\n", waiter.communicate(timeout=LIMIT)[1][-3000:]
    holder.send_signal(signal.SIGKILL)
    output, errors = waiter.communicate(timeout=LIMIT)
    assert (waiter.returncode, output) == (0, "resumed\n"), errors[-3000:]
