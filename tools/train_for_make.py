"""Run a training for `make`, to which a run that was stopped and saved is no error, as exit code 75 would be.

    python tools/train_for_make.py COMMAND ...    the exit code of the command; 0 for 75, pre-empted and saved

The command gets the signals that reach this process alone, such as SIGTERM from make. Ctrl-C goes to all
processes of the terminal, so this one only waits for the end of the save.
"""

import signal
import subprocess
import sys

PREEMPTED = 75
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(command: list[str]) -> int:
    """Run a command; returns its exit code, 128 + N if signal N ended it, 0 if it was stopped and saved."""
    started: list[subprocess.Popen] = []

    def pass_on(number: int, _: object) -> None:
        for process in started:
            process.send_signal(number)

    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the command would inherit
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, pass_on)
    started.append(subprocess.Popen(command))
    code = started[0].wait()
    if code < 0:
        return 128 - code
    return 0 if code == PREEMPTED else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
