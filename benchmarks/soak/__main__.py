"""Kill, interrupt and starve the program at random moments: ``make soak``, or ``python -m soak`` in benchmarks/.

Every command that writes something is stopped at a random moment, by kill -9, by every other signal that ends a
program, by a full disk or by too little memory. What it leaves must be whole: the old result or the new one. A second
try must then lead to exactly what an undisturbed command leads to, with nothing left behind. Pairs of commands that
write to the same place run at once; one of them must win, and the other one must say so.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from soak.cases import CASES, FIT, Case, make_references, spelled_out
from soak.judge import broken_after_stop, different_in_the_end, inconsistent, is_complete, runs_in
from soak.programs import Ended, Limits, import_everything, run, start
from soak.ranks import kill_ranks

TRIES = 20  # commands that may end before the signal
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
OTHER_SIGNALS = (signal.SIGQUIT, signal.SIGABRT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGSEGV)
CASE = {case.name: case for case in CASES}
PAIRS: dict[str, tuple[Case, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "fit --force twice": (CASE["fit --force"], ((*FIT, "-k", "3", "--force"), (*FIT, "-k", "5", "--force"))),
    "fit twice": (CASE["fit"], ((*FIT, "-k", "3"), (*FIT, "-k", "5"))),
    "fit --resume twice": (CASE["fit --resume"], 2 * (CASE["fit --resume"].command,)),
    "repeat twice": (CASE["repeat"], 2 * (CASE["repeat"].command,)),
    "predict twice": (CASE["predict"], 2 * (CASE["predict"].command,)),
    "embed twice": (CASE["embed"], 2 * (CASE["embed"].command,)),
    "sort twice": (CASE["sort"], 2 * (CASE["sort"].command,)),
    "export twice": (CASE["export --to labelstudio"], 2 * (CASE["export --to labelstudio"].command,)),
    "export --force twice": (
        CASE["export --to labelstudio --force"],
        2 * (CASE["export --to labelstudio --force"].command,),
    ),
    "report while replaced": (
        CASE["fit --force"],
        (("report", "run", "--device", "cpu"), (*FIT, "-k", "3", "--force")),
    ),
}


class Soak:
    """Counts trials and problems."""

    def __init__(self, references: Path, scratch: Path, seconds: dict[str, float], seed: int) -> None:
        self.references = references
        self.scratch = scratch
        self.seconds = seconds
        self.random = random.Random(seed)
        self.trials: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []

    def folder(self) -> Path:
        """Return an empty folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def note(self, kind: str, problem: str) -> None:
        """Count a trial, and note what was wrong with it."""
        self.trials[kind] += 1
        if problem:
            self.problems.append(f"{kind}: {problem}")

    def stop(self, case: Case, number: int) -> None:
        """Stop a command by a signal at a random moment, then try again.

        A command that ended before the signal is checked but does not count: another one is started.
        """
        for _ in range(TRIES):
            if self._stop(case, number):
                return

    def _stop(self, case: Case, number: int) -> bool:
        """Return whether the signal arrived in time."""
        folder = self.folder()
        case.prepare(self.references, folder)
        child = start(spelled_out(case.command, self.references), folder)
        time.sleep(self.random.uniform(0, self.seconds[case.name]))
        child.signal(number)
        if number in CODES and self.random.random() < 0.5:  # an impatient second signal
            time.sleep(self.random.uniform(0, 0.05))
            child.signal(number)
        ended = child.wait()
        kind = "kill -9" if number == signal.SIGKILL else signal.Signals(number).name
        in_time = ended.code != 0
        self.ends["stopped" if in_time else "finished before"] += 1
        if not in_time:
            self.seconds[case.name] = min(ended.seconds, self.seconds[case.name])  # less else uses the machine now
        explained = ended.explained(0, -number, CODES.get(number, 0))
        problem = self._after(case, folder, ended, explained)
        if in_time or problem:
            self.note(f"{kind}, {case.name}", problem)
        shutil.rmtree(folder)
        return in_time

    def starve(self, case: Case, limits: Limits) -> None:
        """Run a command with too little memory or disk, then try again without the limit."""
        folder = self.folder()
        case.prepare(self.references, folder)
        ended = start(spelled_out(case.command, self.references), folder, limits).wait()
        kind = "small memory" if limits.memory is not None else "full disk"
        self.ends["managed" if ended.code == 0 else "starved"] += 1
        explained = ended.explained(0, 2)
        if limits.memory is not None and ended.by_library():
            self.ends["ended by a native library without memory"] += 1
            explained = True
        self.note(f"{kind}, {case.name}", self._after(case, folder, ended, explained))
        shutil.rmtree(folder)

    def _after(self, case: Case, folder: Path, ended: Ended, explained: bool) -> str:
        if not explained:
            return f"unexplained: code {ended.code}, {ended.errors[-300:]!r}"
        if problem := broken_after_stop(case, self.references, folder):
            return problem
        if ended.code != 0 and not is_complete(case, folder):
            again = run(spelled_out(case.second_try(folder), self.references), folder)
            if not again.explained(0):
                return f"lost: the second try ends with {again.code}, {again.errors[-300:]!r}"
        return different_in_the_end(case, self.references, folder)

    def pair(self, name: str) -> None:
        """Run two commands at once on the same target."""
        case, commands = PAIRS[name]
        folder = self.folder()
        case.prepare(self.references, folder)
        children = []
        for command in commands:
            children.append(start(spelled_out(command, self.references), folder))
            time.sleep(self.random.choice([0, 0, 0.05, self.seconds[case.name] / 2]))
        ends = [child.wait() for child in children]
        problem = ""
        if not all(ended.explained(0, 2) for ended in ends):
            problem = f"unexplained: {[(ended.code, ended.errors[-200:]) for ended in ends]}"
        elif all(ended.code != 0 for ended in ends):
            problem = f"lost: neither succeeded: {[ended.errors for ended in ends]}"
        elif case.appears:
            problem = different_in_the_end(case, self.references, folder)
        else:
            found = [text for path in runs_in(folder / case.result) if (text := inconsistent(path))]
            problem = found[0] if found else ""
        self.ends["both succeeded" if all(ended.code == 0 for ended in ends) else "one refused"] += 1
        self.note(f"pair, {name}", problem)
        shutil.rmtree(folder)


