"""The fault matrix: every row with its fault, what is expected, its number of cases, and the function of one.

    few     cases in `make test-full`            all     cases in `make faults`

A case is `run(place, seed)`: it raises, or returns in a word which kind it was. A new row is one entry here
and a function in a file of this folder; `by_tests` makes one of tests that are elsewhere: all of them, with
--full, in one call; it has no cases in `make test-full`, which runs those tests anyway.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import damage, exact, hangs, kills, machines, soak, stops
from tests.faults.runs import ROOT, Place


@dataclass(frozen=True)
class Row:
    """A row. whole: one call runs all, and says how many. minutes: of a case, if it is given a time.

    skip: says why this machine cannot run it, or nothing.
    """

    id: str
    fault: str
    expected: str
    few: int
    all: int
    run: Callable[[Place, int], str]
    whole: bool = False
    minutes: float = 0.0
    skip: Callable[[], str] = lambda: ""


def by_tests(id: str, fault: str, expected: str, *words: str) -> Row:
    """A row whose cases are tests: the words of a pytest command, which must pass."""

    def run(place: Place, seed: int) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "--full", "--tb=short", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=1800)
        lines = done.stdout.strip().splitlines()
        assert done.returncode == 0, "\n".join(lines[-15:])
        passed, skipped = (re.search(rf"(\d+) {how}", lines[-1]) for how in ("passed", "skipped"))
        assert passed, f"no test has run: {lines[-1]}"
        return f"{passed[1]} tests" + (f", {skipped[1]} skipped" if skipped else "")

    return Row(id, fault, expected, 0, 1, run, whole=True)


ROWS = (
    Row(
        "K1",
        "SIGKILL to a random rank at a random moment, saves included; dp, tp with sp, pp, cp, tp x pp; "
        "one in five under `torchrun --max-restarts`, else the same command again",
        "equal; no more steps again than lie between two saves, with the same losses",
        6,
        80,
        kills.k1,
    ),
    Row(
        "K2",
        "SIGKILL at 8 points inside a save, from its first file to the removal of an old checkpoint",
        "the newest complete one is loaded; the step is saved again; equal",
        8,
        40,
        kills.k2,
    ),
    Row("K3", "SIGKILL to the launcher or agent and all ranks; the same command", "equal", 2, 10, kills.k3),
    Row(
        "K4",
        "three kills in one run under torchrun; more kills than it may restart",
        "equal; else another exit code than 0, and status.json names the checkpoints",
        1,
        6,
        kills.k4,
    ),
    Row(
        "K5", "`torchrun --standalone --max-restarts=3`, a rank killed", "it recovers; equal", 2, 8, kills.k5
    ),
    Row(
        "M1",
        "SIGKILL to a random rank of two machines (network namespaces, `torchrun --nnodes 2`)",
        "both machines start again; equal",
        1,
        20,
        machines.m1,
        skip=machines.not_permitted,
    ),
    Row(
        "T1",
        "SIGTERM to the launcher or torchrun: in set-up, a step, an evaluation, a save",
        "saved at the next step, none lost, out within 25 seconds, `preempted`; again: equal",
        4,
        20,
        stops.t1,
    ),
    Row("T2", "SIGTERM to one rank", "all ranks save the same step; again: equal", 2, 10, stops.t2),
    Row(
        "T3",
        "a rank is killed, the others get SIGTERM",
        "out within 5 seconds; no save begun, nothing published",
        2,
        10,
        stops.t3,
    ),
    Row("T4", "Ctrl-C once, twice", "once saves; twice leaves at once; again: equal", 2, 4, stops.t4),
    Row(
        "H1",
        "SIGSTOP to each rank of tp x pp, `--hang-timeout-secs 10`",
        "the rank is named within 12 seconds, with the stacks of all others",
        1,
        8,
        hangs.h1,
    ),
    Row(
        "L1",
        "the cable between two machines is cut",
        "the ranks that do not answer are named within 30 seconds",
        1,
        4,
        machines.l1,
        skip=machines.not_permitted,
    ),
    by_tests(
        "H2",
        "one rank leaves out a collective, or swaps two: each rank of tp x dp",
        "kind, bytes, axis, number and rank in the message; none waits longer than the limit",
        "tests/faults/test_watchdog.py::test_collectives_out_of_order",
    ),
    by_tests(
        "H3",
        "a fifth of a second of sleep in each step of one rank, 4 layouts; 20 clean runs",
        "the rank is named within 3 windows; no false alarm",
        "tests/faults/test_stragglers.py",
    ),
    Row(
        "S1",
        "one flipped bit in a shard, the manifest, its sum",
        "found, the file named, the checkpoint before it loaded",
        30,
        400,
        damage.s1,
    ),
    Row(
        "S2",
        "each file of a checkpoint cut to 0 bytes, 1, half, by 1, removed; of 5 layouts",
        "the same",
        1,
        5,
        damage.s2,
    ),
    Row(
        "S3",
        "all checkpoints damaged; `--load` of nothing; an empty folder; a newer format",
        "exit code 3 and what was tried; never random weights",
        4,
        4,
        damage.s3,
    ),
    by_tests(
        "S4",
        "no room for a file, at 10 sizes; EIO, ENOSPC, EROFS, EACCES at each fsync; in all formats",
        "the checkpoint before is whole; bytes needed and free are said; the run ends or continues as asked",
        "tests/checkpoint/test_checkpoint.py::test_full_disk_on_one_rank_fails_on_all",
        "tests/checkpoint/test_checkpoint.py::test_too_little_room_is_seen_before_writing",
        "tests/checkpoint/test_checkpoint.py::test_every_failing_fsync_is_an_error",
        "tests/checkpoint/test_formats.py::test_every_failing_fsync_ends_a_save",
        "tests/launch/test_saves.py::test_a_writer_without_room_ends_the_run_at_once",
        "tests/launch/test_saves.py::test_a_writer_without_room_is_a_warning_until_the_end",
    ),
    by_tests(
        "S5",
        "killed at 7 points while old checkpoints are removed, `--keep-last-k` 2, 3, 5; links",
        "k whole ones at any time; what a link points to is untouched",
        "tests/checkpoint/test_retention.py",
    ),
    by_tests(
        "S6",
        "`--async-save`: the writer fails; it or its rank is killed at 10 points; the next save comes early",
        "the bytes of a synchronous save; an error is known one step later",
        "tests/checkpoint/test_async_save.py",
        "tests/launch/test_saves.py::test_training_beside_a_save_changes_nothing",
        "tests/launch/test_saves.py::test_the_flags_of_retention_reach_a_run",
    ),
    by_tests(
        "S7",
        "checkpoints and a run of earlier versions",
        "they load, equal to a kept hash",
        "tests/checkpoint/test_manifest.py::test_a_kept_checkpoint_loads",
        "tests/test_old_runs.py",
    ),
    by_tests(
        "S8",
        "folders of checkpoints are missing, moved, renamed, links; the run's records know of them",
        "exit code 3, what knows of them and what is missing; links are followed and stay",
        "tests/faults/test_history.py",
    ),
    by_tests(
        "X1",
        "each of 12 layouts loads what each other one has saved: 132 pairs; 20 in bf16",
        "weights and moments equal; the next loss to 1e-6",
        "tests/checkpoint/test_reshard.py",
    ),
    Row(
        "X2",
        "5 kills in 3 epochs, every sample written down",
        "none lost, none twice, the same order",
        1,
        4,
        exact.x2,
    ),
    by_tests(
        "X3",
        "`--elastic`: 5 changes of the number of processes in 3 epochs; torchrun with fewer",
        "as for X2; the losses to 1e-6",
        "tests/faults/test_elastic.py",
    ),
    Row("D1", "the same command twice, 10 layouts, dropout", "equal", 3, 10, exact.d1),
    Row(
        "D2",
        "stopped and resumed after each step of 20; recomputation off, full, selective",
        "equal",
        20,
        60,
        exact.d2,
    ),
    by_tests(
        "D3",
        "resumed with other threads, seed, data, tokenizer, batch size, length",
        "a warning or an error that says what differs",
        "tests/data/test_bad_data.py::test_no_change_of_a_resumed_run_is_silent",
        "tests/data/test_identity.py",
        "tests/test_train.py::test_what_cannot_go_on_is_an_error",
    ),
    by_tests(
        "N1",
        "NaN, Inf, -Inf in loss, gradient, weight, moments, on each rank of tp x pp: 51 in one test",
        "no update; tensor and rank named; all ranks end alike; never in a checkpoint",
        "tests/faults/test_health.py::test_what_is_not_finite_is_caught_before_the_update_and_named",
        "tests/faults/test_health.py::test_a_dead_run_stops",
        "tests/faults/test_health.py::test_a_checkpoint_that_is_not_finite_is_never_published",
    ),
    by_tests(
        "N2",
        "a bad gradient that does not come again when the step is run again, or does",
        "exit code 17 and the rank; else the run continues, as without it",
        "tests/faults/test_health.py::test_a_step_run_again_tells_a_faulty_machine_from_bad_data",
        "tests/faults/test_health.py::test_small_state_is_restored_before_a_step_is_run_again",
    ),
    by_tests(
        "N3",
        "a loss or gradient many times too large; 20 calm runs (`--lr 3e-4`) of 200 steps in one test",
        "flagged in that step, skipped or undone as asked; no false alarm",
        "tests/faults/test_health.py::test_a_loss_ten_times_too_large_is_flagged",
        "tests/faults/test_health.py::test_a_spike_is_skipped_or_only_named",
        "tests/faults/test_health.py::test_a_rollback_is_a_run_that_never_read_those_samples",
        "tests/faults/test_health.py::test_limits_are_median_and_robust_deviations",
        "tests/faults/test_health.py::test_no_spike_in_clean_runs",
    ),
    by_tests(
        "N4",
        "a bit of a weight flips on one of the replicas",
        "the rank is named in the next comparison; nothing saved",
        "tests/faults/test_replicas.py",
    ),
    Row(
        "N5",
        "an update makes weights that are finite and dead; `torchrun --max-restarts 3`, `--keep-last-k 2`",
        "no checkpoint published or removed; exit code 16; with a sane rate the run continues",
        1,
        5,
        damage.n5,
    ),
    by_tests(
        "I1",
        "231 command lines that are wrong",
        "exit code 2 at once; flag, value, rule and fix are said",
        "tests/config/test_bad_configs.py",
    ),
    by_tests(
        "I2",
        "text of 10 kinds that is not JSON lines, 2 modes each in one test",
        "the numbers of the lines; the same tokens of the good ones",
        "tests/data/test_bad_data.py::test_bad_lines_have_numbers_and_good_ones_their_tokens",
        "tests/data/test_bad_data.py::test_what_is_between_documents_changes_no_token",
        "tests/data/test_preprocess.py::test_a_bad_line_stops_it",
    ),
    by_tests(
        "I3",
        "SIGKILL to preprocess.py, ten times with 1 worker and with 2",
        "never half a file that loads; again: the same bytes",
        "tests/data/test_bad_data.py::test_killed_at_any_time",
        "tests/data/test_preprocess.py::test_killed_in_the_middle",
    ),
    by_tests(
        "I4",
        "1000 damaged .idx and .bin; 1000 flipped bits for `--verify-data`",
        "an error, or the same data; all flips found",
        "tests/data/test_fuzz.py",
        "tests/data/test_verify.py",
    ),
    by_tests(
        "I5",
        "8 kinds of tokens and data that do not fit, 1 rank and tp",
        "an error before the first step, the same text",
        "tests/data/test_bad_data.py::test_unfit_tokens_are_said_alike_by_every_layout",
    ),
    by_tests(
        "Z1",
        "pickles that would tell, in every place that is read: 36 in one test",
        "none is run",
        "tests/checkpoint/test_security.py::test_no_pickle_is_opened",
        "tests/checkpoint/test_files.py::test_shard_that_is_none_is_refused",
        "tests/checkpoint/test_foreign.py",
    ),
    by_tests(
        "Z2",
        "pickle, eval, shell and the like anywhere in the program",
        "none",
        "tests/house/test_style.py::test_nothing_runs_foreign_code",
        "tests/house/test_style.py::test_the_rules_themselves",
    ),
    by_tests(
        "Z3",
        "names that leave the folder, sizes that no file has; 2000 random changes of a manifest in one test",
        "refused at once, without memory; nothing written elsewhere",
        "tests/checkpoint/test_security.py::test_names_in_an_index_stay_in_the_folder",
        "tests/checkpoint/test_security.py::test_sizes_in_a_file_are_checked",
        "tests/checkpoint/test_files.py::test_forged_manifest_is_refused",
        "tests/checkpoint/test_files.py::test_sizes_that_the_file_cannot_hold_are_refused",
        "tests/checkpoint/test_files.py::test_random_changes_of_numbers_are_refused_or_harmless",
        "tests/checkpoint/test_files.py::test_oversized_manifest_is_not_read",
    ),
    by_tests(
        "Z4",
        "the sockets of ranks, launcher and fork server; no network at all",
        "only the loopback interface is listened to; the run is done",
        "tests/checkpoint/test_security.py::test_ranks_of_one_machine_listen_to_it_alone",
        "tests/checkpoint/test_security.py::test_a_run_needs_no_network",
    ),
    by_tests(
        "Z5",
        "a secret in the environment of a run, of which a rank is killed",
        "in no log, checkpoint or status file",
        "tests/checkpoint/test_security.py::test_the_program_listens_to_its_machine_alone",
    ),
    Row(
        "Q1", "half an hour with a fault each minute", "it ends by itself; equal", 0, 1, soak.q1, minutes=30.0
    ),
)
