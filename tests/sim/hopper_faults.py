"""Bugs planted in kernels/pipeline.cu, one at a time, and what each may bring to light, by the order of threads."""

from __future__ import annotations

from dataclasses import dataclass

RACE = "data race"
DEADLOCK = "deadlock"
READ_EARLY = "asynchronous copy read before it was waited for"
UNWRITTEN = "read of memory that nothing wrote"
HELD = "buffer overwritten while a pending instruction reads it"
ARRIVALS = "more arrivals than a phase expects"
UNFENCED = "access of the async proxy without fence.proxy.async"
REGISTERS = "registers of a pending instruction written"
UNKNOWN = "barrier used before it was initialized"
WRONG, NOTHING = "wrong result", "nothing"


@dataclass(frozen=True)
class Fault:
    """One change of the pipeline."""

    name: str
    there: str  # once in the kernel
    instead: str
    kinds: tuple[str, ...]  # of the first report, or what becomes of a run without any

    @property
    def entry(self) -> str:
        """The name of the kernel."""
        return self.name.replace(" ", "_")


FAULTS = [Fault(name, there, instead, tuple(kinds)) for name, there, instead, *kinds in (
    ("no proxy fence",
     "  ptx::fence_proxy_async();",
     "",
     UNFENCED),
    ("no barrier after store",
     "  __syncthreads();",
     "",
     RACE, UNWRITTEN),
    ("no wgmma fence",
     "    ptx::wgmma_fence();",
     "",
     "wgmma without a fence"),
    ("no wgmma wait",
     "  ptx::wgmma_wait<0>();\n}",
     "}",
     WRONG),
    ("waits for one group less",
     "ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3",
     "ptx::wgmma_wait<1>();\n    ptx::barrier_sync(3",
     HELD),
    ("operand changed",
     "    ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3",
     "    p[1][2] ^= 1;\n    ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3",
     REGISTERS),
    ("full not waited for",
     "    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), tile / kStages % 2);",
     "",
     READ_EARLY, RACE),
    ("full of wrong phase",
     "tile / kStages % 2);",
     "(tile / kStages + 1) % 2);",
     READ_EARLY, RACE, DEADLOCK),
    ("empty not waited for",
     "if (tile >= kStages) ptx::mbarrier_wait(",
     "if (tile < 0) ptx::mbarrier_wait(",
     ARRIVALS),
    ("empty of wrong phase",
     "(tile / kStages - 1) % 2);",
     "tile / kStages % 2);",
     ARRIVALS),
    ("too few bytes announced",
     "sizeof(shared.b[0]) + sizeof(shared.v[0]));",
     "sizeof(shared.b[0]));",
     READ_EARLY, DEADLOCK, RACE),
    ("stage released by the first warp",
     "    ptx::barrier_sync(3 + consumer, kWarpgroup);",
     "",
     HELD, RACE),
    ("misaligned descriptor",
     "matrix_descriptor<ChannelRows>(ptx::shared_address(shared.v[stage]))",
     "matrix_descriptor<ChannelRows>(ptx::shared_address(shared.v[stage]) + 128)",
     "misaligned descriptor"),
    ("misaligned copy",
     "ptx::shared_address(shared.v[stage]), params.v +",
     "ptx::shared_address(shared.v[stage]) + 8, params.v +",
     "misaligned access"),
    ("copy beyond the end",
     "    ptx::bulk_copy(ptx::shared_address(shared.b[stage]), params.b + static_cast<i64>(tile)",
     "    ptx::bulk_copy(ptx::shared_address(shared.b[stage]), params.b + static_cast<i64>(tile + 1)",
     "access outside an allocation"),
    ("barrier not initialized",
     "      ptx::mbarrier_init(ptx::shared_address(&memory.empty[stage]), kConsumers);\n",
     "",
     UNKNOWN),
    ("initialization not fenced",
     "    ptx::fence_mbarrier_init();\n",
     "",
     "barrier initialized without a fence for the async proxy"),
    ("too many arrivals",
     "if (thread == 0) ptx::mbarrier_arrive(",
     "if (thread < 2) ptx::mbarrier_arrive(",
     HELD, RACE, READ_EARLY, DEADLOCK),
    ("different counts",
     "ptx::barrier_sync(barrier_of(consumer), 2 * kWarpgroup);",
     "ptx::barrier_sync(barrier_of(consumer), kWarpgroup);",
     "barrier of different counts"),
    ("arrival for the other consumer left out",
     "if (consumer == 0 || tile + 1 < params.tiles) ptx::barrier_arrive",
     "if (consumer == 1) ptx::barrier_arrive",
     DEADLOCK),
    ("one arrival for the other consumer too many",
     "if (consumer == 0 || tile + 1 < params.tiles) ptx::barrier_arrive",
     "ptx::barrier_arrive",
     "barrier that not all threads reach"),
    ("too many registers",
     "setmaxnreg_inc<232>",
     "setmaxnreg_inc<256>",
     "more registers than there are"),
    ("warp left out",
     "    if (registers) ptx::wgmma",
     "    if (ptx::thread_index() / 32 == 5) continue;\n    if (registers) ptx::wgmma",
     "warps of a warpgroup diverge"),
    ("lanes differ",
     "v_tile + descriptor_offset<ChannelRows>(k), k > 0",
     "v_tile + descriptor_offset<ChannelRows>(k) + lane % 2 * 512, k > 0",
     "threads diverge"),
    ("stage stored to before its copy",
     "    ptx::mbarrier_arrive_expect_tx(full",
     "    shared.b[stage][0] = 0;\n    ptx::mbarrier_arrive_expect_tx(full",
     UNFENCED),
    ("barrier of all threads used by number",
     "ptx::barrier_sync(3 + consumer",
     "ptx::barrier_sync(0",
     "barrier that cannot be"),
)]

HARMLESS = [
    Fault("either fence makes a barrier known to the async proxy",
          "ptx::fence_mbarrier_init()", "ptx::fence_proxy_async()", (NOTHING,)),
]
"""Changes that break nothing, and of which nothing may be reported."""