def main() -> int:
    """Run the trials and print a table."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--starved", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=20, help="kills of processes that torchrun started")
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of commands; all by default")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begun = time.monotonic()
    import_everything()
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        references = Path(place, "references")
        scratch = Path(place, "scratch")
        references.mkdir()
        scratch.mkdir()
        os.environ["SECU_DATA"] = str(references / "data")
        (references / "data").mkdir()
        soak = Soak(references, scratch, make_references(references), asked.seed)
        for work in _plan(soak, asked):
            if time.monotonic() - begun > 60 * asked.minutes:
                print("out of time", file=sys.stderr)
                break
            work()
        if asked.ranks:
            kills, problem = kill_ranks(references, soak.folder(), asked.ranks, soak.random)
            soak.note(f"kill -9 of a rank, {kills} times", problem)
    _print_table(soak, time.monotonic() - begun)
    return 1 if soak.problems else 0


def _plan(soak: Soak, asked: argparse.Namespace) -> list:
    """Return all trials in random order, so that a short time covers everything a little."""
    signals = (*CODES, *OTHER_SIGNALS)
    cases = [case for case in CASES if any(part in case.name for part in asked.only)]
    pairs = [name for name in PAIRS if any(part in name for part in asked.only)]
    trials = [lambda n=n: soak.stop(cases[n % len(cases)], signal.SIGKILL) for n in range(asked.kills)]
    trials += [lambda n=n: soak.stop(cases[n % len(cases)], signals[n % len(signals)]) for n in range(asked.signals)]
    trials += [lambda n=n: soak.pair(pairs[n % len(pairs)]) for n in range(asked.pairs if pairs else 0)]
    for n in range(asked.starved):
        disk = Limits(file_size=int(10 ** soak.random.uniform(2, 5.3)))  # exports are small, models are not
        limits = disk if n % 2 else Limits(memory=soak.random.randrange(1 << 28))
        trials.append(lambda n=n, limits=limits: soak.starve(cases[(n // 2) % len(cases)], limits))
    soak.random.shuffle(trials)
    return trials


def _print_table(soak: Soak, seconds: float) -> None:
    width = max(len(name) for name in soak.trials)
    print("seconds undisturbed:", {name: round(value, 1) for name, value in soak.seconds.items()})
    for name, count in sorted(soak.trials.items()):
        wrong = sum(problem.startswith(f"{name}: ") for problem in soak.problems)
        print(f"{name:{width}} {count:5} trials {wrong:3} problems")
    print(", ".join(f"{count} {name}" for name, count in sorted(soak.ends.items())))
    for kind in ("lost", "corrupt", "unexplained", "left behind"):
        print(f"{kind}: {sum(f': {kind}' in problem for problem in soak.problems)}")
    print(f"{sum(soak.trials.values())} trials in {seconds:.0f} s")
    for problem in soak.problems[:20]:
        print(problem)


if __name__ == "__main__":
    raise SystemExit(main())
