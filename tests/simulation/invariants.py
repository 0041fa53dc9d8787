"""The invariants by their numbers: what each says, where it is asked, and so what a violation begins with.

The rule: a number that no check reports, or that no mutant proves, fails a test. `mutants` prints the table.
"""

from __future__ import annotations

# number -> (what holds, where it is asked)
INVARIANTS = {
    "I1": (
        "no operation is both published and aborted",
        "checks: at each link, at each answer, after each loss of power",
    ),
    "I2": ("what is published was prepared, exported and confirmed by the same lives", "checks._froze, at the link"),
    "I3": (
        "nobody opened or let work out between prepared and confirmed",
        "checks._froze; behaviour: leases; servers._send",
    ),
    "I4": ("no call is lost or doubled by a snapshot", "cut.check_cut, at the link; servers.acted_on"),
    "I5": ("a restore opens when all have loaded, or not at all", "checks._resumed, at each Resume"),
    "I6": ("an older epoch is not served, and the highest never falls", "checks.replied, at each answer; watch"),
    "I7": ("a coordinator that was replaced does not publish", "checks.linked"),
    "I8": ("an operation that has ended somewhere does not come back there", "checks.replied and doors_changed"),
    "I9": (
        "what is repeated has one effect and one answer",
        "checks._same; behaviour: closings, exports; servers._did",
    ),
    "I10": ("what was told published is there after any crash", "checks._is_whole, after each loss of power"),
    "I11": ("nobody goes on because of a snapshot that is not published", "checks._resumed, at each Resume"),
    "I12": ("every file of a snapshot is there, with its size and digest, and is of that cut", "checks._is_whole"),
    "I13": ("nothing of what was aborted is left, nothing that should stay is deleted", "checks.nothing_left"),
    "I14": ("one operation at a time", "behaviour.sent, at each Prepare and Restore; behaviour.replied"),
    "I15": ("an end is served in every state, within a second, without a disk", "behaviour.call_ended, at each end"),
    "I16": ("an attempt that was replaced has no effect", "servers._did and _not_again, at each call"),
    "I17": ("who takes part is fixed when an operation begins", "checks.linked"),
    "I18": ("the order of closing", "checks.doors_changed, at each door"),
    "I19": ("memory is bounded, and only what the epoch refuses is forgotten", "behaviour.watch"),
    "I20": ("no decision depends on the wall clock", "run.checked: a share of the seeds twice; clocks that jump"),
    "L1": ("nobody stays closed beyond the lease", "checks.watch and behaviour.watch; story._gone"),
    "L2": ("every operation ends, and everybody is found again", "story._settle"),
    "L3": ("the next save, the restore and every rollout succeed", "story._must_save, _restart and _finish"),
    "L4": ("a start is bounded, whoever hangs", "behaviour.coordinator_started"),
    "L5": (
        "a failure names its cause, before the deadline of whoever waits",
        "trainer.blame; behaviour.too_late; blame: single faults, 99 in 100 named",
    ),
}
