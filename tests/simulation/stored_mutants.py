"""Guards of a root that is in an object store. The simulation has disks only, so each is proved by a test of its own."""

from __future__ import annotations

_WHY = "simulated roots are on disks"
_JOURNAL = "coordinator.journal_stored"
_TESTS = "tests/coordinator/test_journal_stored.py::"
_ROOTS = "tests/coordinator/test_roots.py::"

# name, check, guard, module, before, after, test, why
STORED = (
    ("a start seals older logs", "I7", "a coordinator that slept is told by its next entry", _JOURNAL,
     "                self._names.create(_key(epoch, found.next), line(seal))\n", "                pass\n",
     _TESTS + "test_in_every_order_of_entry_and_seal_what_was_acknowledged_is_known_to_the_next_and_nothing_else", _WHY),
    ("what is refused is compared", "I9", "an earlier try of ours whose answer was lost is ours", "coordinator.wire.names",
     "                    if self._has(key, data):\n                        return\n", "                    pass\n",
     "tests/wire/test_names.py::test_a_lost_answer_is_settled_and_the_name_is_ours", _WHY),
    ("what is there is somebody's", "I1", "a name that has other bytes was made by somebody else", "coordinator.wire.names",
     "                    if self._has(key, data):\n", "                    if True:\n",
     "tests/wire/test_names.py::test_a_lost_answer_never_passes_for_being_the_first", _WHY),
    ("a publish never replaces", "I1", "who makes the manifest's name first has decided", "coordinator.wire.stored_folder",
     "        self._names.create(key, data)\n", "        self._names.replace(key, data if isinstance(data, bytes) else b\"\")\n",
     _ROOTS + "test_in_every_order_of_publish_and_give_up_both_know_the_same", _WHY),
    ("a number in doubt is settled", "I11", "an entry that was refused is never there later", _JOURNAL,
     "                with suppress(SafepointError):\n                    made = self._settle()\n", "                self._doubt = None\n",
     _TESTS + "test_a_request_that_comes_late_after_its_number_was_given_up_changes_nothing", _WHY),
    ("directories are numbered", "I7", "who slept writes into the directory that it had open", "coordinator.wire.stored_folder",
     "        number += 1\n", "        number = 1\n",
     "tests/wire/test_stored_folder.py::test_who_has_a_folder_open_writes_into_that_one_also_when_its_name_is_given_away_again", _WHY),
    ("old chunks are not relied upon", "I13", "a save relies on no object that a sweep may delete", "coordinator.wire.stored_chunks",
     "            if self._until.get(chunk, 0.0) > self._clock():\n                return False\n",
     "            if chunk in self._until:\n                return False\n",
     "tests/shims/test_exports.py::test_a_sweep_deletes_what_nothing_names_and_never_what_a_save_has_just_relied_upon", _WHY),
)  # fmt: skip
