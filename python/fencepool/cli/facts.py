"""What the doctor knows of a machine. Plain data: checks read it, tests make it up, gather.py fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One device as the CUDA driver describes it. `attributes` has the keys of `fp.DeviceInfo.attributes`."""

    device: str
    name: str
    total_bytes: int
    attributes: Mapping[str, int] = field(default_factory=dict)

    def can(self, attribute: str) -> bool:
        """Whether the driver says that the device has `attribute`. One it does not mention, it has not."""
        return self.attributes.get(attribute, 0) > 0


@dataclass(frozen=True)
class Driver:
    """One provider of driver calls: libcuda, or the embedded driver."""

    is_available: bool
    reason: str = ""  # why not; empty when it is available
    version: tuple[int, int] | None = None  # the CUDA version it implements
    absent_calls: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Host memory, in bytes. None: not known, or (for a limit) no limit."""

    total: int | None = None
    available: int | None = None
    cgroup_version: int | None = None
    cgroup_limit: int | None = None
    cgroup_used: int | None = None  # without page cache that can be dropped
    locked_limit: int | None = None
    huge_pages: str | None = None  # "always", "madvise" or "never"


@dataclass(frozen=True)
class Disk:
    """The directory that FENCEPOOL_DISK_DIRECTORY names."""

    directory: str
    problem: str = ""  # why no backup can be there; empty when one can
    free: int = 0  # bytes
    is_direct: bool = True  # files are read and written past the page cache


@dataclass(frozen=True)
class Packages:
    """Installed distributions, as their metadata says. Nothing is imported to find out."""

    versions: Mapping[str, str] = field(default_factory=dict)  # those installed, of gather.DISTRIBUTIONS
    torch_cuda: str | None = None  # the CUDA version PyTorch was built for; None: a build without CUDA
    torch_hip: str | None = None  # the ROCm version PyTorch was built for
    # Names of fencepool's entry points in the engines' groups, sglang.srt.plugins and vllm.general_plugins.
    sglang_plugins: tuple[str, ...] = ()
    vllm_plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything the checks may look at."""

    fencepool: str
    python: str
    system: str  # operating system and processor
    cuda: Driver
    embedded: Driver
    has_kernels: bool  # for GPUs, in this build of the extension
    kernel_driver: str | None  # the NVIDIA kernel module's version; None: not loaded
    memory: Memory = field(default_factory=Memory)
    disk: Disk | None = None  # None: none is named
    packages: Packages = field(default_factory=Packages)
    environment: Mapping[str, str] = field(default_factory=dict)  # those set, of gather.VARIABLES

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs the CUDA driver shows to this process."""
        return self.cuda.gpus if self.cuda.is_available else ()
